"""From a step's logits to what is said about it: choices, log probabilities, messages. Pure but for the sequences'
prompt log probabilities, which are gathered chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from service.engine import device_sampler
from service.engine.messages import TokenLogprob, Tokens
from service.engine.sampler import Choice, RowRequest, sample, token_logprobs
from service.engine.sampling_plan import LogprobRow, Plan, plan_of, read
from service.engine.sequence import Sequence, Share


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Row first_row + i of the logits tells of token_ids[i], prompt tokens that are still missing."""

    sequence: Sequence
    first_row: int
    token_ids: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class Ask:
    """What a step's logits are asked for.

    rows, sequences, requests  of each sequence that the step computes up to its end: its row, itself, what it wants
    plan                       the same for the device's sampler; None where the host's does it
    """

    rows: list[int]
    sequences: list[Sequence]
    requests: list[RowRequest]
    prompts: list[PromptRows]
    plan: Plan | None = None


def ask_of(shares: list[Share], num_columns: int | None = None) -> Ask:
    """What to ask of the logits of a step with these shares; known before the model runs.

    num_columns  of the logits, if the device samples
    """
    ask = Ask([], [], [], [])
    row = 0
    for share in shares:
        sequence = share.sequence
        if share.num_logits and sequence.num_prompt_logprobs_missing:
            ask.prompts.append(_prompt_rows(sequence, row, share.num_logits))
        row += share.num_logits
        if sequence.num_computed + share.num_tokens == sequence.num_tokens:
            ask.rows.append(row - 1)
            ask.sequences.append(sequence)
            ask.requests.append(_row_request(sequence))
    if num_columns is None:
        return ask
    given = [
        LogprobRow(prompt.first_row + i, prompt.num_top, token)
        for prompt in ask.prompts
        for i, token in enumerate(prompt.token_ids)
    ]
    plan = plan_of(ask.rows, ask.requests, given, num_columns)
    return Ask(ask.rows, ask.sequences, ask.requests, ask.prompts, plan)


@torch.inference_mode()
def sample_step(
    logits: torch.Tensor, ask: Ask, tensors: Mapping[str, torch.Tensor] | None = None
) -> list[tuple[Sequence, Choice]]:
    """The next token of each sequence that is computed up to its end; on the way, prompt log probabilities.

    logits   float32 [sum of the shares' num_logits, vocab], in the order of the shares; changed in place
    tensors  the arrays of the ask's plan on the device
    """
    if ask.plan is not None:
        return _sample_on_device(logits, ask, ask.plan, tensors or {})
    for prompt in ask.prompts:
        rows = logits[prompt.first_row : prompt.first_row + len(prompt.token_ids)]
        prompt.sequence.prompt_logprobs += token_logprobs(rows, prompt.token_ids, prompt.num_top)
    if not ask.rows:
        return []
    if len(ask.rows) < len(logits):
        logits = logits[torch.tensor(ask.rows, device=logits.device)]
    return list(zip(ask.sequences, sample(logits, ask.requests), strict=True))


def _sample_on_device(
    logits: torch.Tensor, ask: Ask, plan: Plan, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[Sequence, Choice]]:
    if not plan.requests and not plan.logprobs:
        return []
    choices, given = read(device_sampler.launch(logits, plan, tensors), plan)
    for prompt in ask.prompts:
        prompt.sequence.prompt_logprobs += given[: len(prompt.token_ids)]
        del given[: len(prompt.token_ids)]
    return list(zip(ask.sequences, choices, strict=True))


def tokens_message(sequence: Sequence, choice: Choice) -> Tokens | None:
    """The message of a new token; with the first of a sequence go the log probabilities of its prompt."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    if sequence.prompt_logprobs and not sequence.prompt_logprobs_sent:
        sequence.prompt_logprobs_sent = True
        prompt_logprobs = tuple(sequence.prompt_logprobs)
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    if choice.token_id is not None and sequence.request.sampling.max_tokens > 0:
        tokens = (choice.token_id,)
        logprobs = () if choice.logprob is None else (choice.logprob,)
    if not tokens and prompt_logprobs is None:
        return None
    return Tokens(sequence.request_id, tokens, logprobs, prompt_logprobs)


def _prompt_rows(sequence: Sequence, first_row: int, num_rows: int) -> PromptRows:
    num_top = sequence.request.sampling.prompt_logprobs
    assert num_top is not None
    first = len(sequence.prompt_logprobs)
    token_ids = list(sequence.token_ids[first : min(first + num_rows, sequence.num_prompt)])
    return PromptRows(sequence, first_row, token_ids, num_top)


def _row_request(sequence: Sequence) -> RowRequest:
    is_too_short = sequence.num_output < sequence.request.sampling.min_tokens
    return RowRequest(
        sampling=sequence.request.sampling,
        seed=sequence.seed,
        index=sequence.num_output,
        barred=sequence.stop_ids if is_too_short else frozenset(),
        counts=sequence.counts,
    )
