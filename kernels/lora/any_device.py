"""The LoRA ops in plain torch for any device: few calls of any size, no wait for the device, no float64.

The rows of all adapters of the step are gathered into one matrix, every token is multiplied with all of them, and the
products with other adapters' rows are dropped. The wasted products cost little where matrix products are fast and each
call is slow, which is how an accelerator without a LoRA kernel of its own is. On a CPU `cpu.py` does less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.contract import Contract
from kernels.lora.maps import LoraMaps, LoraStack

CONTRACT = Contract()


@dataclass(frozen=True, slots=True)
class _SlicePlan:
    """How one slice's rows meet the step's tokens; S segments, R the largest rank of any.

    rank      R
    rows      int64 [S * R] rows of the stack; ranks that an adapter does not have repeat a row that some adapter has
    is_own    bool [tokens, S * R] whether the row is one of the token's own adapter
    scalings  float32 [S * R]
    """

    rank: int
    rows: torch.Tensor
    is_own: torch.Tensor
    scalings: torch.Tensor


def lora_shrink(
    x: torch.Tensor, stack: LoraStack, maps: LoraMaps, *, out: torch.Tensor, row_index: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops.lora_shrink`."""
    x = _ordered(x, row_index).to(stack.a[0].dtype)
    for s, a in enumerate(stack.a):
        plan = _plan(stack, maps, s)
        if plan is not None:
            # A token's own columns are the only ones that are not zero, so the sum over segments picks them.
            h = _shrink(x, a, plan).unflatten(1, (-1, plan.rank)).sum(dim=1)
            covered = plan.is_own.unflatten(1, (-1, plan.rank)).any(dim=1)
            columns = out[s, :, : plan.rank]
            columns.copy_(torch.where(covered, h, columns))
    return out


def lora_expand(
    h: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_expand`."""
    ordered = _ordered(out, row_index)
    for s, b in enumerate(stack.b):
        plan = _plan(stack, maps, s)
        wide = None
        if plan is not None:
            num_segments = plan.is_own.shape[1] // plan.rank
            wide = torch.where(plan.is_own, h[s, :, : plan.rank].repeat(1, num_segments), 0.0)
        _expand(wide, ordered, b, stack.slice_starts[s], plan, maps, overwrite)
    _put_back(ordered, out, row_index)


def lora_linear(
    x: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_linear`."""
    x, ordered = _ordered(x, row_index).to(stack.a[0].dtype), _ordered(out, row_index)
    for s, (a, b) in enumerate(zip(stack.a, stack.b, strict=True)):
        plan = _plan(stack, maps, s)
        h = None if plan is None else _shrink(x, a, plan)
        _expand(h, ordered, b, stack.slice_starts[s], plan, maps, overwrite)
    _put_back(ordered, out, row_index)


def lora_embedding(
    token_ids: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_embedding`."""
    ids, ordered = _ordered(token_ids, row_index), _ordered(out, row_index)
    plan = _plan(stack, maps, 0)
    h = None
    if plan is not None:
        # [tokens, S * R] single elements; whole rows of A are as long as the vocabulary.
        picked = stack.a[0][plan.rows[None, :], ids[:, None]].float()
        h = torch.where(plan.is_own, picked * plan.scalings, 0.0)
    _expand(h, ordered, stack.b[0], stack.slice_starts[0], plan, maps, overwrite)
    _put_back(ordered, out, row_index)


def _shrink(x: torch.Tensor, a: torch.Tensor, plan: _SlicePlan) -> torch.Tensor:
    """float32 [tokens, S * R], zero where the row is not the token's own; x in the rows' type."""
    h = (x @ a.index_select(0, plan.rows).t()).float() * plan.scalings
    return torch.where(plan.is_own, h, 0.0)


def _expand(
    h: torch.Tensor | None,
    out: torch.Tensor,
    b: torch.Tensor,
    start: int,
    plan: _SlicePlan | None,
    maps: LoraMaps,
    overwrite: bool,
) -> None:
    """Adds h @ B to the slice's columns of `out`, or writes it to the rows of tokens with an adapter."""
    target = out.narrow(1, start, b.shape[1])
    if h is None or plan is None:
        if overwrite:
            target.copy_(torch.where((maps.token_segment < 0)[:, None], target, 0.0))
        return
    delta = h.to(b.dtype) @ b.index_select(0, plan.rows)
    if overwrite:
        target.copy_(torch.where((maps.token_segment < 0)[:, None], target, delta.to(target.dtype)))
    else:
        target.add_(delta)


def _ordered(tensor: torch.Tensor, row_index: torch.Tensor | None) -> torch.Tensor:
    """Rows in adapter order."""
    return tensor if row_index is None else tensor.index_select(0, row_index.long())


def _put_back(ordered: torch.Tensor, out: torch.Tensor, row_index: torch.Tensor | None) -> None:
    if row_index is not None:
        out.index_copy_(0, row_index.long(), ordered)


def _plan(stack: LoraStack, maps: LoraMaps, s: int) -> _SlicePlan | None:
    """None where no adapter of the step targets the slice. The layers of a step ask for the same few plans again and
    again."""
    plans: dict[object, _SlicePlan | None] = maps.kept
    ranks, scalings = stack.host_ranks[s], stack.host_scalings[s]
    own = tuple((ranks[segment.place], scalings[segment.place]) for segment in maps.segments)
    key = (stack.group, stack.ranks.device, own)
    if key not in plans:
        plans[key] = _make_plan(stack, maps, s)
    return plans[key]


def _make_plan(stack: LoraStack, maps: LoraMaps, s: int) -> _SlicePlan | None:
    """Sizes come from the host's view of the maps, values from the device's: nothing is sent, nothing waited for."""
    targeted = [
        (segment.first_rows[stack.group], stack.host_ranks[s][segment.place])
        for segment in maps.segments
        if segment.first_rows[stack.group] >= 0 and stack.host_ranks[s][segment.place] > 0
    ]
    if not targeted:
        return None
    device, num_segments, rank = stack.ranks.device, len(maps.segments), max(rank for _, rank in targeted)
    places = maps.places[:num_segments].long()
    first_rows = maps.first_rows[stack.group][:num_segments].long()
    ranks = torch.where(first_rows >= 0, stack.ranks[s].index_select(0, places), 0)[:, None]
    columns = torch.arange(rank, device=device)
    rows = first_rows[:, None] + torch.minimum(columns, ranks - 1)  # [S, R]
    rows = torch.where(ranks > 0, rows, targeted[0][0])
    segments = torch.arange(num_segments, device=device)
    in_segment = maps.token_segment[:, None] == segments  # [tokens, S]
    is_own = in_segment[:, :, None] & (columns < ranks)[None]
    scalings = stack.scalings[s].index_select(0, places).repeat_interleave(rank)
    return _SlicePlan(rank, rows.reshape(-1), is_own.reshape(maps.num_tokens, -1), scalings)
