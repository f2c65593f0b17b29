"""Small changes to the source of kernels: every place where a boundary, a mask, an offset, a tail, a scaling, a slice
or a split could be slightly wrong."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_NEIGHBOURS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """
    function  whose body is changed
    kind      what sort of place it is
    line      of the original source
    before, after  the changed expression
    statement  the first line of the statement that it stands in
    """

    function: str
    kind: str
    line: int
    before: str
    after: str
    make: Callable[[], str] = field(repr=False, compare=False)
    statement: str = ""

    @property
    def source(self) -> str:
        """The whole changed module."""
        return self.make()

    def __str__(self) -> str:
        return f"{self.function}:{self.line} {self.kind}: {self.before}  ->  {self.after}"


@functools.cache
def mutants_of(source: str) -> tuple[Mutant, ...]:
    """Every change of one place in one `triton.jit` function."""
    module = ast.parse(source)
    found = []
    for function in module.body:
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in function.decorator_list):
            statements = _statements(function)
            for node in ast.walk(ast.Module(function.body, [])):
                found += [
                    _mutant(module, function.name, node, kind, other, statements.get(node, ""))
                    for kind, other in _changes(node)
                ]
    return tuple(mutant for mutant in found if mutant.before != mutant.after)


def kernels_with(function: str, source: str) -> set[str]:
    """The functions of a module that call this one, over others too; itself among them."""
    calls = {
        one.name: {node.id for node in ast.walk(one) if isinstance(node, ast.Name)}
        for one in ast.parse(source).body
        if isinstance(one, ast.FunctionDef)
    }
    found = {function}
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found


def _statements(function: ast.FunctionDef) -> dict[ast.AST, str]:
    """Of each node the first line of the innermost statement around it: `ast.walk` comes to inner ones later."""
    lines = {}
    for statement in ast.walk(ast.Module(function.body, [])):
        if isinstance(statement, ast.stmt):
            lines |= dict.fromkeys(ast.walk(statement), ast.unparse(statement).partition("\n")[0])
    return lines


def _mutant(module: ast.Module, function: str, node: ast.AST, kind: str, other: ast.AST, statement: str) -> Mutant:
    def make() -> str:
        return ast.unparse(ast.fix_missing_locations(_Replace(node, other).visit(module)))

    line: int = node.lineno  # type: ignore[attr-defined]
    return Mutant(function, kind, line, ast.unparse(node), ast.unparse(other), make, statement)


class _Replace(ast.NodeTransformer):
    """A copy of a tree with one node replaced."""

    def __init__(self, node: ast.AST, other: ast.AST) -> None:
        self._node, self._other = node, other

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._node:
            return self._other
        fields = {name: self._copied(value) for name, value in ast.iter_fields(node)}
        return ast.copy_location(type(node)(**fields), node)

    def _copied(self, value: object) -> object:
        if isinstance(value, list):
            return [self._copied(one) for one in value]
        return self.visit(value) if isinstance(value, ast.AST) else value


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _NEIGHBOURS:
        yield "boundary", ast.Compare(node.left, [_NEIGHBOURS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp):
        yield from _changes_of_sum(node)
    elif isinstance(node, ast.Call):
        yield from _changes_of_call(node)
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value < 8:
        yield "offset", ast.Constant(node.value + 1)


def _changes_of_sum(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    left, right = node.left, node.right
    if isinstance(node.op, ast.BitAnd):
        yield "mask", left
        yield "mask", right
    elif isinstance(node.op, ast.Add):
        yield "offset", left
        yield "offset", right
    elif isinstance(node.op, ast.Sub):
        yield "offset", left
        yield "offset", ast.BinOp(left, ast.Add(), right)
    elif isinstance(node.op, ast.Mult):
        yield "scaling or stride", left
        yield "scaling or stride", right
    elif isinstance(node.op, ast.FloorDiv | ast.Mod):
        other = ast.Mod() if isinstance(node.op, ast.FloorDiv) else ast.FloorDiv()
        yield "slice or split", ast.BinOp(left, other, right)
        yield "slice or split", left


def _changes_of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    called = ast.unparse(node.func)
    if called in ("tl.minimum", "tl.maximum"):
        yield "tail", node.args[0]
        yield "tail", node.args[1]
    elif called == "tl.cdiv":
        yield "tail", ast.BinOp(node.args[0], ast.FloorDiv(), node.args[1])
    elif called == "tl.cast" and ast.unparse(node.args[1]) == "tl.int64":
        yield "32 bits", node.args[0]
    elif called.endswith(".to") and isinstance(node.func, ast.Attribute) and ast.unparse(node.args[0]) == "tl.int64":
        yield "32 bits", node.func.value
    elif called == "tl.where":
        yield "mask", node.args[1]
        yield "mask", node.args[2]
    else:
        for index, keyword in enumerate(node.keywords):
            if keyword.arg == "mask":
                keywords = [one for i, one in enumerate(node.keywords) if i != index and one.arg != "other"]
                yield "mask", ast.Call(node.func, node.args, copy.copy(keywords))
