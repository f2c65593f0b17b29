"""`kernels.sampling.ops` on accelerators: all rows at once, nothing waits for the device.

Devices may lack float64 and be slow at anything whose shape depends on values, so there is neither here: sums are
taken by blocks in float32, whose rounding is the only difference to the reference, and a cut is a comparison with the
smallest weight that is kept. Which operations run follows from the facts alone. Cost: a few passes over the logits, and
a sort of them where a row has top_p without a small top_k.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.contract import Contract
from kernels.platform import in_use
from kernels.sampling.maps import SamplingMaps
from kernels.sampling.ops import Sampled, pack
from kernels.sampling.penalty_state import DenseState, PenaltyState

CONTRACT = Contract(replayable=True)
_BLOCK = 128
_MAX_PARTS = 32


def model_logprobs(logits: torch.Tensor, maps: SamplingMaps) -> torch.Tensor | None:
    """float32 [num_given + num_chosen, vocab]: log probabilities of the model's own distribution; None if not wanted.

    logits  as the model made them
    """
    rows = [maps.given] if maps.facts.num_given else []
    if maps.facts.num_chosen:
        rows.append(maps.rows.index_select(0, maps.chosen))
    return logits.index_select(0, torch.cat(rows)).float().log_softmax(dim=-1) if rows else None


def rows_to_sample(logits: torch.Tensor, maps: SamplingMaps) -> torch.Tensor:
    """[num_rows, vocab]: the logits themselves where they are in order already; float32 but where all that is left to
    do is to find the largest of each row."""
    facts = maps.facts
    rows = logits[: facts.num_rows] if facts.is_in_order else logits.index_select(0, maps.rows)
    return rows if facts.is_largest_only else rows.float().contiguous()


def edit(logits: torch.Tensor, maps: SamplingMaps) -> None:
    """Add biases and bar tokens, in place.

    logits  float32 [num_rows, vocab], contiguous where there is anything to do
    """
    facts = maps.facts
    if not facts.num_biased and not facts.num_barred:
        return
    flat = logits.view(-1)
    if facts.num_biased:
        flat.index_copy_(0, maps.biased, flat.index_select(0, maps.biased) + maps.bias)
    if facts.num_barred:
        flat.index_copy_(0, maps.barred, torch.full_like(maps.barred, -torch.inf, dtype=torch.float32))


def new_state(num_slots: int, vocab: int, device: torch.device) -> PenaltyState:
    """See `ops.new_state`."""
    return DenseState(num_slots, vocab, device)


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and its token, the first of equals: (the logits' dtype or float32, int64) [rows].

    The token is -1 where the logit is not finite: where some logit is NaN or infinite, or all are minus infinity.

    logits  [rows, vocab], unit stride along the vocabulary
    """
    # By parts: a row is too long for the few programs that it gets.
    num_parts = math.gcd(logits.shape[1], _MAX_PARTS)
    part_values, columns = logits.view(len(logits), num_parts, -1).max(dim=-1)
    values, part = part_values.max(dim=-1)
    columns = columns.gather(1, part[:, None])[:, 0] + part * (logits.shape[1] // num_parts)
    is_known = values.isfinite()
    if in_use(logits.device).device == "npu":  # whose maximum of values with NaN among them is not documented to be NaN
        is_known &= ~logits.sum(dim=-1, dtype=torch.float32).isnan()
    return values, torch.where(is_known, columns, -1)


def sample(
    logits: torch.Tensor,
    maps: SamplingMaps,
    state: PenaltyState | None,
    *,
    largest: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = largest,
) -> Sampled:
    """See `ops.sample`.

    largest  the device's own way to find what `largest` of this module does
    """
    facts = maps.facts
    logprobs = model_logprobs(logits, maps)
    if not facts.num_rows:
        return pack(maps.given.new_empty(0), logprobs, maps)
    logits = rows_to_sample(logits, maps)
    if facts.num_penalised:
        assert state is not None
        state.penalise(logits, maps)
    edit(logits, maps)
    if facts.num_masked:
        _mask(logits, maps)
    best_values, tokens = largest(logits)
    if facts.is_random:
        temperature = maps.column("temperature")
        is_drawn = temperature > 0.0
        # Relative to the most likely token, whose weight is 1: no temperature can overflow.
        weights = logits.sub_(best_values[:, None]).div_(torch.where(is_drawn, temperature, 1.0)).exp_()
        drawn = _pick(cut(weights, maps), maps.numbers.float())
        tokens = torch.where(is_drawn[:, 0] & (tokens >= 0), drawn, tokens)
    if state is not None and facts.num_penalised:
        state.add(maps.slots, tokens)
    return pack(tokens, logprobs, maps)


def _mask(logits: torch.Tensor, maps: SamplingMaps) -> None:
    """Exclude what masks do not allow, in place."""
    is_allowed = (maps.masks[:, :, None] & maps.mask_bits) != 0
    is_allowed = is_allowed.view(len(maps.masks), -1)[:, : maps.facts.vocab]
    logits.index_copy_(0, maps.masked, torch.where(is_allowed, logits.index_select(0, maps.masked), -torch.inf))


def cut(weights: torch.Tensor, maps: SamplingMaps) -> torch.Tensor:
    """Weights, with zero for what min_p, top_k and top_p exclude; equals of the last token kept stay too.

    weights  float32 [num_rows, vocab], the largest of a row being 1
    """
    if maps.uses("min_p"):
        weights = torch.where(weights < maps.column("min_p"), 0.0, weights)
    num_ranked, vocab = maps.facts.num_ranked, maps.facts.vocab
    if not num_ranked:
        return weights
    if num_ranked < vocab:
        ranked = weights.topk(num_ranked, dim=-1).values
    else:
        ranked = weights.sort(dim=-1, descending=True).values
    if maps.uses("top_k"):
        top_k = maps.column("top_k").long()
        least = ranked.gather(1, (top_k - 1).clamp(0, num_ranked - 1))
        weights = torch.where((top_k > 0) & (weights < least), 0.0, weights)
    if maps.uses("top_p"):
        top_p = maps.column("top_p")
        wanted = top_p * weights.sum(dim=-1, keepdim=True)
        least = ranked.gather(1, _find(ranked, wanted, is_inclusive=True)[:, None])
        weights = torch.where((top_p < 1.0) & (weights < least), 0.0, weights)
    return weights


def cut_rows(weights: torch.Tensor, rows: torch.Tensor, maps: SamplingMaps) -> None:
    """The same in place and one by one, by a sort of the few tokens that can matter: as a CPU has it.

    weights  float32 [len(rows), vocab], of these rows of the step
    """
    if not maps.uses("min_p") and not maps.facts.num_ranked:
        return
    values = (maps.parameter(name)[rows].tolist() for name in ("min_p", "top_k", "top_p"))
    for row, min_p, top_k, top_p in zip(weights, *values, strict=True):
        if min_p > 0.0:
            row.masked_fill_(row < min_p, 0.0)
        if top_k > 0:
            row.masked_fill_(row < row.topk(int(top_k)).values[-1], 0.0)
        if top_p < 1.0:
            wanted = top_p * row.sum(dtype=torch.float64)
            # Tokens below this weight sum to less than what top_p leaves out, so the sort can do without them.
            floor = (row.sum(dtype=torch.float64) - wanted) / len(row)
            ranked = row[row >= floor.float()].sort(descending=True).values
            num_kept = int(torch.searchsorted(ranked.cumsum(0, dtype=torch.float64), wanted)) + 1
            row.masked_fill_(row < ranked[min(num_kept, len(ranked)) - 1], 0.0)


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
    # Made here and not kept: what a captured step makes lies in that step's own memory.
    rows = torch.arange(num_rows, device=weights.device) * num_blocks + block
    within = blocks.reshape(-1, _BLOCK).index_select(0, rows)
    column, _ = _first_beyond(within, target - before, is_inclusive)
    return block * _BLOCK + column


def _first_beyond(weights: torch.Tensor, target: torch.Tensor, is_inclusive: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first column of a positive weight at which the running sum is beyond the target, int64 [rows], and the sum
    before it, [rows, 1]; should rounding leave no such column, the last one of a positive weight."""
    cumulated = weights.cumsum(dim=-1)
    num_columns = weights.shape[1]
    order = torch.arange(num_columns, dtype=torch.float32, device=weights.device)
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
