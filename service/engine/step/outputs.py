"""The outputs of a step: which logits and which hidden states each sequence needs, known before the model runs, how
results reach the host, and how they are read.

A result is copied once into pinned memory, which is waited for when the step is collected. There are two such buffers,
used in turn, since the result of one step is read after the next has been launched.

A prompt's hidden states are pooled to one vector: that of its last token, or the mean of all. Its chunks come in
several steps, so a mean is summed up between them, by slot, on the device and in the order of the launches: a sequence
that begins anew, after a preemption or in another's slot, begins with a sum of its own.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adapters.memory.slab import ScoreHead
from kernels.sampling.ops import Choice, read
from kernels.sampling.parameters import ScoredToken
from kernels.sampling.sampling_request import MASK_FOLLOWS, Asked, GivenRow, RowSampling, ask
from service.engine.ipc.messages import Tokens
from service.engine.sequences.sequence import ScheduledChunk, Sequence


@dataclass(frozen=True, slots=True)
class StepSampling:
    """The sampling of one step's logits.

    sequences  those that get a token, in the order of `asked.rows`
    prompts    (sequence, number of its prompt logits), in the order of `asked.given`
    """

    sequences: tuple[Sequence, ...]
    prompts: tuple[tuple[Sequence, int], ...]
    asked: Asked

    @property
    def constrained(self) -> list[Sequence]:
        """Those whose mask follows, in the order of the masks."""
        return [sequence for sequence in self.sequences if sequence.constraint is not None]


def sampling_of(chunks: abc.Sequence[ScheduledChunk], num_logits: int, vocab: int) -> StepSampling:
    """chunks  of a step, in its order

    num_logits, vocab  shape of the logits, rows of padding included
    """
    rows: list[RowSampling] = []
    given: list[GivenRow] = []
    sequences: list[Sequence] = []
    prompts: list[tuple[Sequence, int]] = []
    row = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if chunk.num_prompt_logits:
            num_top = sequence.request.sampling.prompt_logprobs
            assert num_top is not None
            first = chunk.first_prompt_logprob
            tokens = sequence.token_ids[first : first + chunk.num_prompt_logits]
            given += [GivenRow(row + i, token, num_top) for i, token in enumerate(tokens)]
            prompts.append((sequence, len(tokens)))
        row += chunk.num_logits
        if chunk.samples:
            rows.append(_row_of(sequence, row - 1, chunk.start + chunk.num_tokens - sequence.num_prompt))
            sequences.append(sequence)
    asked = ask(rows, given, num_logits=num_logits, vocab=vocab)
    return StepSampling(tuple(sequences), tuple(prompts), asked)


def read_sampled(packed: np.ndarray, sampling: StepSampling) -> list[tuple[Sequence, Choice]]:
    """The token of each sequence; log probabilities of prompts are added to their sequences."""
    choices, given = read(packed, sampling.asked)
    start = 0
    for sequence, num_logits in sampling.prompts:
        sequence.prompt_logprobs += given[start : start + num_logits]
        start += num_logits
    return list(zip(sampling.sequences, choices, strict=True))


def tokens_message(sequence: Sequence, choice: Choice) -> Tokens | None:
    """The message of a new token; with the first of a sequence go the facts of its prompt."""
    prompt_logprobs: tuple[ScoredToken | None, ...] | None = None
    if sequence.prompt_logprobs and not sequence.prompt_logprobs_sent:
        sequence.prompt_logprobs_sent = True
        prompt_logprobs = tuple(sequence.prompt_logprobs)
    tokens: tuple[int, ...] = ()
    logprobs: tuple[ScoredToken, ...] = ()
    if choice.token_id is not None and sequence.request.sampling.max_tokens > 0:
        tokens = (choice.token_id,)
        logprobs = () if choice.logprob is None else (choice.logprob,)
    if not tokens and prompt_logprobs is None:
        return None
    adapter = _new_adapter(sequence) if sequence.unsent_versions and tokens else None
    if len(sequence.token_ids) > sequence.num_prompt:
        return Tokens(sequence.request_id, tokens, logprobs, prompt_logprobs, adapter=adapter)
    first = sequence.waited_seconds, sequence.num_cached or 0, adapter, sequence.loads
    return Tokens(sequence.request_id, tokens, logprobs, prompt_logprobs, *first)


def _new_adapter(sequence: Sequence) -> str | None:
    """The adapter of its next token, if it has moved since the last one."""
    index = len(sequence.token_ids) - sequence.num_prompt
    due = [adapter for first, adapter in sequence.unsent_versions if first <= index]
    sequence.unsent_versions = sequence.unsent_versions[len(due) :]
    return due[-1] if due else None


def _row_of(sequence: Sequence, logits_row: int, index: int) -> RowSampling:
    """index  of the output token that the row yields"""
    sampling = sequence.request.sampling
    is_barred = index < sampling.min_tokens and sequence.constraint is None  # a constraint's mask bars them itself
    return RowSampling(
        logits_row=logits_row,
        parameters=sequence.parameters,
        seed=sequence.seed,
        index=index,
        slot=sequence.slot,
        bias=sampling.logit_bias,
        barred=sequence.stop_ids if is_barred else (),
        mask=None if sequence.constraint is None else MASK_FOLLOWS,
        num_top=sampling.logprobs,
        scored=sampling.logprob_token_ids,
    )


_LEAST_NUMBERS = 4096


@dataclass(frozen=True, slots=True)
class StepResult:
    """A result under way; `wait` may be called once, before the next but one is fetched."""

    numbers: torch.Tensor
    arrived: Any

    def wait(self) -> np.ndarray:
        """int32 [n], there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.numbers.numpy()


class ResultBuffers:
    """See the module's docstring. On a CPU there is nothing to bring."""

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._buffers = [torch.empty(0, dtype=torch.int32)] * 2

    def fetch(self, packed: torch.Tensor) -> StepResult:
        """Begin to bring packed int32 [n] to the host."""
        if self._runtime is None:
            return StepResult(packed, None)
        num = packed.shape[0]
        buffer, later = self._buffers
        if buffer.shape[0] < num:
            buffer = torch.empty(max(_LEAST_NUMBERS, 2 * num), dtype=torch.int32, pin_memory=True)
        self._buffers = [later, buffer]
        numbers = buffer[:num]
        numbers.copy_(packed, non_blocking=True)
        arrived = self._runtime.Event()
        arrived.record()
        return StepResult(numbers, arrived)


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

        head_of  the score head of an adapter that runs, whose logits some want instead of their vector: computed
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

    def pool(self, hidden: torch.Tensor, chunks: abc.Sequence[ScheduledChunk], *, of_all: bool = True) -> PooledStep:
        """hidden  [tokens, hidden_size] of the chunks, in their order, and of padding; unless of_all, of their tokens
        with logits alone
        """
        sequences, vectors, start = [], [], 0
        for chunk in chunks:
            sequence, end = chunk.sequence, start + (chunk.num_tokens if of_all else chunk.num_logits)
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
