"""Results of a step's sampling: on the device in one tensor, so that one copy brings all, and read on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kernels.platform import in_use
from kernels.sampling.maps import SamplingMaps
from kernels.sampling.sampling_request import Asked
from kernels.sampling.scored_token import ScoredToken


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
