"""The sampling of a step: which logits each sequence needs, known before the model runs, and how results are read."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np

from kernels.sampling.results import Choice, read
from kernels.sampling.sampling_request import MASK_FOLLOWS, Asked, GivenRow, RowSampling, ask
from kernels.sampling.scored_token import ScoredToken
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
    adapter = _new_adapter(sequence) if sequence.untold_versions and tokens else None
    if len(sequence.token_ids) > sequence.num_prompt:
        return Tokens(sequence.request_id, tokens, logprobs, prompt_logprobs, adapter=adapter)
    first = sequence.waited_seconds, sequence.num_cached or 0, adapter, sequence.loads
    return Tokens(sequence.request_id, tokens, logprobs, prompt_logprobs, *first)


def _new_adapter(sequence: Sequence) -> str | None:
    """The adapter of its next token, if it has moved since the last one."""
    index = len(sequence.token_ids) - sequence.num_prompt
    told = [adapter for first, adapter in sequence.untold_versions if first <= index]
    sequence.untold_versions = sequence.untold_versions[len(told) :]
    return told[-1] if told else None


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
