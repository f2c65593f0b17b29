"""`sampler` for accelerators: the same choices, all rows at once, and one wait for the device per step.

What a choice needs of the host (temperatures, limits, penalties, one uniform number per row) is known before the model
runs and travels with the step's maps. All that is wanted of the logits comes back in one copy.

Devices may lack float64 and be slow at anything whose shape depends on values, so there is neither here: sums are taken
by blocks in float32, whose rounding is the only difference to `sampler`, and a cut is a comparison with the smallest
weight that is kept. Cost: a few passes over the logits, and a sort of them where a row has top_p without a small top_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch.nn import functional

from service.engine.sampling_plan import Plan

_BLOCK = 128


def launch(logits: torch.Tensor, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All that the plan wants, as one int32 tensor for `read`; waits for nothing.

    logits   float32 [rows, vocab]; may be changed in place
    tensors  `arrays_of(plan)` on the device
    """
    found: list[torch.Tensor] = []
    wanted = logits.index_select(0, tensors["sample/logprob_rows"]) if plan.logprobs else None
    tokens = None
    if plan.requests:
        chosen = logits if plan.rows == tuple(range(len(logits))) else logits.index_select(0, tensors["sample/rows"])
        tokens = _choose(chosen, plan, tensors)
        found.append(tokens)
    if wanted is not None:
        found += _logprobs(wanted, tokens, plan, tensors)
    return torch.cat([_as_int32(part).reshape(-1) for part in found])


def _choose(logits: torch.Tensor, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int64 [requests], -1 for rows without finite logits; logits [requests, vocab] change in place."""
    _adjust(logits, tensors)
    best_values, tokens = logits.max(dim=-1)
    is_finite = best_values.isfinite()
    if plan.is_random:
        weights = logits.sub(best_values[:, None]).div_(tensors["sample/temperature"][:, None]).exp_()
        weights = _cut(weights, plan, tensors)
        tokens = torch.where(tensors["sample/is_drawn"], _pick(weights, tensors["sample/numbers"]), tokens)
    return torch.where(is_finite, tokens, -1)


def _adjust(logits: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Penalties, bias and barred tokens, in place."""
    flat = logits.view(-1)
    if "sample/penalised" in tensors:
        places, repetition = tensors["sample/penalised"], tensors["sample/repetition"]
        values = flat.index_select(0, places)
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat.index_copy_(0, places, values - tensors["sample/frequency"] - tensors["sample/presence"])
    if "sample/biased" in tensors:
        places = tensors["sample/biased"]
        flat.index_copy_(0, places, flat.index_select(0, places) + tensors["sample/bias"])
    if "sample/barred" in tensors:
        flat.index_copy_(0, tensors["sample/barred"], tensors["sample/minus_infinity"])


def _cut(weights: torch.Tensor, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Weights, with zero for what min_p, top_k and top_p exclude; equals of the last token kept stay too.

    weights  float32 [requests, vocab], the largest of a row being 1
    """
    if "sample/min_p" in tensors:
        weights = torch.where(weights < tensors["sample/min_p"][:, None], 0.0, weights)
    if "sample/top_k" not in tensors:
        return weights
    top_k, num_ranked = tensors["sample/top_k"][:, None], plan.num_ranked
    if num_ranked < plan.vocab:
        ranked = weights.topk(num_ranked, dim=-1).values
    else:
        ranked = weights.sort(dim=-1, descending=True).values
    least = ranked.gather(1, (top_k - 1).clamp(max=num_ranked - 1))
    least = torch.where(top_k < plan.vocab, least, 0.0)
    weights = torch.where(weights < least, 0.0, weights)
    if not plan.has_top_p:
        return weights
    top_p = tensors["sample/top_p"][:, None]
    wanted = top_p * weights.sum(dim=-1, keepdim=True)
    least_in_nucleus = ranked.gather(1, _find(ranked, wanted, is_inclusive=True)[:, None])
    return torch.where((top_p < 1.0) & (weights < least_in_nucleus), 0.0, weights)


def _pick(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: inverse transform sampling from rows of unnormalised weights; a weight of 0 is never picked."""
    total = _blocks(weights).sum(dim=-1).sum(dim=-1)
    return _find(weights, (numbers * total)[:, None], is_inclusive=False)


def _find(weights: torch.Tensor, target: torch.Tensor, *, is_inclusive: bool) -> torch.Tensor:
    """int64 [rows]: the first column at which a row's running sum exceeds (or, inclusive, reaches) its target.

    First the block, by the blocks' sums, then the column within it: exact to a few hundred roundings, whatever the
    order in which the device adds.

    weights float32 [rows, n], not negative; target float32 [rows, 1]
    """
    blocks = _blocks(weights)
    num_rows, num_blocks, _ = blocks.shape
    block, before = _first_beyond(blocks.sum(dim=-1), target, is_inclusive)
    rows = _counting(num_rows, torch.int64, weights.device) * num_blocks + block
    within = blocks.reshape(-1, _BLOCK).index_select(0, rows)
    column, _ = _first_beyond(within, target - before, is_inclusive)
    return block * _BLOCK + column


def _first_beyond(weights: torch.Tensor, target: torch.Tensor, is_inclusive: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first column of a positive weight at which the running sum is beyond the target, int64 [rows], and the sum
    before it, [rows, 1]; should rounding leave no such column, the last one of a positive weight."""
    cumulated = weights.cumsum(dim=-1)
    num_columns = weights.shape[1]
    order = _counting(num_columns, torch.float32, weights.device)
    is_beyond = cumulated >= target if is_inclusive else cumulated > target
    rank = torch.where(is_beyond, 2 * num_columns - order, order)
    column = torch.where(weights > 0.0, rank, -1.0).argmax(dim=-1)
    index = column[:, None]
    return column, cumulated.gather(1, index) - weights.gather(1, index)


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """[rows, n] -> [rows, blocks, _BLOCK], padded with zero."""
    missing = -weights.shape[1] % _BLOCK
    if missing:
        weights = functional.pad(weights, (0, missing))
    return weights.view(weights.shape[0], -1, _BLOCK)


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor | None, plan: Plan, tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Of each row: its token's, then the values of the most likely, then their tokens, [rows, num_top] each."""
    logprobs = logits.log_softmax(dim=-1)
    asked = tensors["sample/given_tokens"]
    if tokens is not None and plan.num_given < len(plan.logprobs):
        of_requests = tokens.index_select(0, tensors["sample/logprob_requests"]).clamp(min=0)
        asked = torch.cat([asked, of_requests]) if plan.num_given else of_requests
    values, top_tokens = logprobs.topk(plan.num_top, dim=-1) if plan.num_top else (logprobs[:, :0], asked[:0])
    return [logprobs.gather(1, asked[:, None]), values, top_tokens]


def _as_int32(part: torch.Tensor) -> torch.Tensor:
    """Integers converted, floats by their bits."""
    return part.contiguous().view(torch.int32) if part.dtype == torch.float32 else part.to(torch.int32)


@lru_cache(maxsize=256)
def _counting(num: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """0, 1, ..., num - 1."""
    return torch.arange(num, dtype=dtype, device=device)
