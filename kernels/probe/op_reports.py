"""Results of a probe, in plain values that travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kernels.platform import REGIMES

TrialStatus = Literal["ok", "missing", "refused", "raised", "differs", "crashed", "hung"]


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
    status: TrialStatus
    error: float | None = None
    tolerance: float | None = None
    microseconds: float | None = None
    sentence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpReport:
    """Which implementation serves an op, and why not the one wished for.

    wished  first choice of the table for this kind of device
    used    the first of the table that passed all cases of decode steps; None if none did
    trials  of all implementations tried, in order; empty where the op was not probed
    regimes  of the op, those that are served by another implementation than `used`, by which; None: by none
    reason  why the platform had passed over the first choice before, if it had; a sentence
    """

    op: str
    wished: str
    used: str | None
    trials: tuple[Trial, ...] = ()
    reason: str | None = None
    regimes: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def is_served(self) -> bool:
        return self.used is not None and None not in self.regimes.values()

    @property
    def is_fallback(self) -> bool:
        return self.used != self.wished or any(name != self.wished for name in self.regimes.values())

    @property
    def sentence(self) -> str | None:
        """Why the wished-for implementation does not serve the op, or a regime of it; None if it does."""
        if not self.is_fallback:
            return None
        faults = [self.reason.rstrip(".")] if self.reason else []
        faults += [trial.sentence or trial.status for trial in self.trials if trial.status != "ok"]
        faults = faults or [f"{self.wished} was passed over before this probe"]
        if self.used is None:
            served = "not served by any implementation"
        elif self.used == self.wished:
            served = f"served by {self.used}"
        else:
            served = f"served by {self.used} instead of {self.wished}"
        for regime, name in self.regimes.items():
            served += f", but in {REGIMES[regime]} {f'by {name}' if name else 'by none'}"
        return f"The op {self.op} is {served}: {'; '.join(faults)}."
