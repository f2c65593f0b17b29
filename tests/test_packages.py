"""The packages themselves: their names, what they import, and that transformers is not confused by `kernels`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _run(code: str, *, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("model", ["Llama", "Lfm2", "Qwen3_5"])
def test_transformers_builds_models_beside_our_kernels_package(model: str) -> None:
    """Hugging Face's own package is called `kernels` too, and transformers looks for it by that name."""
    code = f"""
import kernels, torch, transformers
assert kernels.MULTILORA_KERNELS
name = {model!r}
config_class = getattr(transformers, name + ("TextConfig" if name == "Qwen3_5" else "Config"))
sizes = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
             vocab_size=64)
if name == "Lfm2":
    sizes["layer_types"] = ["conv", "full_attention"] * 2
model = getattr(transformers, name + "ForCausalLM")(config_class(**sizes))
print(model(torch.arange(4)[None]).logits.shape[-1])
"""
    assert _run(code) == "64"


def test_every_package_is_listed_in_pyproject() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("service", "kernels", "adapters")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed == present


def test_importing_the_packages_is_light() -> None:
    """Every `__init__` stays light: importing the packages brings in neither torch nor numpy."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    heavy = "sorted({'torch', 'numpy', 'transformers', 'fastapi', 'pydantic'} & set(sys.modules))"
    assert _run(f"import sys, {', '.join(packages)}; print({heavy})") == "[]"


def test_imports_point_one_way() -> None:
    """api -> engine -> models -> kernels; adapters knows the kernels' weight layout and nothing of the service."""
    forbidden = {"kernels": ("service", "adapters"), "adapters": ("service",), "service/models": ("service.api",)}
    forbidden["service/engine"] = ("service.api", "service.text", "service.app")
    for folder, modules in forbidden.items():
        for path in (ROOT / folder).rglob("*.py"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                words = line.split()
                if len(words) > 1 and words[0] in ("import", "from"):
                    target = words[1]
                    wrong = [m for m in modules if target == m or target.startswith(m + ".")]
                    assert not wrong, f"{path}:{number} imports {target}"
