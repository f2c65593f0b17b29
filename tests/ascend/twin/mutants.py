"""Changes of single calls of torch_npu, made in the syntax tree: what a slip of the author would look like.

For each call: every keyword renamed, every number and every string changed, every other argument's value changed,
every tensor argument brought to other dtypes and given exchanged axes, neighbouring positional arguments exchanged,
and what it returns exchanged.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.ascend.twin.stand_ins.calls import HOOK, Call, Source, call_nodes

OTHER_DTYPES = {
    torch.float16: (torch.bfloat16, torch.float32),
    torch.bfloat16: (torch.float16, torch.float32),
    torch.float32: (torch.float16, torch.bfloat16),
    torch.int64: (torch.int32, torch.float32),
    torch.int32: (torch.int64, torch.float32),
    torch.int8: (torch.int32, torch.float16),
    torch.uint8: (torch.int32, torch.float16),
    torch.bool: (torch.int32, torch.float16),
}


@dataclass(frozen=True)
class Mutant:
    """`build` makes the changed tree of the whole module, in which the hook may be called."""

    call: Call
    kind: str
    what: str
    build: Callable[[], ast.Module]

    def __str__(self) -> str:
        return f"{self.call}: {self.what}"


# What each argument of a call was seen to be, by position ("0", "1", ...) or keyword.
Seen = dict[str, list[Any]]


def hook(value: Any, change: str, *details: Any) -> Any:
    """Called by changed code; leaves alone what the change does not apply to."""
    if change == "dtype":
        return value.to(getattr(torch, details[0])) if isinstance(value, torch.Tensor) else value
    if change == "axes":
        if not isinstance(value, torch.Tensor) or value.dim() <= max(details):
            return value
        return value.transpose(*details).contiguous()
    if change == "value":
        return changed(value, *details)
    assert change == "results" and isinstance(value, tuple)
    return value[::-1]


def changed(value: Any, which: int = 0) -> Any:
    """Another value of the same type; of a list, another element `which`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, torch.dtype):
        return torch.float16 if value == torch.bfloat16 else torch.bfloat16
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 1.5 * value or 1.0
    if isinstance(value, str):
        return value + "_"
    if isinstance(value, list | tuple) and value:
        return [*value[:which], value[which] + 1, *value[which:][1:]]
    return value


def mutants(source: Source, call: Call, seen: Seen) -> Iterator[Mutant]:
    """All mutants of one call, given what its arguments were in the unchanged code."""

    def mutant(kind: str, what: str, change: Callable[[ast.Call, ast.Module], None]) -> Mutant:
        def build() -> ast.Module:
            tree = copy.deepcopy(source.tree)
            change(call_nodes(tree)[call.line, call.column], tree)
            return tree

        return Mutant(call, kind, what, build)

    node = call_nodes(source.tree)[call.line, call.column]
    for keyword in node.keywords:
        assert keyword.arg is not None, f"{call} hides its arguments behind **"
        yield mutant("keyword", f"{keyword.arg} renamed", _rename(keyword.arg))
    for index, constant in enumerate(_constants(node)):
        if not isinstance(constant.value, str | int | float):
            continue
        kind = "string" if isinstance(constant.value, str) else "number"
        other = changed(constant.value)
        yield mutant(kind, f"constant {index}: {constant.value!r} -> {other!r}", _replace_constant(index, other))
    for name, argument in _arguments(node):
        values = seen.get(name, [])
        assert values, f"{call} was never seen with {name}"
        for change in _changes(values, is_constant=isinstance(argument, ast.Constant)):
            what = f"{name}: {' '.join(map(str, change))}"
            yield mutant(change[0], what, _wrap(name, change))
    for first, second in itertools.pairwise(range(len(node.args))):
        yield mutant("order", f"arguments {first} and {second} exchanged", _exchange(first, second))
    if any(isinstance(value, tuple) for value in seen["return"]):
        yield mutant("results", "results exchanged", _wrap_call)


def recorded(source: Source, call: Call) -> ast.Module:
    """The module with the call made by the hook, which is given the operator and its arguments."""
    tree = copy.deepcopy(source.tree)
    node = call_nodes(tree)[call.line, call.column]
    node.args.insert(0, node.func)
    node.func = ast.Name(HOOK, ast.Load())
    return tree


def _changes(values: list[Any], *, is_constant: bool) -> list[tuple[Any, ...]]:
    changes: dict[tuple[Any, ...], None] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            for dtype in OTHER_DTYPES[value.dtype]:
                changes["dtype", str(dtype).removeprefix("torch.")] = None
            for axes in itertools.pairwise(range(value.dim())):
                changes["axes", *axes] = None
        elif isinstance(value, list | tuple):
            changes |= {("value", which): None for which in range(len(value))}
        elif value is not None and not is_constant:
            changes["value",] = None
    return list(changes)


def _constants(node: ast.Call) -> list[ast.Constant]:
    """Constants anywhere in the arguments, in order."""
    parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    return [inner for part in parts for inner in ast.walk(part) if isinstance(inner, ast.Constant)]


def _arguments(node: ast.Call) -> list[tuple[str, ast.expr]]:
    positional = [(str(index), argument) for index, argument in enumerate(node.args)]
    return [*positional, *((keyword.arg or "", keyword.value) for keyword in node.keywords)]


def _rename(name: str) -> Callable[[ast.Call, ast.Module], None]:
    def change(node: ast.Call, _tree: ast.Module) -> None:
        keyword = next(keyword for keyword in node.keywords if keyword.arg == name)
        keyword.arg = f"{name}_"

    return change


def _replace_constant(index: int, value: Any) -> Callable[[ast.Call, ast.Module], None]:
    def change(node: ast.Call, _tree: ast.Module) -> None:
        _constants(node)[index].value = value

    return change


def _wrap(name: str, details: tuple[Any, ...]) -> Callable[[ast.Call, ast.Module], None]:
    def change(node: ast.Call, _tree: ast.Module) -> None:
        if name.isdecimal():
            node.args[int(name)] = _hooked(node.args[int(name)], details)
            return
        keyword = next(keyword for keyword in node.keywords if keyword.arg == name)
        keyword.value = _hooked(keyword.value, details)

    return change


def _wrap_call(node: ast.Call, tree: ast.Module) -> None:
    class Around(ast.NodeTransformer):
        def visit_Call(self, other: ast.Call) -> ast.AST:
            return _hooked(other, ("results",)) if other is node else self.generic_visit(other)

    Around().visit(tree)


def _exchange(first: int, second: int) -> Callable[[ast.Call, ast.Module], None]:
    def change(node: ast.Call, _tree: ast.Module) -> None:
        node.args[first], node.args[second] = node.args[second], node.args[first]

    return change


def _hooked(value: ast.expr, details: tuple[Any, ...]) -> ast.Call:
    return ast.Call(ast.Name(HOOK, ast.Load()), [value, *(ast.Constant(detail) for detail in details)], [])
