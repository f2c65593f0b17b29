"""Advice from a report: the settings to use, and the faults to report. Pure functions of its steps."""

from __future__ import annotations

from collections.abc import Iterator

from service.doctor.deep_report import FAILED, DeepReport, Fault, Outcome, Setting
from service.doctor.plan import STEPS

# A trial's steps must be shorter by more than they vary from run to run.
MIN_GAIN = 0.03
# Trials of steps with and without graphs, skipped where one captured layer has failed.
_TRIALS_OF_CAPTURE = ("setting-npu-graphs", "setting-eager")


def conclude(report: DeepReport) -> None:
    """Fill in settings, faults and summary."""
    report.settings = list(_settings(report))
    report.faults = list(_faults(report))
    num = {status: sum(step.status == status for step in report.steps) for status in ("ok", "not run")}
    num_all = sum(step.status != "not applicable" for step in report.steps)
    bad = [step.name for step in report.steps if step.status in (*FAILED, "running")]
    said = [f"{num['ok']} of {num_all} steps have an answer"]
    if bad:
        said.append(f"{len(bad)} failed ({', '.join(bad)})")
    if num["not run"]:
        said.append(f"{num['not run']} were not run")
    report.summary = f"{'; '.join(said)}."


def _settings(report: DeepReport) -> Iterator[Setting]:
    needed = {step.name for step in STEPS if step.is_needed}
    if any(step.status in FAILED and step.name in needed for step in report.steps):
        return  # there is nothing to use them on
    if not any(step.status == "ok" for step in report.steps):
        return
    yield Setting(setting=f"--device {report.device}", why="the device that was looked at")
    yield from _trials(report)
    yield from _capture(report)
    for sentence in _known(report, "serving").facts.get("budgets", []):
        yield Setting(setting="sizes: leave them unset", why=sentence)


def _trials(report: DeepReport) -> Iterator[Setting]:
    """Settings that were tried, against the same load without them."""
    shown = {step.name: step.title.removeprefix("Setting: ") for step in STEPS}
    is_served = bool(_known(report, "serving").facts.get("loads"))  # else a trial has failed of what serving did
    has_no_capture = _known(report, "capture").status in FAILED
    for step in report.steps:
        if not step.name.startswith("setting-") or (has_no_capture and step.name in _TRIALS_OF_CAPTURE):
            continue
        name = shown.get(step.name, step.title)
        if step.status in FAILED and is_served:
            yield Setting(setting=f"not {name}", why=f"its trial {step.status}: {step.reason}")
        if step.status != "ok":
            continue
        gains = {
            load: 1 - step.facts[f"{load}_ms"] / without
            for load, without in _usual(report, step.facts.get("requests")).items()
            if step.facts.get(f"{load}_ms") and without
        }
        if not gains:
            continue
        sizes = {"many": "with most requests and adapters", "one": "with one of each"}
        told = " and ".join(
            f"{abs(gain):.0%} {'shorter' if gain > 0 else 'longer'} {sizes[load]}" for load, gain in gains.items()
        )
        is_better = max(gains.values()) > MIN_GAIN and min(gains.values()) > -MIN_GAIN
        yield Setting(setting=name if is_better else f"not {name}", why=f"decode steps were {told}")


def _usual(report: DeepReport, num_requests: int | None) -> dict[str, float | None]:
    """Milliseconds of the decode steps that a trial is compared with: of as many requests as it had, with most
    adapters, where there was time for these; and of one of each."""
    loads = _known(report, "serving").facts.get("loads", [])
    by_size = {(load["requests"], load["adapters"]): load["ms_per_token"] for load in loads}
    most = max((size for size in by_size if size[0] == num_requests and size[1] > 1), default=(0, 0))
    return {"many": by_size.get(most), "one": by_size.get((1, 1))}


def _capture(report: DeepReport) -> Iterator[Setting]:
    """Settings after a captured layer that failed; whether capture pays, its trial shows."""
    step = _known(report, "capture")
    unset = {"npu": "not --npu-graphs true", "cuda": "--eager true"}.get(report.device_type)
    if unset is not None and step.status in FAILED:
        yield Setting(setting=unset, why=f"one captured layer {step.status}: {step.reason}")


def _faults(report: DeepReport) -> Iterator[Fault]:
    """Errors and warnings of all steps, worst first, and steps without an answer."""
    for step in report.steps:
        if step.status in FAILED:
            how = {"failed": "failed", "crashed": "crashed", "timed out": "ran out of time"}[step.status]
            yield Fault(
                step=step.name,
                level="error",
                code=f"step-{step.status.replace(' ', '-')}",
                message=f"The step {how}: {step.reason}",
            )
    for level in ("error", "warning"):
        for step in report.steps:
            yield from (fault for fault in step.faults if fault.level == level)


def _known(report: DeepReport, name: str) -> Outcome:
    return next((step for step in report.steps if step.name == name), Outcome(name=name, title="", asks=""))
