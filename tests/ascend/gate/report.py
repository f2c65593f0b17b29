"""What can be read off a kernel's final device IR without running it: on-chip memory, and scalar access in loops."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.ascend.gate.compiler import Compiled
from tests.ascend.gate.memory import parse_type
from tests.ascend.gate.mlir import Op, parse, walk

_LOOPS = ("scf.for", "scf.while", "scf.parallel")
# On-chip memories as the IR calls them, and the entry of the device table that holds their size in bits.
_BUDGETS = {"ub": "UB_SIZE", "cbuf": "L1_SIZE", "ca": "L0A_SIZE", "cb": "L0B_SIZE", "cc": "L0C_SIZE"}


@dataclass
class Report:
    """Facts of one compiled kernel.

    used_bytes       planned on-chip memory by space, the largest of its device functions
    budget_bytes     what the chip has
    scalar_depths    for each access to a single element of global memory: "load" or "store", and how many loops stand
                     around it
    unplanned        buffers that the planner did not place: the kernel was miscompiled
    """

    used_bytes: dict[str, int] = field(default_factory=dict)
    budget_bytes: dict[str, int] = field(default_factory=dict)
    scalar_depths: list[tuple[str, int]] = field(default_factory=list)
    unplanned: int = 0

    def fractions(self) -> dict[str, float]:
        """Used part of each on-chip memory."""
        return {space: used / self.budget_bytes[space] for space, used in self.used_bytes.items()}


def read(compiled: Compiled) -> Report:
    """Collect the facts."""
    module, _ = parse(compiled.device)
    table = {name: int(value) for name, value in re.findall(r'dl_entry<"(\w+)", (\d+) : i32>', compiled.device)}
    report = Report(budget_bytes={space: table[entry] // 8 for space, entry in _BUDGETS.items()})
    for function in module.regions[0].ops:
        if function.name == "func.func" and function.regions and "HOST" not in function.attribute("hacc.function_kind"):
            _read_function(function, report)
    if compiled.printed_ub_bits is not None:
        report.used_bytes["ub"] = compiled.printed_ub_bits // 8
    return report


def _read_function(function: Op, report: Report) -> None:
    constants: dict[str, int] = {}
    single: set[str] = set()  # views of one element of global memory

    def visit(op: Op, path: tuple[Op, ...]) -> None:
        if op.name == "arith.constant":
            if found := re.match(r"(-?\d+) :", op.attribute("value")):
                constants[op.results[0]] = int(found.group(1))
        elif op.name == "hivm.hir.pointer_cast":
            kind = parse_type(op.result_types[0])
            # Global memory through a loaded pointer is not on the chip; several addresses are several buffers.
            if kind.space == "gm":
                return
            for address in op.operands:
                end = constants.get(address, 0) + (kind.num_bytes or 0)
                report.used_bytes[kind.space] = max(report.used_bytes.get(kind.space, 0), end)
        elif op.name in ("memref.load", "memref.store"):
            kind = parse_type(op.operand_types[0 if op.name == "memref.load" else 1])
            if kind.space == "gm":
                depth = sum(ancestor.name in _LOOPS for ancestor in path)
                report.scalar_depths.append((op.name.removeprefix("memref."), depth))
        elif op.name == "memref.reinterpret_cast":
            single.update(op.results if set(parse_type(op.result_types[0]).sizes) <= {1} else ())
        elif op.name == "memref.cast":
            single.update(op.results if op.operands[0] in single else ())
        elif op.name == "func.call" and single.intersection(op.operands):
            # The DMA engine is made to move a single element: scalar access by another name.
            if found := re.match(r"@(load_gm|store_ubuf)_to_", op.attribute("callee")):
                depth = sum(ancestor.name in _LOOPS for ancestor in path)
                report.scalar_depths.append((found.group(1).partition("_")[0], depth))
        elif op.name == "memref.alloc":
            report.unplanned += 1

    walk(function, visit)
