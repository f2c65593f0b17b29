"""Finds the calls of torch_npu in the project's source, and lets others be compiled in their place.

A call of an operator is a call of `torch_npu.<name>` or `torch.ops.npu.<name>` whose name torch knows as an `npu::`
operator. All else that is reached through torch_npu or torch.npu is the runtime's, and must exist in the wheel;
`runtime_calls` finds what is asked of it.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType

import torch

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = ("kernels", "service", "adapters")
# The name under which a compiled-in hook is found by the code around it.
HOOK = "__twin_hook__"


@dataclass(frozen=True)
class Call:
    """One call of an operator in the source."""

    module: str
    line: int
    column: int
    op: str
    function: str  # qualified name of the outermost function around it

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.op}"


@dataclass(frozen=True)
class Source:
    """One file of the project; `dotted` holds every chain of names that begins at torch_npu or torch.npu."""

    module: str
    path: Path
    tree: ast.Module
    calls: tuple[Call, ...]
    dotted: frozenset[str]
    escapes: tuple[str, ...]


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every file that mentions torch_npu or torch.npu."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [read(path) for path in files if re.search(r"\bnpu\b|torch_npu", path.read_text())]
    return tuple(source for source in found if source.calls or source.dotted or source.escapes)


def read(path: Path) -> Source:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    tree = ast.parse(path.read_text(), str(path))
    return Source(module, path, tree, tuple(_calls(tree, module)), *_mentions(tree, module))


def op_of(node: ast.AST) -> str | None:
    """Name of the operator that the node is a call of."""
    if not isinstance(node, ast.Call):
        return None
    name = _op_name(_chain(node.func))
    return name if name and _is_operator(name) else None


def runtime_calls(source: Source) -> list[Call]:
    """What the file asks of torch_npu's runtime: calls, settings, and names looked up by getattr."""
    aliases = {name: chain for node in ast.walk(source.tree) for name, chain in _alias(node)}
    found = []
    for around, node in _with_functions(source.tree, ()):
        for part in _asked(node):
            chain = _chain(part, aliases)
            if part is not node and isinstance(node, ast.Call) and _chain(node.func) == "getattr":
                chain += f".{ast.literal_eval(node.args[1])}"
            name = chain.partition(".")[2] if chain.startswith(("torch_npu.", "torch.npu.")) else ""
            if name and not _is_operator(name.removeprefix("ops.npu.").partition(".")[0]):  # or an overload of one
                assert around, f"{source.module}:{part.lineno} asks for {name} while it is imported"
                found.append(Call(source.module, part.lineno, part.col_offset, name, _outermost(around)))
    return found


def _asked(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        return [node.args[0] if _chain(node.func) == "getattr" else node.func]
    return [target for target in getattr(node, "targets", []) if isinstance(target, ast.Attribute)]


def call_nodes(tree: ast.Module) -> dict[tuple[int, int], ast.Call]:
    """The calls of operators by line and column."""
    return {
        (node.lineno, node.col_offset): node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and op_of(node) is not None
    }


class Patched:
    """The functions of a module that call operators, which can be given other code and their own again.

    Code is exchanged within the function objects, so that whoever has imported one sees it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._module: ModuleType = importlib.import_module(source.module)
        self._names = sorted({call.function for call in source.calls})
        self._own = {name: _functions(self._module, name) for name in self._names}
        for name, functions in self._own.items():
            assert functions, f"no living function {source.module}.{name}"
        self._code = {function: function.__code__ for functions in self._own.values() for function in functions}

    def exchange(self, tree: ast.Module, hook: Callable[..., object] | None = None) -> None:
        """Let the functions run what `tree`, a variant of the module's own, says; it may call HOOK."""
        compiled = compile(ast.fix_missing_locations(tree), str(self.source.path), "exec", dont_inherit=True)
        self._module.__dict__[HOOK] = hook
        for name, functions in self._own.items():
            code = next(code for code in _codes(compiled) if code.co_qualname == name)
            for function in functions:
                function.__code__ = code

    def restore(self) -> None:
        for function, code in self._code.items():
            function.__code__ = code
        self._module.__dict__.pop(HOOK, None)


def _is_operator(name: str) -> bool:
    return any(known.partition(".")[0] == f"npu::{name}" for known in _known())


def _known() -> frozenset[str]:
    global _known_operators
    if not _known_operators:
        _known_operators = frozenset(torch._C._dispatch_get_all_op_names())
    return _known_operators


_known_operators: frozenset[str] = frozenset()


def _chain(node: ast.AST, aliases: Mapping[str, str] = MappingProxyType({})) -> str:
    """`a.b.c` of an attribute chain that begins at a name, or at a call that returns torch_npu; else empty.

    aliases  names that stand for a chain
    """
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    root = "torch_npu" if _gives_torch_npu(node) else node.id if isinstance(node, ast.Name) else ""
    return ".".join(reversed([*names, aliases.get(root, root)])) if root else ""


def _gives_torch_npu(node: ast.AST) -> bool:
    """torch_npu() or anything.torch_npu(): the runtime's function that imports it when it is needed."""
    return isinstance(node, ast.Call) and not node.args and _chain(node.func).rpartition(".")[2] == "torch_npu"


def _op_name(chain: str) -> str | None:
    for prefix in ("torch_npu.", "torch.ops.npu."):
        if chain.startswith(prefix):
            return chain.removeprefix(prefix).partition(".")[0]
    return None


def _calls(tree: ast.Module, module: str) -> Iterator[Call]:
    for names, node in _with_functions(tree, ()):
        op = op_of(node)
        if op is not None:
            assert names, f"{module}:{node.lineno} calls {op} while it is imported"  # type: ignore[attr-defined]
            yield Call(module, node.lineno, node.col_offset, op, _outermost(names))  # type: ignore[attr-defined]


def _with_functions(node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[tuple[tuple[ast.AST, ...], ast.AST]]:
    """Every node with the classes and functions around it."""
    for child in ast.iter_child_nodes(node):
        yield around, child
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _with_functions(child, (*around, child) if is_scope else around)


def _outermost(around: tuple[ast.AST, ...]) -> str:
    names = []
    for scope in around:
        names.append(scope.name)  # type: ignore[attr-defined]
        if not isinstance(scope, ast.ClassDef):
            break
    return ".".join(names)


def _mentions(tree: ast.Module, module: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Dotted names, and uses of torch_npu that escape the search: other names for it, and operators not called."""
    nodes = list(ast.walk(tree))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    aliases = {name: chain for node in nodes for name, chain in _alias(node)}
    named = {id(node.value) for node in nodes if any(_alias(node))}  # type: ignore[attr-defined]
    imports_it = any(isinstance(node, ast.Import) and any(a.name == "torch_npu" for a in node.names) for node in nodes)
    dotted, escapes = set(), []
    for node in nodes:
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        is_module = (imports_it and isinstance(node, ast.Name) and node.id == "torch_npu") or _gives_torch_npu(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch_npu":
            escapes.append(f"{where} imports from torch_npu")
        elif isinstance(node, ast.Import):
            escapes += [f"{where} renames {a.name}" for a in node.names if a.name.startswith("torch_npu") and a.asname]
        elif is_module and not {id(node)} & (inner | called | named):
            escapes.append(f"{where} hands torch_npu on")
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            chain = _chain(node, aliases)
            name = _op_name(chain)
            if name and _is_operator(name):
                if id(node) not in called or _op_name(_chain(node)) != name:
                    escapes.append(f"{where} names {name} without calling it by its own name")
            elif chain.startswith(("torch_npu.", "torch.npu.")):
                dotted.add(chain)
        elif isinstance(node, ast.Call) and _chain(node.func) == "getattr":
            chain, name = _chain(node.args[0], aliases), node.args[1]
            if chain.startswith(("torch_npu", "torch.npu")) and isinstance(name, ast.Constant):
                dotted.add(f"{chain}.{name.value}")
    return frozenset(dotted), tuple(escapes)


def _alias(node: ast.AST) -> Iterator[tuple[str, str]]:
    """`name = <chain from torch_npu>`"""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        chain = _chain(node.value)
        if chain == "torch_npu" or chain.startswith(("torch_npu.", "torch.npu")):
            yield node.targets[0].id, chain


def _functions(module: ModuleType, name: str) -> list[FunctionType]:
    return [
        found
        for found in gc.get_objects()
        if type(found) is FunctionType  # isinstance would wake lazy objects
        and found.__code__.co_qualname == name
        and found.__globals__ is module.__dict__
    ]


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
