"""Probes in a process apart, so that a kernel that kills its process, never ends or breaks the device costs a fallback.

After such an end the rest is probed by a new process, which passes over the implementation at fault. The engine chooses
at its start: the platform, with each op served by the best implementation that works here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from kernels.ascend_runtime import cache_in_use
from kernels.platform import IMPLEMENTATIONS, REGIME_OF_CASE, BackendError, Platform, in_use, install
from kernels.probe.op_reports import OpReport, Trial, TrialStatus
from kernels.probe.probe_process import ProbeProcess
from kernels.probe.run import REFERENCE, probe, report_of
from kernels.shapes import ProbeShapes

# A kernel's first call compiles it, which takes up to a minute on an NPU.
HANG_SECONDS = 300.0


def probe_apart(
    platform: Platform,
    device: str,
    shapes: ProbeShapes,
    *,
    process: ProbeProcess | None = None,
    num_repeats: int = 0,
    on_begin: Callable[[str, str], None] | None = None,
    hang_seconds: float = HANG_SECONDS,
) -> list[OpReport]:
    """Reports on all ops of the platform, in its order.

    device        as the probing process names it: "cuda:1"
    process       the first to probe, started before; it is closed
    on_begin      told of the op and implementation that are about to be probed
    hang_seconds  without a word from the probing process, after which its implementation is said to hang

    Raises BackendError if nothing can be probed at all.
    """
    work = ProbeWork(platform, on_begin or (lambda _op, _implementation: None))
    while work.left:
        with process or ProbeProcess() as process:
            process.ask(
                {
                    "device": device,
                    # This process finds the kernels that it compiles, and compiles nothing until it has ended.
                    "environ": cache_in_use(),
                    "shapes": asdict(shapes),
                    "ops": work.left,
                    "excluded": work.excluded(),
                    "compiles_ahead": work.compiles_ahead,
                    "num_repeats": num_repeats,
                }
            )
            for line in process.lines(hang_seconds):
                work.take(line)
        if work.left:
            work.blame(process)
        process = None
    return work.reports()


class ProbeWork:
    """Results so far, and the case that a running process was about to try.

    compiles_ahead  whether the next process compiles kernels ahead; False after a process died while doing so
    """

    def __init__(self, platform: Platform, on_begin: Callable[[str, str], None]) -> None:
        self.left = list(platform.implementations)
        self.compiles_ahead = True
        self._is_ahead = False
        self._platform = platform
        self._on_begin = on_begin
        self._trials: dict[str, list[Trial]] = {op: [] for op in platform.implementations}
        self._at_work: dict[str, str] | None = None

    def take(self, line: dict[str, Any]) -> None:
        """Handle one line of the process. Raises BackendError for a fault of the whole probe."""
        match line:
            case {"fault": sentence}:
                raise BackendError(sentence)
            case {"ahead": is_ahead}:
                self._is_ahead = is_ahead
            case {"begin": op, "implementation": implementation}:
                self._at_work = line
                self._on_begin(op, implementation)
            case {"trial": fields}:
                self._note(Trial(**fields))
            case {"done": op}:
                self.left.remove(op)
                self._at_work = None

    def blame(self, process: ProbeProcess) -> None:
        """Note the case that a process was at when it ended too early. Raises BackendError if it was at none."""
        if self._is_ahead:
            self.compiles_ahead = self._is_ahead = False
            return
        if self._at_work is None:
            raise BackendError(f"The process that probes the ops {process.ending}.")
        op, case, implementation = (self._at_work[name] for name in ("begin", "case", "implementation"))
        found = self._trials[op]
        if not found or found[-1].implementation != implementation or found[-1].status == "ok":
            status: TrialStatus = "hung" if process.hung else "crashed"
            sentence = f"{implementation} {process.ending} in {case or 'its import'}"
            self._note(Trial(op=op, case=case, implementation=implementation, status=status, sentence=sentence))
        self._at_work = None

    def excluded(self) -> dict[str, list[str]]:
        """Implementations that have failed, by op."""
        return {op: [_spelt(trial) for trial in found if trial.status != "ok"] for op, found in self._trials.items()}

    def _note(self, trial: Trial) -> None:
        """The last word on a case: a process that goes on for another tries some of them again."""
        found = self._trials[trial.op]
        same = [one for one in found if (one.implementation, one.case) == (trial.implementation, trial.case)]
        if same:
            found[found.index(same[0])] = trial
        else:
            found.append(trial)

    def reports(self) -> list[OpReport]:
        table = IMPLEMENTATIONS[self._platform.device]
        return [report_of(op, table[op][0], self._platform, tuple(found)) for op, found in self._trials.items()]


def _spelt(trial: Trial) -> str:
    """The failed implementation, or the failed one in a regime, as `excluded` of `run.try_op` spells it."""
    if not trial.case:
        return trial.implementation
    return f"{trial.implementation}/{REGIME_OF_CASE.get(trial.case, '')}"


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
