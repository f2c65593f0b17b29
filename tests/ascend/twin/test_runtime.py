"""What the service asks of torch_npu's runtime: as the wheel has it, each reached, and no slip goes unnoticed."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.ascend.twin.stand_ins import calls
from tests.ascend.twin.stand_ins.calls import Patched
from tests.ascend.twin.stand_ins.slips import Hook, Slip, slips
from tests.support.npu import fake_npu

CALLS = [call for source in calls.sources() for call in calls.runtime_calls(source)]
# Functions without such a call that hand values to one, or use its answer.
HELPERS = {
    "kernels.ascend_runtime": ("torch_npu", "_launches_queue"),
    "kernels.platform": ("prepare", "_without_triton"),
    "service.engine.model.npu_graphs": (),
    "service.doctor.checks.profiles": (),
}
# Slips that mean the same as the original, with the reason.
EQUIVALENT = {
    "_describe_npu: properties.name of chip_of changed": "a chip is told by the beginning of its name",
}


def _said() -> list[fake_npu.Said]:
    """Everything that the checks have the service ask for."""
    fake_npu.EVERYTHING_SAID.clear()
    for check in fake_npu.CHECKS.values():
        check()
    return list(fake_npu.EVERYTHING_SAID)


def test_every_call_of_the_runtime_is_reached() -> None:
    assert CALLS, "the service asks the runtime"
    assert {call.op for call in CALLS} == {said.name for said in _said()}


def test_every_call_of_the_runtime_fits_the_wheel() -> None:
    """Names, and the arguments that each takes; what CANN's stubs can answer is called."""
    import torch_npu

    for said in _said():
        *path, name = said.name.split(".")
        owner: Any = torch_npu
        for part in path:
            owner = getattr(owner, part)
        if said.is_set:
            setattr(owner, name, *said.args)
        elif owner is torch_npu._C:
            assert callable(getattr(owner, name))  # written in C: it has no signature
        else:
            inspect.signature(getattr(owner, name)).bind(*said.args, **said.kwargs)
        if name in ("set_compile_mode", "is_available"):
            getattr(owner, name)(*said.args, **said.kwargs)
        if name == "get_cann_version":
            assert f'"{said.args[0]}' in inspect.getdoc(owner.get_cann_version).replace("\\", "")
        if name in ("set_device", "get_device_properties"):
            assert torch_npu.npu.utils._get_device_index(*said.args, optional=True) == 3
    for properties, *_ in fake_npu.PLATFORMS.values():
        assert properties.keys() <= set(dir(torch_npu._C._NPUDeviceProperties))


def test_every_mutant_of_the_runtime_s_calls_turns_red(record_property: Callable[[str, object], None]) -> None:
    started = time.perf_counter()
    found: list[tuple[Slip, str | None]] = []
    for source in calls.sources():
        asking = calls.runtime_calls(source)
        if not asking:
            continue
        helpers = [dataclasses.replace(asking[0], function=name) for name in HELPERS[source.module]]
        patched = Patched(dataclasses.replace(source, calls=(*asking, *helpers)))
        for slip in slips(source.tree, {call.function for call in patched.source.calls}):
            hook = Hook()
            fault = _fault(patched, slip, hook)
            if slip.kind != "value" or hook.has_changed:
                found.append((slip, fault))
    survivors = {slip.what for slip, fault in found if fault is None}
    for line in _summary(found, time.perf_counter() - started):
        record_property("twin", line)
    assert survivors - EQUIVALENT.keys() == set(), "mutants that nobody notices"
    assert EQUIVALENT.keys() - survivors == set(), "listed as equivalent, but noticed"
    assert len(survivors) <= 0.05 * len(found)


def _fault(patched: Patched, slip: Slip, hook: Hook) -> str | None:
    """What the first check that fails says of the slip; None if none does."""
    patched.exchange(slip.build(), hook)
    try:
        for check in fake_npu.CHECKS.values():
            try:
                check()
            except (Exception, pytest.fail.Exception) as error:  # what pytest raises itself is none
                return type(error).__name__
    finally:
        patched.restore()
    return None


def _summary(found: list[tuple[Slip, str | None]], seconds: float) -> list[str]:
    by_kind = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(slip.kind for slip, _ in found).items()))
    num_equivalent = sum(fault is None for _, fault in found)
    return [
        f"{len(CALLS)} calls and settings of torch_npu's runtime reached, beside the operators",
        f"{len(found)} mutants of them ({by_kind}) in {seconds:.0f} s, {len(found) - num_equivalent} noticed, "
        f"{num_equivalent} equivalent ({num_equivalent / len(found):.1%})",
    ]
