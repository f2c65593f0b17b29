"""Check a built image without a device: python smoke.py cpu|cuda|npu. An AssertionError says what is wrong.

For npu, set TORCH_DEVICE_BACKEND_AUTOLOAD=0: `import torch` would import torch_npu, which needs the driver.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

import torch

PINNED = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)


def main(target: str, constraints: list[Path]) -> None:
    """Compare what is installed with the constraints, and import what imports without a device."""
    installed = {_canonical(found.name): found.version for found in importlib.metadata.distributions(path=_own_path())}
    pins = {_canonical(name): version for path in constraints for name, version in PINNED.findall(path.read_text())}
    for name, version in sorted(installed.items()):
        if name not in ("multilora", "pip"):
            assert pins.get(name) == version.partition("+")[0], (
                f"{name} {version} is installed, pinned: {pins.get(name)}"
            )
    is_cuda_build = torch.version.cuda is not None
    assert is_cuda_build == (target == "cuda"), f"torch {torch.__version__} is the wrong build for {target}"
    assert ("triton" in installed) == (target == "cuda"), "upstream's Triton belongs into the cuda image alone"
    assert ("triton-ascend" in installed) == (target == "npu")
    if target != "cpu":
        import triton

        assert triton.__version__ == installed["triton-ascend" if target == "npu" else "triton"]
    if target == "npu":
        assert installed["torch-npu"].partition(".post")[0] == installed["torch"].partition("+")[0]
        source = Path(triton.__file__).parent / "backends" / "ascend" / "npu_utils.cpp"
        assert "RT_LIMIT_TYPE_SIMT" not in source.read_text(), "triton-ascend is not patched"
    import service.server.app

    assert Path(service.server.app.__file__).is_relative_to("/opt/multilora/src")
    print(f"smoke: {target}: {len(installed)} distributions, torch {torch.__version__}")


def _own_path() -> list[str]:
    return [path for path in sys.path if path.startswith(sys.prefix)]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(sys.argv[1], [Path(argument) for argument in sys.argv[2:]])
