"""What the parity run needs: so little that it can be taken to a machine that has a GPU and not much else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from kernels.platform import IMPLEMENTATIONS

ROOT = Path(__file__).parents[2]
OUR_FOLDERS = {"service", "kernels", "adapters", "tests", "bench"}
MODELS = {"torch", "triton", "transformers", "peft", "safetensors", "tokenizers", "llguidance"}
NEEDED = MODELS | {"pytest", "hypothesis"} | {"numpy", "msgspec"}


def imports_of(path: Path) -> set[str]:
    """All names that a file imports, wherever in it; `from a import b` may mean the module a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_the_parity_run_imports_nothing_else() -> None:
    left = [ROOT / "tests/conftest.py", *(path for name in ("parity", "models") for path in _tests_in(name))]
    left += [ROOT / f"tests/ops/test_paged_attention{suffix}.py" for suffix in ("", "_triton")]
    left += [ROOT / f"kernels/{op}/{name}.py" for op, names in IMPLEMENTATIONS["cuda"].items() for name in names]
    seen: set[Path] = set()
    found: dict[str, Path] = {}
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imports_of(path):
            found[name.partition(".")[0]] = path
            module = ROOT / Path(*name.split(".")).with_suffix(".py")
            left += [module] if module.exists() else []
    assert len(seen) > 60
    others = {name: path for name, path in found.items() if name not in sys.stdlib_module_names | OUR_FOLDERS | NEEDED}
    assert not others
    assert found.keys() >= NEEDED


def _tests_in(folder: str) -> list[Path]:
    return sorted((ROOT / "tests" / folder).glob("*.py"))
