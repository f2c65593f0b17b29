"""Records of past steps, for tests and for /metrics. Bounded: old records are dropped."""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass

from kernels.lora.ops import call_count
from service.engine.ipc.messages import Tier
from service.engine.sequences.sequence import ScheduledChunk, Sequence

MAX_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The contents of one step. `adapters`: distinct digests."""

    num_tokens: int
    num_decode_tokens: int
    num_base_tokens: int
    num_sequences: int
    adapters: tuple[str, ...]

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens


def record_of(chunks: abc.Sequence[ScheduledChunk]) -> StepRecord:
    """The record of a step of these chunks."""
    return StepRecord(
        num_tokens=sum(chunk.num_tokens for chunk in chunks),
        num_decode_tokens=sum(chunk.is_decode for chunk in chunks),
        num_base_tokens=sum(chunk.num_tokens for chunk in chunks if chunk.adapter is None),
        num_sequences=len(chunks),
        adapters=tuple(dict.fromkeys(c.adapter for c in chunks if c.adapter is not None)),
    )


class StepRecords:
    """The last `MAX_RECORDS` records, and those that nobody has been told of yet; num_steps: launched so far."""

    def __init__(self) -> None:
        self.num_steps = 0
        # Those of the probe at the start, or of a warm-up, are no step's.
        self._num_lora_op_calls_before = call_count()
        self.all: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._new: deque[tuple[int, int, int, float]] = deque(maxlen=MAX_RECORDS)
        self._first_tokens: deque[tuple[Tier, int, float]] = deque(maxlen=MAX_RECORDS)

    @property
    def num_lora_op_calls(self) -> int:
        """By the steps so far."""
        return call_count() - self._num_lora_op_calls_before

    def add(self, record: StepRecord, milliseconds: float) -> None:
        """milliseconds  from the collection of the step before, or this one's launch if that was later, to its own"""
        self.all.append(record)
        self._new.append((record.num_tokens, record.num_sequences, len(record.adapters), milliseconds))

    def add_first_token(self, sequence: Sequence, num_steps: int, now_seconds: float) -> None:
        """Record the first token of a sequence with an adapter, computed by the step of this number."""
        if sequence.came_from is not None:
            came_seconds, came_steps = sequence.came_at
            self._first_tokens.append((sequence.came_from, num_steps - came_steps, now_seconds - came_seconds))
            sequence.came_from = None

    def take_first_tokens(self) -> tuple[tuple[Tier, int, float], ...]:
        """(tier, steps, seconds) of each since the last call; see `Stats`."""
        new = tuple(self._first_tokens)
        self._first_tokens.clear()
        return new

    def take_new(self) -> tuple[tuple[int, int, int, float], ...]:
        """(tokens, sequences, distinct adapters, milliseconds) of each step since the last call."""
        new = tuple(self._new)
        self._new.clear()
        return new
