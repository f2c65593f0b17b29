"""What a probe found out, in plain values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "missing", "refused", "raised", "differs", "crashed", "hung"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One case of an op on one implementation.

    case          name of the public op, e.g. "lora_linear"; "" where it did not come to a call, because the
                  implementation cannot be imported, or says itself that it does not serve such a model
    error         largest difference to the reference, relative to the largest value of the reference, in attention of
                  the token; infinite where one of the two is not a number; None where there is no result
    tolerance     what `error` may be
    microseconds  of one call, its launch and the wait for its end included; median. None if not measured
    sentence      what is wrong; None for "ok"
    """

    op: str
    case: str
    implementation: str
    status: Status
    error: float | None = None
    tolerance: float | None = None
    microseconds: float | None = None
    sentence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpReport:
    """Which implementation serves an op, and why not the one wished for.

    wished  first choice of the table for this kind of device
    used    the first of the table that passed all its cases; None if none did
    trials  of all implementations tried, in order; empty where the op was not probed
    reason  why the platform had passed over the first choice before, if it had; a sentence
    """

    op: str
    wished: str
    used: str | None
    trials: tuple[Trial, ...] = ()
    reason: str | None = None

    @property
    def is_fallback(self) -> bool:
        return self.used != self.wished

    @property
    def sentence(self) -> str | None:
        """Why the wished-for implementation does not serve the op; None if it does."""
        if not self.is_fallback:
            return None
        faults = [self.reason.rstrip(".")] if self.reason else []
        faults += [trial.sentence or trial.status for trial in self.trials if trial.status != "ok"]
        faults = faults or [f"{self.wished} was passed over before this probe"]
        served = f"served by {self.used} instead of {self.wished}" if self.used else "not served by any implementation"
        return f"The op {self.op} is {served}: {'; '.join(faults)}."
