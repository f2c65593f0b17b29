"""Which implementation serves prompts, and which decode steps, where one of the gated delta rule's kernels fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.ascend_relaunch import AscendLaunch
from kernels.gated_delta.triton_ascend_chunks import KERNELS
from kernels.platform import IMPLEMENTATIONS, contract, in_use, installed
from kernels.probe.cases.registry import cases_of
from kernels.probe.cases.tensors import Place
from kernels.probe.isolated import with_reports
from kernels.probe.op_reports import OpReport
from kernels.probe.run import probe
from kernels.shapes import ProbeShapes

CPU, SHAPES = torch.device("cpu"), ProbeShapes(delta=(1, 2, 16, 16))
CHUNKS, VECTOR, TORCH = "triton_ascend", "triton_ascend_vector", "any_device"
# Kernel -> what serves prompts, and decode steps, where it fails.
SERVED_WITHOUT = {
    **{kernel.fn.__name__: (VECTOR, CHUNKS) for kernel in KERNELS},
    "gated_delta_walk": (TORCH, CHUNKS),
    "gated_delta_decode": (CHUNKS, TORCH),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels in the order of their launches, on a CPU whose table for this op is an NPU's."""
    monkeypatch.setitem(IMPLEMENTATIONS["cpu"], "gated_delta", IMPLEMENTATIONS["npu"]["gated_delta"])  # type: ignore[index]
    names: list[str] = []
    run = AscendLaunch.run

    def noted(launch: AscendLaunch) -> object:
        names.append(launch.kernel.fn.__name__)
        return run(launch)

    monkeypatch.setattr(AscendLaunch, "run", noted)
    platform = replace(in_use(CPU), num_cores=3)
    with installed(platform.with_fallback("gated_delta", CHUNKS, "for the test"), "cpu"):
        yield names


def break_kernel(monkeypatch: pytest.MonkeyPatch, broken: str, fault: str) -> None:
    run = AscendLaunch.run

    def faulty(launch: AscendLaunch) -> object:
        if launch.kernel.fn.__name__ != broken:
            return run(launch)
        if fault == "raises":
            raise RuntimeError("cube overflow")
        return None

    monkeypatch.setattr(AscendLaunch, "run", faulty)


def probed() -> OpReport:
    reports = probe(in_use(CPU), CPU, SHAPES, ops={"gated_delta"})
    return next(report for report in reports if report.op == "gated_delta")


@pytest.mark.parametrize("fault", ["raises", "does nothing"])
@pytest.mark.parametrize("broken", SERVED_WITHOUT)
def test_each_kernel_that_fails_takes_its_own_regime_alone(
    broken: str, fault: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernel(monkeypatch, broken, fault)
    serving = with_reports(in_use(CPU), (probed(),))
    assert (serving.serving("gated_delta", "prefill"), serving.serving("gated_delta")) == SERVED_WITHOUT[broken]
    with installed(serving, "cpu"):
        launched.clear()
        for case in cases_of("gated_delta", SHAPES).values():
            case(SHAPES, Place(CPU, torch.float32, torch.float32))()
    assert broken not in launched


def test_where_chunks_fail_prompts_of_any_length_are_walked(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernel(monkeypatch, "gated_delta_scan", "raises")
    report = probed()
    assert report.sentence == (
        "The op gated_delta is served by triton_ascend, but in prompts by triton_ascend_vector: triton_ascend failed "
        "in gated_delta_prefill (RuntimeError: cube overflow)."
    )
    serving = with_reports(in_use(CPU), (report,))
    with installed(serving, "cpu"):
        launched.clear()
        cases_of("gated_delta", SHAPES)["gated_delta_prefill"](SHAPES, Place(CPU, torch.float32, torch.float32))()
        assert launched == ["gated_delta_walk"]
        assert contract("gated_delta", CPU).replayable
