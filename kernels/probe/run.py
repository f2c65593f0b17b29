"""Runs the cases of each op on its implementations, best first, against plain torch on the host.

Run in the process that will serve (`probe`) or in one of its own (`isolated.py`), which survives what this does not: a
kernel that kills the process, one that never ends, one that leaves the device unusable.
"""

from __future__ import annotations

import functools
import importlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch

from kernels.platform import HEADS_FIRST, IMPLEMENTATIONS, REGIME_OF_CASE, Platform, detect, installed
from kernels.probe.cases.registry import Case, cases_of
from kernels.probe.cases.tensors import Place
from kernels.probe.op_reports import OpReport, Trial, TrialStatus
from kernels.shapes import ProbeShapes

REFERENCE = "reference"
_HOST = torch.device("cpu")
# Largest difference to the reference, relative to the largest value of the output, or of the token in attention.
# Rounding alone gives a fifth of this at most. The least of the faults of tests/doctor/test_probe.py, one key of 256
# left out, gives three times as much.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_MAX_SENTENCE_CHARACTERS = 300


def candidates(platform: Platform, op: str) -> tuple[str, ...]:
    """Implementations that may serve `op`: the platform's own, then what follows it in the table."""
    names, own = IMPLEMENTATIONS[platform.device][op], platform.implementations[op]
    return names[names.index(own) :] if own in names else (own, *names)


def try_op(
    platform: Platform,
    device: torch.device,
    op: str,
    shapes: ProbeShapes,
    *,
    excluded: Collection[str] = (),
    num_repeats: int = 0,
    begin: Callable[[str, str], None] | None = None,
) -> Iterator[Trial]:
    """Trials of `op`: of each implementation the cases of those regimes that none before it serves. A regime is served
    by the first implementation that passes all its cases; one of HEADS_FIRST serves all regimes or none.

    device       where the tensors are; the platform serves them there
    excluded     implementations that are passed over, "name", or are in one regime, "name/regime"
    num_repeats  calls that the time is the median of; 0: no time is taken
    begin        told of the implementation and the case that is about to run
    """
    cases = cases_of(op, shapes)
    served: set[str] = set()
    for implementation in candidates(platform, op):
        left = {name: case for name, case in cases.items()
                if _regime(name) not in served and _spelt(implementation, _regime(name)) not in excluded}  # fmt: skip
        if implementation in excluded or (cases and not left) or (_is_whole(implementation) and len(left) < len(cases)):
            continue
        if begin is not None:
            begin(implementation, "")
        fault = _fault_before_a_call(op, implementation, shapes)
        if fault is not None:
            yield fault
            continue
        serving = replace(platform, implementations={**platform.implementations, op: implementation}, regimes={})
        failed: set[str] = set()
        for name, case in left.items():
            if _regime(name) in failed or (failed and _is_whole(implementation)):
                continue
            if begin is not None:
                begin(implementation, name)
            with installed(serving, device.type):
                trial = _try_case(op, implementation, name, case, device, shapes, num_repeats)
            yield trial
            if trial.status != "ok":
                failed.add(_regime(name))
        if not (failed and _is_whole(implementation)):
            served |= {_regime(name) for name in left} - failed
        if {_regime(name) for name in cases} <= served:
            return


def _regime(case: str) -> str:
    return REGIME_OF_CASE.get(case, "")


def _is_whole(implementation: str) -> bool:
    """Whether it serves all regimes of its op or none."""
    return implementation in HEADS_FIRST


def _spelt(implementation: str, regime: str) -> str:
    """An implementation in one of its regimes, for `excluded`."""
    return f"{implementation}/{regime}"


def try_all(
    op: str, implementation: str, platform: Platform, device: torch.device, shapes: ProbeShapes
) -> Iterator[Trial]:
    """Every case of `op` on one implementation, whatever becomes of the others; one trial if none can be called."""
    fault = _fault_before_a_call(op, implementation, shapes)
    if fault is not None:
        yield fault
        return
    serving = replace(platform, implementations={**platform.implementations, op: implementation}, regimes={})
    for name, case in cases_of(op, shapes).items():
        with installed(serving, device.type):
            yield _try_case(op, implementation, name, case, device, shapes, 0)


def probe(
    platform: Platform, device: torch.device, shapes: ProbeShapes, *, ops: Collection[str] | None = None
) -> list[OpReport]:
    """Probe ops in this process and report on all ops of the platform.

    ops  those to probe, None for all; the others are reported as served by what the platform has
    """
    reports = []
    for op in platform.implementations:
        wished = IMPLEMENTATIONS[platform.device][op][0]
        is_probed = ops is None or op in ops
        trials = tuple(try_op(platform, device, op, shapes)) if is_probed else ()
        reports.append(report_of(op, wished, platform, trials))
    return reports


def report_of(op: str, wished: str, platform: Platform, trials: tuple[Trial, ...]) -> OpReport:
    """The report of all trials of an op: each regime is served by the first implementation that passed its cases.

    Without trials, since no case applies or the op is not probed, it is served by the platform's choice.
    """
    used: str | None = platform.implementations[op]
    regimes: dict[str, str | None] = {}
    if trials:
        by_regime: dict[str, dict[str, bool]] = {}
        failed = {trial.implementation for trial in trials if trial.status != "ok" and _is_whole(trial.implementation)}
        for trial in trials:
            if (trial.case or trial.status == "ok") and trial.implementation not in failed:
                passed = by_regime.setdefault(_regime(trial.case), {})
                passed[trial.implementation] = passed.get(trial.implementation, True) and trial.status == "ok"
        serving = {
            regime: next((name for name, is_ok in passed.items() if is_ok), None)
            for regime, passed in by_regime.items()
        }
        used = serving.get("", next(iter(serving.values()), None))
        regimes = {regime: name for regime, name in serving.items() if name != used}
    return OpReport(
        op=op, wished=wished, used=used, trials=trials, reason=platform.passed_over.get(op), regimes=regimes
    )


def _fault_before_a_call(op: str, implementation: str, shapes: ProbeShapes) -> Trial | None:
    """Whether the implementation can be imported, and takes such a model."""
    said = functools.partial(Trial, op=op, case="", implementation=implementation)
    try:
        module = importlib.import_module(f"kernels.{op}.{implementation}")
    except Exception as error:
        status: TrialStatus = "missing" if isinstance(error, ImportError) else "raised"
        return said(status=status, sentence=f"{implementation} cannot be imported ({_in_one_line(error)})")
    refusal = module.CONTRACT.refuses(shapes)
    if refusal is not None:
        return said(status="refused", sentence=f"{implementation} does not serve this model: {refusal}")
    return None


def _try_case(
    op: str,
    implementation: str,
    name: str,
    case: Case,
    device: torch.device,
    shapes: ProbeShapes,
    num_repeats: int,
) -> Trial:
    truth = truth_of(case, shapes)
    place = Place(device, shapes.torch_dtype, shapes.torch_row_dtype)
    said = functools.partial(Trial, op=op, case=name, implementation=implementation)
    try:
        with torch.inference_mode():
            call = case(shapes, place)
            outputs = [output.to(_HOST, torch.float32, copy=True) for output in call()]
            microseconds = _microseconds(call, device, num_repeats) if num_repeats else None
    except Exception as error:
        # Whatever it is, the next implementation may do better.
        return said(status="raised", sentence=f"{implementation} failed in {name} ({_in_one_line(error)})")
    tolerance, found = tolerance_of(shapes), distance(outputs, truth)
    measured = functools.partial(said, error=found, tolerance=tolerance, microseconds=microseconds)
    if not found <= tolerance:
        sentence = f"{implementation} is {found:.1e} away from plain torch in {name}, and may be {tolerance:.0e}"
        return measured(status="differs", sentence=sentence)
    return measured(status="ok")


def tolerance_of(shapes: ProbeShapes) -> float:
    """The largest `distance` that passes."""
    return max(_TOLERANCES[shapes.torch_dtype], _TOLERANCES[shapes.torch_row_dtype])


def truth_of(case: Case, shapes: ProbeShapes) -> list[torch.Tensor]:
    """Plain torch's outputs of the same rounded values, in float32 or float64 on the host."""
    with installed(_plain_torch()), torch.inference_mode():
        place = Place(_HOST, shapes.torch_dtype, shapes.torch_row_dtype, wide=True)
        return [output.clone() for output in case(shapes, place)()]


@functools.cache
def _plain_torch() -> Platform:
    platform = detect("cpu")
    reference: Mapping[str, str] = dict.fromkeys(platform.implementations, REFERENCE)
    return replace(platform, implementations=reference)


def distance(outputs: list[torch.Tensor], truths: list[torch.Tensor]) -> float:
    """Largest difference of any output, relative to its largest true value. Infinite if the outputs are not alike, or
    something is not a number on one side only; on both sides it is memory that the op had to leave alone."""
    if [output.shape for output in outputs] != [truth.shape for truth in truths]:
        return math.inf
    return max(_difference(output, truth) for output, truth in zip(outputs, truths, strict=True))


def _difference(output: torch.Tensor, truth: torch.Tensor) -> float:
    written = ~truth.isnan()
    if not torch.equal(~output.isnan(), written):
        return math.inf
    if not bool(written.any()):
        return 0.0
    scale = max(float(truth[written].abs().max()), 1e-30)
    return float((output - truth)[written].abs().max()) / scale


def _microseconds(call: Callable[[], object], device: torch.device, num_repeats: int) -> float:
    wait = _wait_for(device)
    wait()
    times = []
    for _ in range(num_repeats):
        started = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def _wait_for(device: torch.device) -> Callable[[], None]:
    synchronize = torch.get_device_module(device).synchronize
    return synchronize if device.type == "cpu" else functools.partial(synchronize, device)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if len(text) > _MAX_SENTENCE_CHARACTERS:
        text = text[:_MAX_SENTENCE_CHARACTERS] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
