"""What past steps held, for tests and for /metrics. Bounded: old records are forgotten."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from service.engine.sequence import Share

MAX_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step held. `adapters`: distinct digests; `milliseconds` of the whole step, sampling included."""

    num_tokens: int
    num_decode_tokens: int
    num_base_tokens: int
    num_sequences: int
    adapters: tuple[str, ...]
    milliseconds: float

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens


def record_of(shares: Sequence[Share], milliseconds: float) -> StepRecord:
    """The record of a step whose shares have not been settled yet."""
    return StepRecord(
        num_tokens=sum(share.num_tokens for share in shares),
        num_decode_tokens=sum(share.is_decode for share in shares),
        num_base_tokens=sum(share.num_tokens for share in shares if share.sequence.adapter is None),
        num_sequences=len(shares),
        adapters=tuple(dict.fromkeys(s.sequence.adapter for s in shares if s.sequence.adapter is not None)),
        milliseconds=milliseconds,
    )


class StepRecords:
    """The last `MAX_RECORDS` records, and those that nobody has been told of yet."""

    def __init__(self) -> None:
        self.all: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._new: deque[tuple[int, int, int, float]] = deque(maxlen=MAX_RECORDS)

    def add(self, record: StepRecord) -> None:
        self.all.append(record)
        self._new.append((record.num_tokens, record.num_sequences, len(record.adapters), record.milliseconds))

    def take_new(self) -> tuple[tuple[int, int, int, float], ...]:
        """(tokens, sequences, distinct adapters, milliseconds) of each step since the last call."""
        new = tuple(self._new)
        self._new.clear()
        return new
