"""Token counts of the running sequences, by slot, for the penalties.

They are state of the device, so that a step can be sampled before the host knows what the one before has sampled:
`ops.sample` adds each token to its slot right after it is chosen. Slots without penalties hold whatever was there last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from kernels.sampling.maps import SamplingMaps


class PenaltyState(ABC):
    """Whether a token occurs in the prompt of a slot's sequence, and how often in its output.

    An implementation of the op brings its own (`ops.new_state`); nothing is allocated before the first `reset`.
    """

    @abstractmethod
    def reset(self, slot: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """The slot now belongs to a sequence of these tokens: a new one, or one that is computed again after a
        preemption. Runs in the order of the device's stream, before the next step that samples the slot."""

    @abstractmethod
    def counts(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [vocab], int64 [vocab] on the host: is in the prompt, times in the output. Waits; for the reference."""

    @abstractmethod
    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """int64 [rows] each: one more output token of each slot; nothing where one of the two is -1."""

    @abstractmethod
    def penalise(self, logits: torch.Tensor, maps: SamplingMaps) -> None:
        """For each row with a slot and each token t of its counts, in place:

        logits[row, t] = r(logits[row, t]) - frequency * n(t) - presence * [n(t) > 0], where n counts the output and
        r(x) = x / repetition if x > 0 else x * repetition.

        logits  float32 [num_rows, vocab]
        """


class DenseState(PenaltyState):
    """One line of the vocabulary's length per slot, on the device, 4 bytes per token of the vocabulary.

    `table` float32 [num_slots, vocab] holds how often the output has a token, and a half more if the prompt has it:
    exact up to 2**22 times, and one gather finds both.
    """

    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        self._shape, self._device = (num_slots, vocab), device
        self._table: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor:
        assert self._table is not None, "a slot is reset before it is sampled with penalties"
        return self._table

    def reset(self, slot: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        if self._table is None:
            with torch.inference_mode(False):  # so that it may be changed inside and outside of that mode
                self._table = torch.zeros(self._shape, device=self._device)
        line = self._table[slot].zero_()
        for token_ids, times in ((output_token_ids, 1.0), (dict.fromkeys(prompt_token_ids), 0.5)):
            tokens, num_times = np.unique(np.array([*token_ids], np.int64), return_counts=True)
            if len(tokens):
                line.index_add_(0, self._put(tokens), self._put((times * num_times).astype(np.float32)))

    def counts(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        line = self.table[slot].cpu()
        return line > line.floor(), line.long()

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        places = slots.clamp(min=0) * self._shape[1] + token_ids.clamp(min=0)
        is_counted = (slots >= 0) & (token_ids >= 0)
        self.table.view(-1).index_add_(0, places, is_counted.to(torch.float32))

    def penalise(self, logits: torch.Tensor, maps: SamplingMaps) -> None:
        rows = maps.penalised
        values = logits.index_select(0, rows)
        held = self.table.index_select(0, maps.slots.index_select(0, rows))
        num_output = held.floor()

        def per_row(name: str) -> torch.Tensor:
            return maps.column(name).index_select(0, rows)

        if maps.uses("repetition_penalty"):
            repetition = per_row("repetition_penalty")
            repeated = torch.where(values > 0, values / repetition, values * repetition)
            values = torch.where(held > 0, repeated, values)
        if maps.uses("frequency_penalty"):
            values = values - per_row("frequency_penalty") * num_output
        if maps.uses("presence_penalty"):
            values = values - per_row("presence_penalty") * (num_output > 0).float()
        logits.index_copy_(0, rows, values)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


class SparseState(PenaltyState):
    """The distinct tokens of each slot, on the host, where a pass over the vocabulary is what costs."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._slots: dict[int, TokenCounts] = {}

    def reset(self, slot: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        counts = self._slots[slot] = TokenCounts(prompt_token_ids)
        for token in output_token_ids:
            counts.add(token)

    def counts(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        counts, in_prompt = self._slots[slot], torch.zeros(self._vocab, dtype=torch.bool)
        in_prompt[torch.from_numpy(counts.token_ids[: counts.num_in_prompt])] = True
        num_output = torch.zeros(self._vocab, dtype=torch.int64)
        num_output[torch.from_numpy(counts.token_ids)] = torch.from_numpy(counts.output_counts).long()
        return in_prompt, num_output

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            if slot >= 0 and token >= 0:
                self._slots[slot].add(token)

    def penalise(self, logits: torch.Tensor, maps: SamplingMaps) -> None:
        slots = maps.slots.tolist()
        rows = [row for row, slot in enumerate(slots) if slot >= 0]
        held = [self._slots[slots[row]] for row in rows]
        row = torch.from_numpy(np.repeat(np.array(rows), [len(counts.token_ids) for counts in held]))
        token = torch.from_numpy(np.concatenate([counts.token_ids for counts in held]))
        count = torch.from_numpy(np.concatenate([counts.output_counts for counts in held]))

        def per_token(name: str) -> torch.Tensor:
            return maps.parameter(name).float()[row]

        values = logits[row, token]
        repetition = per_token("repetition_penalty")
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - per_token("frequency_penalty") * count
        logits[row, token] = values - per_token("presence_penalty") * (count > 0)


class TokenCounts:
    """Distinct tokens of a sequence, those of its prompt first, and how often each occurs in its output. Grows with
    each token in O(1).

    `token_ids` int64 [num_distinct], `output_counts` float32 [num_distinct]
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt_token_ids)
        self.num_in_prompt = len(distinct)
        self._places = {token: place for place, token in enumerate(distinct)}
        self._ids = np.zeros(len(distinct) + 64, np.int64)
        self._ids[: len(distinct)] = list(distinct)
        self._counts = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """One more output token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def token_ids(self) -> np.ndarray:
        return self._ids[: len(self._places)]

    @property
    def output_counts(self) -> np.ndarray:
        return self._counts[: len(self._places)]
