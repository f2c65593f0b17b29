"""Which operators of torch_npu the service calls, that each call is reached, and that no slip in one goes unnoticed."""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ascend.twin import mutants
from tests.ascend.twin.mutants import Mutant, Seen
from tests.ascend.twin.stand_ins import calls, checks, stand_ins
from tests.ascend.twin.stand_ins.calls import Call, Patched

# Mutants that mean the same as the original, with the reason.
EQUIVALENT = {
    "npu_scatter_pa_kv_cache: slot_mapping: dtype int32": "slots are int32 or int64",
    "npu_add_rms_norm: arguments 0 and 1 exchanged": "a sum does not depend on the order of its two summands",
    "npu_grouped_matmul: split_item: value": "2 and 3 both give one result",
    "npu_fused_infer_attention_score: results exchanged": "they are the places that were given, and nobody takes them",
    **{
        f"_npu_fused_infer_attention_score_get_max_workspace: {lengths}: value {which}": "it is for any lengths"
        for lengths in ("actual_seq_lengths", "actual_seq_lengths_kv")
        for which in range(2 if lengths == "actual_seq_lengths" else 3)
    },
}
SOURCES = [source for source in calls.sources() if source.calls]
CALLS = [call for source in SOURCES for call in source.calls]


def test_no_use_of_an_operator_escapes_the_search() -> None:
    assert [escape for source in calls.sources() for escape in source.escapes] == []
    assert CALLS, "the service calls operators"


def test_what_the_service_names_of_the_runtime_is_in_the_wheel() -> None:
    import torch_npu

    names = sorted({name for source in calls.sources() for name in source.dotted})
    for name in names:
        root, *rest = name.split(".")
        found: Any = {"torch": torch, "torch_npu": torch_npu}[root]
        for part in rest:
            try:
                found = getattr(found, part)
            except AttributeError:
                pytest.fail(f"{name}: there is no {part}")
            except RuntimeError:
                break  # a setting that is there, but wants a device to be read


def test_there_is_a_stand_in_for_each_operator_used_and_no_other() -> None:
    assert {call.op for call in CALLS} == set(stand_ins.STAND_INS)


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("name", checks.CHECKS)
def test_op_equals_float64(name: str) -> None:
    before = stand_ins.num_calls.total()
    checks.CHECKS[name]()
    assert stand_ins.num_calls.total() > before, "no operator of torch_npu was called"


@pytest.mark.usefixtures("npu")
def test_every_call_is_reached_and_every_mutant_turns_red(record_property: Callable[[str, object], None]) -> None:
    started = time.perf_counter()
    patched = {source.module: Patched(source) for source in SOURCES}
    seen = {call: _observe(patched[call.module], call) for call in CALLS}
    reached = [call for call in CALLS if seen[call].checks]
    found = [
        (mutant, _fault(patched[call.module], mutant, seen[call].checks))
        for call in reached
        for mutant in mutants.mutants(patched[call.module].source, call, seen[call].arguments)
    ]
    survivors = {f"{mutant.call.op}: {mutant.what}" for mutant, fault in found if fault is None}
    for line in _summary(len(reached), found, time.perf_counter() - started):
        record_property("twin", line)
    assert [str(call) for call in CALLS if call not in reached] == [], "calls that no check reaches"
    assert survivors - EQUIVALENT.keys() == set(), "mutants that nobody notices"
    assert EQUIVALENT.keys() - survivors == set(), "listed as equivalent, but noticed"
    assert len(survivors) <= 0.05 * len(found)


class _Seen:
    """The arguments that a call was seen with, and the checks that made it."""

    def __init__(self) -> None:
        self.arguments: Seen = defaultdict(list)
        self.checks: dict[str, Callable[[], None]] = {}


def _observe(patched: Patched, call: Call) -> _Seen:
    """Run all checks with the call recorded."""
    seen = _Seen()

    def record(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seen.checks[name] = checks.CHECKS[name]
        for argument, value in [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]:
            seen.arguments[argument].append(value)
        result = op(*args, **kwargs)
        seen.arguments["return"].append(result)
        return result

    tree = mutants.recorded(patched.source, call)
    for name, check in checks.CHECKS.items():
        patched.exchange(tree, functools.partial(record, name))
        try:
            check()
        finally:
            patched.restore()
    return seen


def _fault(patched: Patched, mutant: Mutant, its_checks: dict[str, Callable[[], None]]) -> str | None:
    """What the first check that fails says of the mutant; None if none does."""
    patched.exchange(mutant.build(), mutants.hook)
    try:
        for check in its_checks.values():
            try:
                check()
            except Exception as error:
                return type(error).__name__
    finally:
        patched.restore()
    return None


def _summary(num_reached: int, found: list[tuple[Mutant, str | None]], seconds: float) -> list[str]:
    kinds = Counter(mutant.kind for mutant, _ in found)
    faults = Counter(fault or "equivalent" for _, fault in found)
    num_equivalent = faults["equivalent"]
    by_kind = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    by_fault = ", ".join(f"{n} {fault}" for fault, n in sorted(faults.items()) if fault != "equivalent")
    return [
        f"{num_reached} of {len(CALLS)} calls of {len(stand_ins.STAND_INS)} operators of torch_npu reached",
        f"{len(found)} mutants of them ({by_kind}) in {seconds:.0f} s",
        f"{len(found) - num_equivalent} of these noticed ({by_fault}), "
        f"{num_equivalent} equivalent ({num_equivalent / len(found):.1%})",
    ]
