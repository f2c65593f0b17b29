"""Changes of what the service asks of torch_npu's runtime and makes of its answers, made in the syntax tree.

In each function that does so: every string, number and boolean changed, as it is written or as it is handed on, and
every keyword renamed. Sentences that are logged or raised are left alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from tests.ascend.twin.mutants import changed
from tests.ascend.twin.stand_ins.calls import HOOK

_PLAIN = str | int | float  # bool is an int


@dataclass(frozen=True)
class Slip:
    """One change of a module. `build` makes its tree, which may call the hook."""

    kind: str
    what: str
    build: Callable[[], ast.Module]


class Hook:
    """Called by changed code with a value to be changed, which only plain ones are."""

    def __init__(self) -> None:
        self.has_changed = False

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, _PLAIN):
            return value
        self.has_changed = True
        return changed(value)


def slips(tree: ast.Module, functions: Collection[str]) -> Iterator[Slip]:
    """All slips in the functions; those that leave plain values to the hook may turn out to be none."""
    left_out = {id(inner) for node in ast.walk(tree) if _is_message(node) for inner in ast.walk(node)}
    places = {id(node): place for place, node in enumerate(ast.walk(tree))}
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name not in functions:
            continue
        for node in ast.walk(function):
            if id(node) not in left_out:
                for kind, what, change in _changes(node):
                    where = f"{function.name}: {what}"
                    yield Slip(kind, where, _builder(tree, places[id(node)], change))


def _is_message(node: ast.AST) -> bool:
    """A docstring, an error, or a line of the log."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).startswith("log.")
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _changes(node: Any) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, _PLAIN):
        other = changed(node.value)
        kind = {str: "string", bool: "boolean"}.get(type(node.value), "number")
        yield kind, f"{node.value!r} -> {other!r}", lambda node: setattr(node, "value", other)
    elif isinstance(node, ast.keyword):
        yield "keyword", f"{node.arg} renamed", lambda node: setattr(node, "arg", f"{node.arg}_")
        if not isinstance(node.value, ast.Constant):
            yield "value", f"{ast.unparse(node)} changed", lambda node: setattr(node, "value", _hooked(node.value))
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "value", f"{ast.unparse(node)} changed", lambda node: setattr(node, "value", _hooked(node.value))
    elif isinstance(node, ast.Call):
        for index, argument in enumerate(node.args):
            if not isinstance(argument, ast.Constant | ast.GeneratorExp):
                what = f"{ast.unparse(argument)} of {ast.unparse(node.func)} changed"
                yield "value", what, lambda node, index=index: node.args.__setitem__(index, _hooked(node.args[index]))


def _builder(tree: ast.Module, place: int, change: Callable[[Any], None]) -> Callable[[], ast.Module]:
    def build() -> ast.Module:
        other = copy.deepcopy(tree)
        change(list(ast.walk(other))[place])
        return other

    return build


def _hooked(value: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(HOOK, ast.Load()), [value], [])
