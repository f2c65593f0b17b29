"""The outcome of a step, and the whole report: plain values that survive the process that found them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from service.doctor.report import Level, clean

# Raised when a field of the JSON goes or changes its meaning; new fields do not count.
FORMAT = 1

Status = Literal["not run", "running", "ok", "failed", "crashed", "timed out", "not applicable"]
# Ended without the answer, with the reason.
FAILED: tuple[Status, ...] = ("failed", "crashed", "timed out")
# The final states of a step.
ENDED: tuple[Status, ...] = ("ok", *FAILED, "not applicable")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault; see `service.doctor.report.Finding`. step: the step that found it."""

    step: str
    level: Level
    code: str
    message: str
    cure: str | None = None


class Outcome(msgspec.Struct, kw_only=True):
    """One step. `reason`: why it has failed, or does not apply. `facts` hold what it found before that, too.

    num_begun  how often it was begun; a step that was "running" when the command was killed is begun once more
    """

    name: str
    title: str
    asks: str
    status: Status = "not run"
    reason: str | None = None
    seconds: float = 0.0
    num_begun: int = 0
    facts: dict[str, Any] = {}
    faults: list[Fault] = []


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One that is recommended, as a user writes it, and why."""

    setting: str
    why: str


class FirstHostReport(msgspec.Struct, kw_only=True):
    """Everything. `device` as it was asked for, until the first step has found which it is.

    asked  digest of what the command was asked, so that no other one goes on with the report
    begun  when, UTC
    """

    multilora: str
    device: str
    model: str
    asked: str
    begun: str
    steps: list[Outcome]
    format: int = FORMAT
    settings: list[Setting] = []
    faults: list[Fault] = []
    summary: str = ""

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    def step(self, name: str) -> Outcome:
        return next(step for step in self.steps if step.name == name)

    def as_json(self) -> bytes:
        """For people and programs. No home directory is named; numbers that JSON lacks are null."""
        return msgspec.json.format(msgspec.json.encode(clean(msgspec.to_builtins(self))), indent=1)


def read_report(encoded: bytes) -> FirstHostReport:
    """Raises ValueError, one line, for what is no report."""
    return msgspec.json.decode(encoded, type=FirstHostReport)
