"""One step in a process of its own: whatever it does, crash, hang or flood its output, costs that step alone.

The process is the leader of a session, so that everything it starts is killed with it. It dies with this process, by
the kernel's parent-death signal (see `step_process.py`), so that no killed process leaves a device in use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from kernels.child_process import ReportingChild, ending_of
from service.doctor.deep_report import Fault, Outcome
from service.doctor.plan import Step

# For one that has said its last word to end by itself, so that its exit code is its own.
_EXIT_SECONDS = 10.0


def run_step(
    step: Step, request: Mapping[str, Any], outcome: Outcome, limit_seconds: float, tell: Callable[[str], None]
) -> None:
    """Fill in the outcome: status, reason, facts, faults, seconds. Raises nothing that the step has done.

    request  what `step_process.py` reads, beside the step's own
    tell     shows what is being done, in a few words
    """
    started = time.monotonic()
    outcome.status, outcome.reason, outcome.facts, outcome.faults = "running", None, {}, []
    asked = {**request, "step": step.name, "work": step.work, "devices": step.devices, "changed": dict(step.options)}
    try:
        child = ReportingChild("service.doctor.checks.step_process", environment=step.environment)
    except OSError as error:  # no temporary directory has room, or there are too many processes
        outcome.status, outcome.reason = "crashed", f"its process could not be started ({error.strerror})"
        return
    try:
        child.ask(asked)
        _follow(child, outcome, started + limit_seconds, tell)
    finally:
        is_gone = child.end()
        outcome.seconds = round(time.monotonic() - started, 1)
    if outcome.status == "running":
        outcome.status, outcome.reason = "crashed", ending_of(child.code) + child.last_words
    elif outcome.status == "timed out":
        outcome.reason = f"did not end within {limit_seconds:.0f} s, and was killed{child.last_words}"
    if not is_gone:
        outcome.reason = f"{outcome.reason}; its process {child.pid} does not end even so"


def _follow(child: ReportingChild, outcome: Outcome, deadline: float, tell: Callable[[str], None]) -> None:
    """Read the process's reports, up to the last one, its end or the deadline."""
    while True:
        try:
            line = child.line(deadline - time.monotonic())
        except TimeoutError:
            outcome.status = "timed out"
            return
        if line is None:
            child.end(_EXIT_SECONDS)  # its exit code, before it is killed for good measure
            return
        if _take(line, outcome, tell):
            return


def _take(line: str, outcome: Outcome, tell: Callable[[str], None]) -> bool:
    """One line of the process; True for its last. What is no line of the protocol is passed over."""
    try:
        word = json.loads(line)
    except ValueError:
        return False
    match word:
        case {"tell": str(text)}:
            tell(text)
        case {"facts": dict(facts)}:
            outcome.facts = {**outcome.facts, **facts}
        case {"fault": dict(fault)}:
            outcome.faults = [*outcome.faults, Fault(step=outcome.name, **fault)]
        case {"end": status, "reason": reason}:
            outcome.status, outcome.reason = status, reason
            return True
    return False
