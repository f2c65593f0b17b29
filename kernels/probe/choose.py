"""The engine's choice at its start: the platform, with each op served by the best implementation that works here."""

from __future__ import annotations

import functools
import logging

import torch

from kernels.platform import BackendError, Platform, in_use, install
from kernels.probe.isolated import probe_apart
from kernels.probe.op_reports import OpReport
from kernels.probe.probe_process import ProbeProcess
from kernels.probe.run import REFERENCE, probe
from kernels.shapes import ProbeShapes

log = logging.getLogger(__name__)


def choose_implementations(
    device: str, shapes: ProbeShapes, process: ProbeProcess | None = None
) -> tuple[Platform, tuple[OpReport, ...]]:
    """Probe the ops of a model of these shapes, and install the platform that serves them in this process.

    On an accelerator every op is probed, by a process apart. On a CPU, whose kernels are torch's, this process does it,
    and leaves out ops that are served by the reference itself.

    process  that was started to probe; it is closed

    Raises BackendError, one sentence, if the device is absent or an op has no implementation that works.
    """
    where = torch.device(device)
    platform = in_use(where)
    if where.type == "cpu":
        if process is not None:
            process.end()
        reports = probe_here(tuple(platform.implementations.items()), platform.device, where, shapes)
    else:
        reports = tuple(probe_apart(platform, device, shapes, process=process))
    serving = with_reports(platform, reports)
    if serving is not platform:
        install(serving, where.type)
        for sentence in serving.fallbacks[len(platform.fallbacks) :]:
            log.warning("%s", sentence)
    return serving, reports


def with_reports(platform: Platform, reports: tuple[OpReport, ...]) -> Platform:
    """The platform with the fallbacks that the reports ask for. Raises BackendError if an op is served by nothing."""
    for report in reports:
        if report.used is None or not report.is_served:
            raise BackendError(report.sentence)
        # Another model of this process may have needed a fallback that this one does not.
        if report.used != platform.implementations[report.op] or report.regimes:
            regimes = {regime: name for regime, name in report.regimes.items() if name is not None}
            platform = platform.with_fallback(report.op, report.used, report.sentence, regimes)
    return platform


@functools.cache
def probe_here(
    implementations: tuple[tuple[str, str], ...], kind: str, device: torch.device, shapes: ProbeShapes
) -> tuple[OpReport, ...]:
    """Once for each platform and shapes of this process, which may build several engines."""
    platform = in_use(device)
    assert tuple(platform.implementations.items()) == implementations and platform.device == kind
    ops = {op for op, implementation in implementations if implementation != REFERENCE}
    return tuple(probe(platform, device, shapes, ops=ops))
