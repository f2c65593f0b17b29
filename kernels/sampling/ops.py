"""Chooses the next token of each row of logits.

    x = logits of the row
    x[t] = x[t] / repetition if x[t] > 0 else x[t] * repetition     for tokens t of prompt and output
    x[t] -= frequency * n(t) + presence * [n(t) > 0]                n(t): how often the output has t
    x[t] += bias(t);  x[t] = -inf for barred tokens and for those that the mask does not allow
    token = argmax x                                                with temperature 0; otherwise
    w = exp((x - max x) / temperature)
    w[t] = 0 below min_p; then below the top_k-th largest; then below the last of the largest that sum to top_p of what
    is left (equals of the last one kept stay, too)
    token = the first t at which the running sum of w exceeds (uniform number) * (sum of w)

as in vLLM. The uniform number is a hash of the request's seed and the token's index. Log probabilities are those of the
model's own distribution, before any of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kernels.batch_invariant.mode import batch_invariant_mode
from kernels.platform import contract, implementation, in_use
from kernels.sampling.maps import SamplingMaps
from kernels.sampling.parameters import ScoredToken
from kernels.sampling.penalty_state import PenaltyState
from kernels.sampling.sampling_request import Asked


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Results on the device; fresh memory.

    token_ids  int64 [num_rows]; -1 where the logits have no largest value that is finite
    packed     int32 1-D for `read`: tokens; then, for the rows with a given token and after these the rows whose chosen
               token is meant, all log probabilities, and all of the scored tokens of the latter; all values of the most
               likely tokens, all these tokens; all ranks of given tokens
    """

    token_ids: torch.Tensor
    packed: torch.Tensor


class Choice(NamedTuple):
    """The token of a row; `token_id` None: there was none to choose, and no log probability then."""

    token_id: int | None
    logprob: ScoredToken | None = None


def pack(token_ids: torch.Tensor, logprobs: torch.Tensor | None, maps: SamplingMaps) -> Sampled:
    """Results from chosen tokens and `model_logprobs`."""
    parts = [token_ids.to(torch.int32)]
    if logprobs is not None:
        asked = [maps.given_tokens] if maps.facts.num_given else []
        if maps.facts.num_chosen:
            asked.append(token_ids.index_select(0, maps.chosen).clamp(min=0))
        of_asked = logprobs.gather(1, torch.cat(asked)[:, None])
        parts.append(_bits(of_asked))
        num_given = maps.facts.num_given
        if maps.facts.num_scored:
            parts.append(_bits(logprobs[num_given:].gather(1, maps.scored.view(-1, maps.facts.num_scored))))
        if maps.facts.num_top:
            values, top_tokens = _largest(logprobs, maps.facts.num_top)
            parts += [_bits(values), top_tokens.to(torch.int32).reshape(-1)]
        if num_given:
            parts.append((logprobs[:num_given] >= of_asked[:num_given]).sum(-1, dtype=torch.int32))
    return Sampled(token_ids, torch.cat(parts) if len(parts) > 1 else parts[0])


def _largest(logprobs: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and tokens [rows, num] of the largest of each row. Which of equal ones comes first follows from the step's
    size, or is the one of the smaller id where steps must not matter."""
    if in_use(logprobs.device).batch_invariant:
        values, tokens = logprobs.sort(dim=-1, descending=True, stable=True)
        return values[:, :num], tokens[:, :num]
    values, tokens = logprobs.topk(num, dim=-1)
    return values, tokens


def read(packed: np.ndarray, asked: Asked) -> tuple[list[Choice], list[ScoredToken]]:
    """Choices of the asked rows and log probabilities of the given tokens, in the order in which they were asked.

    packed  `Sampled.packed` on the host
    """
    facts = asked.facts
    tokens = [token if token >= 0 else None for token in packed[: len(asked.rows)].tolist()]
    if not facts.num_given + facts.num_chosen:
        return [Choice(token) for token in tokens], []
    num_told, rest = facts.num_given + facts.num_chosen, packed[facts.num_rows :]
    logprobs = rest[:num_told].view(np.float32).tolist()
    end_of_scored = num_told + facts.num_chosen * facts.num_scored
    scored = rest[num_told:end_of_scored].view(np.float32).reshape(facts.num_chosen, facts.num_scored).tolist()
    end_of_tops = end_of_scored + 2 * num_told * facts.num_top
    ranks = rest[end_of_tops:].tolist()
    values, top_tokens = rest[end_of_scored:end_of_tops].reshape(2, num_told, facts.num_top)
    pairs = zip(top_tokens.tolist(), values.view(np.float32).tolist(), strict=True)
    tops = [tuple(zip(ids, row, strict=True)) for ids, row in pairs]
    given = [
        ScoredToken(entry.token_id, logprobs[i], tops[i][: entry.num_top], ranks[i])
        for i, entry in enumerate(asked.given)
    ]
    told = iter(range(facts.num_given, num_told))
    choices = []
    for token, row in zip(tokens, asked.rows, strict=True):
        place = None if row.num_top is None else next(told)
        if token is None or place is None:
            choices.append(Choice(token))
        else:
            named = zip(row.scored, scored[place - facts.num_given], strict=False)
            top = (*tops[place][: row.num_top], *named)
            choices.append(Choice(token, ScoredToken(token, logprobs[place], top)))
    return choices, given


def _bits(values: torch.Tensor) -> torch.Tensor:
    """int32 1-D of the same bits as float32 ones."""
    return values.reshape(-1).view(torch.int32)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sample(logits: torch.Tensor, maps: SamplingMaps, state: PenaltyState | None = None) -> Sampled:
    """One token per row, and the log probabilities that are asked for.

    A row's token depends on no other row. Rows whose largest logit is not finite (NaN, infinite, all tokens excluded)
    get -1. Nothing waits for the device, and all that is done follows from `maps.facts`, so that a captured call may be
    replayed with other maps of equal facts.

    logits  [num_logits, vocab], float32, bfloat16 or float16, each row contiguous; spent. Whatever is computed from
            them is computed in float32 at least
    state   `new_state` of the same device, every slot with penalties `reset` once; its counts grow by the tokens chosen
            here. May be None if no row has penalties
    """
    facts = maps.facts
    assert logits.dtype in _DTYPES and logits.stride(1) == 1, "logits are float32 or shorter floats, rows contiguous"
    assert logits.shape == (facts.num_logits, facts.vocab), f"logits are {list(logits.shape)}, the facts say otherwise"
    assert state is not None or not facts.num_penalised, "penalties need the state of their slots"
    assert facts.num_rows + facts.num_given, "nothing is asked for"
    with batch_invariant_mode(logits.device):
        sampled: Sampled = implementation("sampling", logits.device).sample(logits, maps, state)
    return sampled


def new_state(num_slots: int, vocab: int, device: torch.device) -> PenaltyState:
    """Counts for the penalties of so many slots, 0 to num_slots - 1; takes memory when the first slot is reset.

    On an accelerator that is 4 bytes per slot and token of the vocabulary.
    """
    state: PenaltyState = implementation("sampling", device).new_state(num_slots, vocab, device)
    return state


def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Compile all that calls with logits of such rows can need, whatever their number; the variants compiled.

    dtype  of the logits

    0 where nothing is ever compiled (on a CPU).
    """
    return contract("sampling", device).warm_up_and_count(vocab, dtype, device)
