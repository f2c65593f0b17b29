"""One vector of a prompt's hidden states: that of its last token, or the mean of all.

Chunks of a prompt come in several steps, so a mean is summed up between them, by slot, on the device and in the order
of the launches: a sequence that begins anew, after a preemption or in another's slot, begins with a sum of its own.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from adapters.memory.slab import ScoreHead
from service.engine.sequences.sequence import ScheduledChunk, Sequence


@dataclass(frozen=True, slots=True)
class PooledStep:
    """The pooled vectors of a step: one for each of these sequences, float32 [hidden_size], on the device."""

    sequences: tuple[Sequence, ...] = ()
    vectors: tuple[torch.Tensor, ...] = ()

    def packed_with(self, sampled: torch.Tensor) -> torch.Tensor:
        """int32 [n]: the vectors before what else the step yields, int32 too."""
        return torch.cat([*(vector.view(torch.int32) for vector in self.vectors), sampled]) if self.vectors else sampled

    def read(self, packed: np.ndarray, head_of: Callable[[str], ScoreHead | None]) -> np.ndarray:
        """Give the sequences what is theirs of the packed numbers, int32 [n] on the host; returns the rest.

        head_of  the score head of an adapter that runs, whose logits some want in the place of their vector: computed
                 here, since it is a small product, and heads have all shapes
        """
        for sequence, vector in zip(self.sequences, self.vectors, strict=True):
            sequence.pooled, packed = packed[: len(vector)].astype("<i4").tobytes(), packed[len(vector) :]
            if sequence.request.pooling == "classify":
                head = None if sequence.adapter is None else head_of(sequence.adapter)
                sequence.pooled = None if head is None else head.logits(sequence.pooled)
        return packed


class Pools:
    """The sums so far."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def pool(self, hidden: torch.Tensor, chunks: abc.Sequence[ScheduledChunk]) -> PooledStep:
        """hidden  [tokens, hidden_size] of the chunks, in their order, and of padding"""
        sequences, vectors, start = [], [], 0
        for chunk in chunks:
            sequence, end = chunk.sequence, start + chunk.num_tokens
            if sequence.request.pooling is not None:
                vector = self._added(chunk, hidden[start:end])
                if vector is not None:
                    sequences.append(sequence)
                    vectors.append(vector)
            start = end
        return PooledStep(tuple(sequences), tuple(vectors))

    def _added(self, chunk: ScheduledChunk, hidden: torch.Tensor) -> torch.Tensor | None:
        """The sequence's vector, None before its last chunk."""
        slot, is_last = chunk.sequence.slot, chunk.samples
        if chunk.sequence.request.pooling != "mean":
            return hidden[-1].float() if is_last else None
        total = hidden.sum(dim=0, dtype=torch.float32)
        if not chunk.begins:
            total += self._sums.pop(slot)
        if is_last:
            return total / chunk.sequence.num_prompt
        self._sums[slot] = total
        return None
