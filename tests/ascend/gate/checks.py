"""The five rules of the gate. Each function raises `GateError` with what is wrong and the numbers."""

from __future__ import annotations

from typing import Any

import torch

from tests.ascend.gate import linalg_cpu, report, simulator
from tests.ascend.gate.cases import Case, Launch
from tests.ascend.gate.compiler import Compiled, compile_kernel, specialise
from tests.support.bits import same_bits

MAX_SCALAR_LOADS = 8
# The last ones, by kernel, signature, options and chip: the tests of a launch follow one another.
_compiled: dict[Any, Compiled] = {}
_MAX_COMPILED = 32


class GateError(AssertionError):
    """A kernel breaks a rule."""


def compile_launch(case: Case, launch: Launch, target: str) -> Compiled:
    """The kernel as this launch's arguments specialise it."""
    specialised = specialise(case.kernel, dict(launch.arguments))
    key = case.kernel, repr(specialised), repr(dict(case.options)), target
    if key not in _compiled:
        if len(_compiled) == _MAX_COMPILED:
            del _compiled[next(iter(_compiled))]
        _compiled[key] = compile_kernel(case.kernel, specialised, target, dict(case.options))
    return _compiled[key]


def check_fits(case: Case, compiled: Compiled) -> None:
    """Rule 1: planned memory stays within the budget (that it compiles is shown by having a `Compiled`)."""
    facts = report.read(compiled)
    if facts.unplanned:
        raise GateError(f"{facts.unplanned} buffers have no planned place: the kernel is miscompiled")
    for space, fraction in facts.fractions().items():
        if fraction > case.on_chip_fraction:
            raise GateError(
                f"{space}: {facts.used_bytes[space]} of {facts.budget_bytes[space]} bytes used, "
                f"{fraction:.0%} of it, allowed {case.on_chip_fraction:.0%}"
            )


def check_loops(case: Case, compiled: Compiled) -> None:
    """Rule 2, read off the code: no scalar access to global memory inside a work item's own loops."""
    deep = [entry for entry in report.read(compiled).scalar_depths if entry[1] > case.work_loop_depth]
    if deep:
        raise GateError(f"{len(deep)} scalar accesses to global memory inside inner loops: {deep[:4]}")
    if any(action == "store" for action, _ in report.read(compiled).scalar_depths):
        raise GateError("scalar stores to global memory")


def check_scalars(launch: Launch, counts: simulator.Counts) -> None:
    """Rule 2, counted while running: few scalar loads, all of map entries; no scalar copies in the library."""
    if copied := counts.total("library_scalar_elements"):
        raise GateError(f"the device library copies {copied} elements one by one")
    if stored := counts.total("scalar_store_global:"):
        raise GateError(f"{stored} scalar stores to global memory")
    if strangers := counts.names("scalar_load_global:") - launch.maps:
        raise GateError(f"scalar loads from {sorted(strangers)}, which are no maps")
    loads = counts.largest(simulator.DEAREST_ITEM)
    if loads > MAX_SCALAR_LOADS:
        raise GateError(f"{loads} scalar loads for one work item; {MAX_SCALAR_LOADS} are allowed")
    total = counts.largest_total("scalar_load_global:")
    if launch.max_scalar_loads is not None and total > launch.max_scalar_loads:
        raise GateError(f"{total} scalar loads of one core; {launch.max_scalar_loads} are allowed")


def check_traffic(launch: Launch, counts: simulator.Counts) -> None:
    """Rule 4: bytes moved between global memory and the chip, both ways, in pieces of 128 bytes; and transfers."""
    loaded = counts.total("load_bytes")
    moved = loaded + counts.total("store_bytes")
    for action, num_bytes, minimum, allowed in (
        ("moved", moved, launch.minimum_bytes, launch.max_traffic),
        ("read", loaded, launch.minimum_load_bytes, launch.max_load_traffic),
    ):
        if minimum is not None and num_bytes > allowed * minimum:
            raise GateError(f"{num_bytes} bytes {action}, {num_bytes / minimum:.2f} x the minimum of {minimum}")
    transfers = counts.total("short_transfers") + counts.total("long_transfers")
    if launch.max_transfers is not None and transfers > launch.max_transfers:
        raise GateError(f"{transfers} transfers; {launch.max_transfers} are allowed")


def check_time(case: Case, name: str, launch: Launch, counts: simulator.Counts) -> None:
    """Rule 5: estimated time of a launch whose traffic is judged; tiles are chosen by it."""
    taken, most = counts.estimate_us(), case.max_us.get(name)
    if launch.minimum_bytes is not None and most is None:
        raise GateError(f"{taken:.3g} us by estimate, and no bound in the case's max_us")
    if most is not None and taken > most:
        raise GateError(f"{taken:.3g} us by estimate; {most} are allowed")


def check_values(launch: Launch) -> None:
    """Rule 3: outputs equal the reference, and what must stay untouched is untouched."""
    for name, expected in launch.expected.items():
        actual = launch.tensor(name)
        absolute, relative = (0.0, 0.0) if name in launch.exact else launch.tolerance
        # Fresh outputs are NaN on purpose: a cell that should stay so must be NaN in both.
        torch.testing.assert_close(actual, expected, atol=absolute, rtol=relative, equal_nan=True, msg=_prefix(name))
        if name in launch.exact and not same_bits(actual, expected):
            raise GateError(f"{name}: zeros of the wrong sign, or other NaN")


def _prefix(name: str) -> Any:
    return lambda message: f"{name}: {message}"


def run_on_cpu(case: Case, launch: Launch, compiled: Compiled, order: linalg_cpu.Order = "forward") -> None:
    """Execute the lowered linalg, program after program in that order."""
    linalg_cpu.run(compiled.linalg, list(_runtime(case, launch).values()), launch.grid, order)


def run_simulated(case: Case, launch: Launch, compiled: Compiled) -> simulator.Counts:
    """Execute the final device code."""
    return simulator.Chip(compiled.device, case.work_loop_depth).run(
        _runtime(case, launch), launch.grid, launch.reachable
    )


def _runtime(case: Case, launch: Launch) -> dict[str, Any]:
    names = specialise(case.kernel, dict(launch.arguments)).runtime
    return {name: launch.arguments[name] for name in names}
