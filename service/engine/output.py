"""From a step's logits to what is said about it: choices, log probabilities, messages. Pure but for the sequences'
prompt log probabilities, which are gathered chunk by chunk.
"""

from __future__ import annotations

import torch

from service.engine.messages import TokenLogprob, Tokens
from service.engine.sampler import Choice, RowRequest, sample, token_logprobs
from service.engine.sequence import Sequence, Share


@torch.inference_mode()
def sample_step(logits: torch.Tensor, shares: list[Share]) -> list[tuple[Sequence, Choice]]:
    """The next token of each sequence that is computed up to its end; on the way, prompt log probabilities.

    logits  float32 [sum of the shares' num_logits, vocab], in the order of the shares; changed in place
    """
    last_rows: list[int] = []
    chosen: list[Sequence] = []
    row = 0
    for share in shares:
        sequence = share.sequence
        if share.num_logits and sequence.num_prompt_logprobs_missing:
            _note_prompt_logprobs(sequence, logits[row : row + share.num_logits])
        row += share.num_logits
        if sequence.num_computed + share.num_tokens == sequence.num_tokens:
            last_rows.append(row - 1)
            chosen.append(sequence)
    if not chosen:
        return []
    if len(last_rows) < len(logits):
        logits = logits[torch.tensor(last_rows, device=logits.device)]
    return list(zip(chosen, sample(logits, [_row_request(sequence) for sequence in chosen]), strict=True))


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


def _note_prompt_logprobs(sequence: Sequence, logits: torch.Tensor) -> None:
    """Row i of the logits tells of the i-th prompt token that is still missing."""
    num_top = sequence.request.sampling.prompt_logprobs
    assert num_top is not None
    first = len(sequence.prompt_logprobs)
    targets = sequence.token_ids[first : min(first + len(logits), sequence.num_prompt)]
    sequence.prompt_logprobs += token_logprobs(logits[: len(targets)], targets, num_top)


def _row_request(sequence: Sequence) -> RowRequest:
    is_too_short = sequence.num_output < sequence.request.sampling.min_tokens
    return RowRequest(
        sampling=sequence.request.sampling,
        seed=sequence.seed,
        index=sequence.num_output,
        barred=sequence.stop_ids if is_too_short else frozenset(),
        counts=sequence.counts,
    )
