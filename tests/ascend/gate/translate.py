"""Translate the final device IR (generic MLIR text) to Python source, one generator function per device function.

The Python runs against the names of `simulator`: `core` is the core that executes, memrefs are `memory.MemRef`, and a
generator yields while it waits for another core.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator

from tests.ascend.gate.memory import SimulationError, parse_type
from tests.ascend.gate.mlir import Op, Region, split_top

# MLIR's mark for "this size is an operand".
_DYNAMIC = -(2**63)

_INT_OPERATORS = {
    "addi": "+", "subi": "-", "muli": "*", "andi": "&", "ori": "|", "xori": "^", "shli": "<<", "shrsi": ">>",
    "divui": "//", "floordivsi": "//", "remui": "%",
}  # fmt: skip
_FLOAT_OPERATORS = {"addf": "+", "subf": "-", "mulf": "*", "divf": "/"}
_INT_PREDICATES = ["==", "!=", "<", "<=", ">", ">=", "u<", "u<=", "u>", "u>="]
_FLOAT_PREDICATES = {1: "==", 2: ">", 3: ">=", 4: "<", 5: "<=", 6: "!=", 13: "!="}
_SAME = {"memref.cast", "memref.memory_space_cast", "memref.assume_alignment"}
_NO_EFFECT = {
    "func.return", "scf.yield", "annotation.mark", "hivm.hir.set_mask_norm", "hivm.hir.set_ffts_base_addr",
    "hivm.hir.set_ctrl", "hivm.hir.dcci", "hivm.hir.init_debug", "hivm.hir.finish_debug",
    # Order within a core is kept by running its operations one after another.
    "hivm.hir.set_flag", "hivm.hir.wait_flag", "hivm.hir.pipe_barrier",
}  # fmt: skip


def python_name(value: str) -> str:
    """`%arg3#1` -> a Python identifier."""
    return "v_" + re.sub(r"\W", "_", value.lstrip("%"))


def constant(text: str) -> int | float:
    """The value of an `arith.constant`; bit patterns stand for infinities and NaN."""
    text = text.strip()
    if text in ("true", "false"):
        return int(text == "true")
    value, _, kind = (part.strip() for part in text.rpartition(" : "))
    if not kind.startswith(("f", "bf")):
        return int(value)
    if not value.startswith("0x"):
        return float(value)
    bits = int(value, 16)
    if kind == "f16":
        return float(struct.unpack("e", struct.pack("H", bits))[0])
    return float(struct.unpack("f", struct.pack("I", bits << 16 if kind == "bf16" else bits))[0])


def _wrapped(expression: str, kind: str) -> str:
    if kind in ("index", "i64"):
        return expression
    bits = int(kind[1:])
    return f"(({expression}) & 1)" if bits == 1 else f"wrap({expression}, {bits})"


def _unsigned(name: str, kind: str) -> str:
    return f"({name} & {(1 << (64 if kind == 'index' else int(kind[1:]))) - 1})"


def _affine(text: str) -> str:
    """`(d0)[s0] -> (d0 floordiv 2, s0)` -> a lambda that returns a tuple."""
    found = re.match(r"\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)$", text)
    assert found is not None, text
    arguments = [part.strip() for part in f"{found.group(1) or ''},{found.group(2) or ''}".split(",") if part.strip()]
    results = []
    for result in split_top(found.group(3)):
        result = result.replace(" floordiv ", " // ").replace(" mod ", " % ")
        results.append(re.sub(r"(\([^()]*\)|\w+) ceildiv (\w+)", r"(-((-(\1)) // (\2)))", result))
    return f"(lambda {', '.join(arguments)}: ({', '.join(results)},))"


def _array(op: Op, key: str) -> list[int]:
    found = re.match(r"array<i64(?:: (.*))?>", op.attribute(key))
    return [int(item) for item in found.group(1).split(",")] if found and found.group(1) else []


def _operand_groups(op: Op) -> list[list[str]]:
    """The operands, cut into the groups that the op's definition names."""
    found = re.search(r"operandSegmentSizes = array<i32: ([^>]*)>", op.properties)
    assert found is not None, op.name
    groups, start = [], 0
    for size in (int(item) for item in found.group(1).split(",")):
        groups.append(op.operands[start : start + size])
        start += size
    return groups


def _mixed(static: list[int], dynamic: list[str]) -> str:
    """A Python list of sizes, of which some are constants and some are values."""
    values: Iterator[str] = iter(dynamic)
    return "[" + ", ".join(python_name(next(values)) if item == _DYNAMIC else str(item) for item in static) + "]"


def _shape(kind: str, dynamic: list[str]) -> str:
    return _mixed([_DYNAMIC if size is None else size for size in parse_type(kind).sizes], dynamic)


class Translator:
    """Collects the Python lines of one device function."""

    def __init__(self, maps: dict[str, str]) -> None:
        self.maps = maps
        self.lines: list[str] = []
        self.indent = 1
        self.depth = 0  # loops around what is being translated
        self.handlers: dict[str, Callable[[Op, list[str], list[str]], None]] = {
            "arith": self._arith, "math": self._math, "affine": self._affine_op, "memref": self._memref,
            "scf": self._control, "hivm": self._hivm, "func": self._call,
        }  # fmt: skip

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)

    def block(self, region: Region, results: list[str]) -> None:
        """The region's ops, one level deeper; what it yields is assigned to `results`."""
        self.indent += 1
        before = len(self.lines)
        for op in region.ops:
            if op.name == "scf.yield" and op.operands:
                self.emit(f"{', '.join(results)}, = {', '.join(map(python_name, op.operands))},")
            else:
                self.op(op)
        if len(self.lines) == before:
            self.emit("pass")
        self.indent -= 1

    def op(self, op: Op) -> None:
        if op.name in _NO_EFFECT:
            return
        operands, results = [python_name(name) for name in op.operands], [python_name(name) for name in op.results]
        if op.name in _SAME:
            self.emit(f"{results[0]} = {operands[0]}")
            return
        handler = self.handlers.get(op.name.split(".")[0])
        if handler is None:
            raise SimulationError(f"op not modelled: {op.name}")
        handler(op, operands, results)

    def _arith(self, op: Op, operands: list[str], results: list[str]) -> None:
        name, kind, target = op.name.split(".")[1], op.result_types[0], results[0]
        source = op.operand_types[0] if op.operand_types else kind
        a, b, c = (*operands, "", "", "")[:3]
        if name == "constant":
            value = constant(op.attribute("value"))
            expression = repr(value) if math.isfinite(value) else f"float('{value}')"
        elif name in _INT_OPERATORS:
            expression = _wrapped(f"{a} {_INT_OPERATORS[name]} {b}", kind)
        elif name in _FLOAT_OPERATORS:
            expression = f"round_to({a} {_FLOAT_OPERATORS[name]} {b}, '{kind}')"
        elif name in ("divsi", "remsi"):
            expression = f"{name}({a}, {b})"
        elif name == "ceildivsi":
            expression = f"-(-{a} // {b})"
        elif name == "shrui":
            expression = f"{_unsigned(a, kind)} >> {b}"
        elif name in ("maxsi", "maxui", "maximumf", "maxnumf", "minsi", "minui", "minimumf", "minnumf"):
            expression = f"{name[:3]}({a}, {b})"
        elif name == "cmpi":
            predicate = _INT_PREDICATES[int(op.attribute("predicate").split(" ")[0])]
            if predicate.startswith("u"):
                expression = f"int({_unsigned(a, 'i64')} {predicate[1:]} {_unsigned(b, 'i64')})"
            else:
                expression = f"int({a} {predicate} {b})"
        elif name == "cmpf":
            expression = f"int({a} {_FLOAT_PREDICATES[int(op.attribute('predicate').split(' ')[0])]} {b})"
        elif name == "select":
            expression = f"{b} if {a} else {c}"
        elif name in ("index_cast", "index_castui", "extsi", "trunci"):
            bit = f"({a} & 1)"
            narrow = {"extsi": f"-{bit}", "index_cast": bit}.get(name, a) if source == "i1" else a
            expression = _wrapped(narrow, kind)
        elif name == "extui":
            expression = _unsigned(a, source)
        elif name in ("sitofp", "uitofp"):
            expression = f"round_to(float({a}), '{kind}')"
        elif name in ("fptosi", "fptoui"):
            expression = _wrapped(f"int({a})", kind)
        elif name in ("extf", "truncf"):
            expression = f"round_to({a}, '{kind}')"
        elif name in ("negf", "bitcast"):
            expression = f"-{a}" if name == "negf" else a
        else:
            raise SimulationError(f"op not modelled: {op.name}")
        self.emit(f"{target} = {expression}")

    def _math(self, op: Op, operands: list[str], results: list[str]) -> None:
        name = op.name.split(".")[1].replace("absf", "fabs")
        self.emit(f"{results[0]} = round_to(math.{name}({operands[0]}), '{op.result_types[0]}')")

    def _affine_op(self, op: Op, operands: list[str], results: list[str]) -> None:
        text = op.attribute("map")
        text = self.maps[text] if text.startswith("#") else text[len("affine_map<") : -1]
        reduce = {"apply": "", "min": "min", "max": "max"}[op.name.split(".")[1]]
        value = f"{_affine(text)}({', '.join(operands)})"
        self.emit(f"{results[0]} = " + (f"{reduce}({value})" if reduce else f"{value}[0]"))

    def _memref(self, op: Op, operands: list[str], results: list[str]) -> None:
        name = op.name.split(".")[1]
        if name in ("reinterpret_cast", "subview"):
            _, offsets, sizes, strides = _operand_groups(op)
            view = ", ".join(
                _mixed(_array(op, f"static_{part}"), values)
                for part, values in (("offsets", offsets), ("sizes", sizes), ("strides", strides))
            )
            kept = f", {list(parse_type(op.result_types[0]).sizes)}" if name == "subview" else ""
            self.emit(f"{results[0]} = {name}({operands[0]}, {view}{kept})")
        elif name == "collapse_shape":
            self.emit(
                f"{results[0]} = collapse_shape({operands[0]}, {op.attribute('reassociation')})".replace(" : i64", "")
            )
        elif name == "expand_shape":
            groups = op.attribute("reassociation").replace(" : i64", "")
            sizes_text = _mixed(_array(op, "static_output_shape"), op.operands[1:])
            self.emit(f"{results[0]} = expand_shape({operands[0]}, {groups}, {sizes_text})")
        elif name == "view":
            shape = _shape(op.result_types[0], op.operands[2:])
            self.emit(
                f"{results[0]} = view({operands[0]}, {operands[1]}, {shape}, '{parse_type(op.result_types[0]).kind}')"
            )
        elif name == "load":
            self.emit(f"{results[0]} = core.load({', '.join(operands)})")
        elif name == "store":
            self.emit(f"core.store({', '.join(operands)})")
        elif name == "extract_strided_metadata":
            rank = len(parse_type(op.operand_types[0]).sizes)
            self.emit(f"{results[0]} = {operands[0]}.like({operands[0]}.offset, [], [])")
            self.emit(f"{results[1]} = 0")
            for axis in range(rank):
                self.emit(f"{results[2 + axis]} = {operands[0]}.sizes[{axis}]")
                self.emit(f"{results[2 + rank + axis]} = {operands[0]}.strides[{axis}]")
        elif name == "dim":
            self.emit(f"{results[0]} = {operands[0]}.sizes[{operands[1]}]")
        else:  # memref.alloc among them: memory that the planner did not place means a miscompiled kernel
            raise SimulationError(f"op not modelled: {op.name}")

    def _control(self, op: Op, operands: list[str], results: list[str]) -> None:
        carried = [python_name(name) for name, _ in op.regions[0].arguments]
        if op.name == "scf.if":
            self.emit(f"if {operands[0]}:")
            self.block(op.regions[0], results)
            if len(op.regions) > 1 and op.regions[1].ops:
                self.emit("else:")
                self.block(op.regions[1], results)
        elif op.name == "scf.for":
            self._assign(carried[1:], operands[3:])
            self.emit(f"for {carried[0]} in range({', '.join(operands[:3])}):")
            self._begin_iteration()
            self.block(op.regions[0], carried[1:])
            self.depth -= 1
            self._assign(results, carried[1:])
        elif op.name == "scf.while":
            self._while(op, carried, operands, results)
        else:
            raise SimulationError(f"op not modelled: {op.name}")

    def _while(self, op: Op, carried: list[str], operands: list[str], results: list[str]) -> None:
        self._assign(carried, operands)
        self.emit("while True:")
        self._begin_iteration()
        self.indent += 1
        *before, condition = op.regions[0].ops
        for inner in before:
            self.op(inner)
        go_on, *values = (python_name(name) for name in condition.operands)
        self._assign([python_name(name) for name, _ in op.regions[1].arguments], values)
        self._assign(results, values)
        self.emit(f"if not {go_on}: break")
        self.indent -= 1
        self.block(op.regions[1], carried)
        self.depth -= 1

    def _begin_iteration(self) -> None:
        self.depth += 1
        self.emit(f"    core.begin_iteration({self.depth})")

    def _assign(self, targets: list[str], values: list[str]) -> None:
        if targets:
            self.emit(f"{', '.join(targets)}, = {', '.join(values)},")

    def _call(self, op: Op, operands: list[str], results: list[str]) -> None:
        arguments = ", ".join([repr(op.attribute("callee").lstrip("@")), *operands])
        self.emit(f"{results[0] + ' = ' if results else ''}core.call({arguments})")

    def _hivm(self, op: Op, operands: list[str], results: list[str]) -> None:
        name = op.name.removeprefix("hivm.hir.")
        if name == "pointer_cast":
            kind = parse_type(op.result_types[0])
            addresses, *sizes = _operand_groups(op)
            shape = _shape(op.result_types[0], sizes[0] if sizes else [])
            self.emit(
                f"{results[0]} = core.at_address({python_name(addresses[0])}, {shape}, '{kind.kind}', '{kind.space}')"
            )
        elif name in ("get_block_idx", "get_sub_block_idx", "get_block_num"):
            self.emit(f"{results[0]} = core.{name[4:]}")
        elif name in ("sync_block_set", "sync_block_wait"):
            static = re.search(r"(?:static_)?flag_id = (\d+)", op.properties + op.attributes)
            dynamic = [name for name, kind in zip(operands, op.operand_types, strict=True) if kind == "i64"]
            flag = static.group(1) if static else dynamic[0]
            self.emit(f"core.set_flag({flag})" if name.endswith("set") else f"while not core.take_flag({flag}): yield")
        else:
            raise SimulationError(f"op not modelled: {op.name}")


def translate(function: Op, maps: dict[str, str]) -> str:
    """Python source of `def <name>(core, <arguments>)`, a generator function."""
    translator = Translator(maps)
    arguments = ", ".join(python_name(name) for name, _ in function.regions[0].arguments)
    translator.emit("if False: yield")
    for op in function.regions[0].ops:
        translator.op(op)
    translator.emit("core.end_item()")
    name = function.attribute("sym_name").strip('"')
    return f"def {name}(core, {arguments}):\n" + "\n".join(translator.lines)
