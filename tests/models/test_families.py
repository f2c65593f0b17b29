"""A family is one file of data: what it is called matters nowhere else."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.models.families import FAMILIES

ROOT = Path(__file__).parents[2]
# Below these, a string that is a family's name is a branch on it. Elsewhere formats of tools' calls are called so too.
WITHOUT_NAMES = ("service/models", "service/engine", "service/doctor", "adapters", "kernels")
# Where a family's name is read, how often, and what becomes of it. Whoever branches on it has to read it first.
PASSED_ON = {
    "service/models/spec/config_json.py": 2,  # into the specification
    "service/models/layouts.py": 1,  # into the layout
    "service/models/loader.py": 1,  # logged
    "service/doctor/checks/model.py": 1,  # shown
    "service/api/schema/error_messages.py": 1,  # a kind of pydantic's errors, no family
    "bench/shapes.py": 1,  # written into config.json
    "examples/smollm2.py": 1,  # out of config.json
}
FROM_FAMILIES = {"FAMILIES", "PRE_TOKENIZERS", "config_of_gguf", "model_spec"}


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    found = []
    for top in ("service", "adapters", "kernels", "bench", "scripts", "examples"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("service/models/families/"):
                found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def reads(tree: ast.Module) -> Iterator[int]:
    """Lines with spec.model_type, or with a string by which a field can be had that tells the family: of a subscript,
    of get, of getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "model_type" and isinstance(node.ctx, ast.Load):
            yield node.lineno
        if isinstance(node, ast.Constant) and node.value in ("model_type", "architectures"):
            yield node.lineno


def imports(tree: ast.Module) -> Iterator[int]:
    """Lines that import one family's file, in whatever form."""
    package = "service.models.families"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(one.name.startswith(f"{package}.") for one in node.names):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = node.module.startswith(f"{package}.")
            if inside or (node.module == package and any(one.name not in FROM_FAMILIES for one in node.names)):
                yield node.lineno


def comparisons(tree: ast.Module) -> Iterator[int]:
    """Lines that compare something with a family's name, however it was come by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue) and any(
            isinstance(part, ast.Constant) and part.value in FAMILIES for part in ast.walk(node)
        ):
            yield node.lineno


def test_the_name_of_a_family_is_passed_on_and_nothing_else() -> None:
    """Each read that is not in the table may be a branch. One that is none is added there, with what becomes of it."""
    assert Counter(name for name, tree in sources() for _ in reads(tree)) == Counter(PASSED_ON)


def test_nothing_of_one_family_is_imported_elsewhere() -> None:
    assert not [f"{name}:{line}" for name, tree in sources() for line in imports(tree)]


def test_no_other_file_of_the_model_knows_the_name_of_a_family() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in sources()
        if name.startswith(WITHOUT_NAMES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in FAMILIES
    ]
    assert not found


def test_nothing_is_compared_with_the_name_of_a_family() -> None:
    assert not [f"{name}:{line}" for name, tree in sources() for line in comparisons(tree)]


@pytest.mark.parametrize(
    "branch",
    [
        "if family == 'qwen3': pass",
        "x = 1 if 'qwen3' != family else 2",
        "is_x = family in ('llama', 'qwen3')",
        "match family:\n    case 'qwen3': pass",
    ],
)
def test_a_comparison_with_a_name_is_found(branch: str) -> None:
    assert len(list(comparisons(ast.parse(branch)))) == 1


@pytest.mark.parametrize(
    "branch",
    [
        "if spec.model_type == 'x': pass",
        "if config['model_type'] in ('x', 'y'): pass",
        "if config.get('model_type') == 'x': pass",
        "if getattr(spec, 'model_type') == 'x': pass",
        "family = spec.model_type\nif family == 'x': pass",
        "is_x = 'x' in spec.model_type",
        "table[spec.model_type]",
        "table.get(spec.model_type)",
        "match spec.model_type:\n    case 'x': pass",
        "if spec.model_type.startswith('x'): pass",
        "if re.match('x', layout.model_type): pass",
        "importlib.import_module(f'x.{spec.model_type}')",
        "if 'XForCausalLM' in config['architectures']: pass",
    ],
)
def test_a_branch_has_to_read_the_name(branch: str) -> None:
    assert len(list(reads(ast.parse(branch)))) == 1


@pytest.mark.parametrize(
    "branch",
    [
        "from service.models.families import qwen3_5",
        "from service.models.families.qwen3_5 import read_text",
        "import service.models.families.qwen3_5 as x",
    ],
)
def test_an_import_of_one_family_is_found(branch: str) -> None:
    assert list(imports(ast.parse(branch))) == [1]
