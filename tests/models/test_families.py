"""A family is one file of data: what it is called matters nowhere else."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from service.models.families import FAMILIES

ROOT = Path(__file__).parents[2]
# Below these, a string that is a family's name is a branch on it. Elsewhere formats of tools' calls are called so too.
WITHOUT_NAMES = ("service/models", "service/engine", "adapters", "kernels")


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    found = []
    for top in ("service", "adapters", "kernels"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("service/models/families/"):
                found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def is_family_of(node: ast.expr) -> bool:
    """spec.model_type, or config["model_type"]."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "model_type"
    return isinstance(node, ast.Attribute) and node.attr == "model_type"


def branches(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(is_family_of(one) for one in (node.left, *node.comparators)):
            yield node.lineno
        if isinstance(node, ast.Match) and is_family_of(node.subject):
            yield node.lineno
        if isinstance(node, ast.Subscript) and is_family_of(node.slice):
            yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # spec.model_type.startswith(...), and a table's .get(spec.model_type)
            looks_up = node.func.attr == "get" and any(is_family_of(one) for one in node.args)
            if looks_up or is_family_of(node.func.value):
                yield node.lineno


def test_no_other_file_branches_on_the_name_of_a_family() -> None:
    found = [f"{name}:{line}" for name, tree in sources() for line in branches(tree)]
    assert not found


def test_no_other_file_of_the_model_knows_the_name_of_a_family() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in sources()
        if name.startswith(WITHOUT_NAMES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in FAMILIES
    ]
    assert not found


def test_the_search_finds_branches() -> None:
    code = "if spec.model_type == 'x': pass\ny = {}[config['model_type']]\nmatch spec.model_type:\n    case 'x': pass\n"
    code += "if spec.model_type.startswith('x'): pass\ny = {}.get(spec.model_type)\n"
    assert sorted(branches(ast.parse(code))) == [1, 2, 3, 5, 6]
