"""Token counts of a sequence, for the penalties, and the penalties themselves.

Semantics (OpenAI's and vLLM's): the repetition penalty looks at prompt and output, presence and frequency at the
output only. Counts grow with each token in O(1) and are never rebuilt, so that a penalised request costs no pass over
its tokens per step; they are host memory of the sequence and go with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from service.engine.messages import Sampling


class TokenCounts:
    """Distinct tokens of a sequence and how often each occurs in its output.

    `token_ids` int64 [num_distinct], `output_counts` float32 [num_distinct]
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt)
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._ids = np.zeros(len(distinct) + 64, np.int64)
        self._ids[: len(distinct)] = list(distinct)
        self._counts = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """One more output token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def token_ids(self) -> np.ndarray:
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> np.ndarray:
        return self._counts[: len(self._slots)]


def uses_penalties(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def apply_penalties(logits: torch.Tensor, rows: Sequence[tuple[int, Sampling, TokenCounts]]) -> None:
    """For each (row, sampling, counts) and each token t of its counts, in place:

    logits[row, t] = r(logits[row, t]) - frequency * n(t) - presence * [n(t) > 0], where n counts the output and
    r(x) = x / repetition if x > 0 else x * repetition.

    logits  float32 [num_rows, vocab]
    """
    if not rows:
        return
    lengths = [len(counts.token_ids) for _, _, counts in rows]

    def per_token(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths)).to(logits.device)

    row = torch.from_numpy(np.repeat(np.array([row for row, _, _ in rows]), lengths)).to(logits.device)
    token = torch.from_numpy(np.concatenate([counts.token_ids for _, _, counts in rows])).to(logits.device)
    count = torch.from_numpy(np.concatenate([counts.output_counts for _, _, counts in rows])).to(logits.device)
    repetition = per_token([sampling.repetition_penalty for _, sampling, _ in rows])
    frequency = per_token([sampling.frequency_penalty for _, sampling, _ in rows])
    presence = per_token([sampling.presence_penalty for _, sampling, _ in rows])
    values = logits[row, token]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[row, token] = values - frequency * count - presence * (count > 0)
