"""The LoRA ops on a CPU, computed in float32.

A CPU step costs what its rows' bytes cost only when short segments share their calls and rows are read where they lie:
products per adapter are dominated by call overhead, copies of rows read and write them once more. `cpu_plan` says which
segments share; x meets their rows of A as the entries of a sparse matrix, and rows of B are summed as bags.
"""

from __future__ import annotations

from operator import itemgetter

import torch

from kernels.contract import Contract
from kernels.lora.cpu_plan import MIN_SHARING, CpuPlan, Pairs, Solo, make_plan, shares_of
from kernels.lora.maps import LoraMaps, LoraStack, Segment
from kernels.platform import in_use

CONTRACT = Contract()

MAX_KEPT_VIEWS = 64  # of A and B, of a stack
_SUM = 0  # mode of `embedding_bag`

# (rows of A, rows of B)
_Rows = tuple[torch.Tensor, torch.Tensor]


def lora_shrink(
    x: torch.Tensor, stack: LoraStack, maps: LoraMaps, *, out: torch.Tensor, row_index: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops.lora_shrink`."""
    for s, a in enumerate(stack.a):
        for one, _ in _targeted(stack, maps, s):
            rows = a[one.first_row : one.first_row + one.rank].float()
            h = _take(x, one.start, one.end, row_index).to(a.dtype).float() @ rows.t()
            torch.mul(h, one.scaling, out=out[s, one.start : one.end, : one.rank])
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
    for s, b in enumerate(stack.b):
        target = out.narrow(1, stack.slice_starts[s], b.shape[1])
        for one, segment in _targeted(stack, maps, s, with_untargeted=overwrite):
            rows = b[one.first_row : one.first_row + one.rank].float()
            delta = h[s, segment.start : segment.end, : one.rank] @ rows
            _put(target, segment.start, segment.end, delta, overwrite, row_index)


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
    if not maps.segments:
        return
    if row_index is not None:
        # Put in adapter order first, so that one code path serves both.
        index = row_index.long()[: maps.segments[-1].end]
        ordered = out.index_select(0, index)
        _linear_in_order(x.index_select(0, index), ordered, stack, maps, overwrite)
        # Ranges, not the whole index: base tokens may stand between segments, and duplicates among them are allowed.
        for segment in maps.segments:
            out[index[segment.start : segment.end]] = ordered[segment.start : segment.end]
        return
    _linear_in_order(x, out, stack, maps, overwrite)


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
    target = out.narrow(1, stack.slice_starts[0], stack.b[0].shape[1])
    for one, segment in _targeted(stack, maps, 0, with_untargeted=overwrite):
        ids = _take(token_ids, segment.start, segment.end, row_index)
        last_row = one.first_row + one.rank
        h = stack.a[0][one.first_row : last_row].index_select(1, ids).float().t() * one.scaling
        _put(target, segment.start, segment.end, h @ stack.b[0][one.first_row : last_row].float(), overwrite, row_index)


def _linear_in_order(x: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, overwrite: bool) -> None:
    rows_dtype = stack.a[0].dtype
    if x.dtype != rows_dtype:
        x = x.to(rows_dtype)
    x = x.float()
    chosen: dict[int, torch.Tensor] = {}  # x of pairs, by identity of the pairs: slices may share it
    for s, (start, b) in enumerate(zip(stack.slice_starts, stack.b, strict=True)):
        plan = _plan(maps, stack, s)
        target = out.narrow(1, start, b.shape[1])
        for one in plan.solos:
            _run_solo(x, target, _rows_of_one(stack, s, one), one, overwrite)
        pairs = plan.pairs
        if pairs is not None:
            if id(pairs) not in chosen:
                chosen[id(pairs)] = x[pairs.start : pairs.end] if pairs.tokens is None else x[pairs.tokens]
            _run_pairs(chosen[id(pairs)], target, (stack.a[s], b), pairs, overwrite)
        if overwrite:
            for first, end in plan.untargeted:
                target[first:end].zero_()


def _run_solo(x: torch.Tensor, target: torch.Tensor, rows: _Rows, one: Solo, overwrite: bool) -> None:
    """rows  [in, rank] and [rank, width]"""
    a, b = rows
    h = torch.mm(x[one.start : one.end], a)
    out = target[one.start : one.end]
    if out.dtype == torch.float32 and not overwrite:
        out.addmm_(h, b, alpha=one.scaling)
    else:
        delta = (h * one.scaling) @ b
        _ = out.copy_(delta) if overwrite else out.add_(delta)


def _run_pairs(x: torch.Tensor, target: torch.Tensor, rows: _Rows, pairs: Pairs, overwrite: bool) -> None:
    """x [T, in] of the pairs' tokens; rows: all of the stack, [rows, in] and [rows, width], of which only theirs are
    read."""
    a, b = rows
    h = pairs.products.values().zero_()  # what beta multiplies although it is 0, and no number stays one
    torch.sparse.sampled_addmm(pairs.products, x, a.t(), beta=0.0, alpha=pairs.factor, out=pairs.products)
    if pairs.scaling is not None:
        h *= pairs.scaling
    # Each token's sum of rows of B, weighted by h: `nn.functional.embedding_bag` without its checks of the arguments.
    delta = torch.embedding_bag(b, pairs.rows, pairs.offsets, False, _SUM, False, h)[0]  # [T, width]
    if pairs.tokens is None:
        out = target[pairs.start : pairs.end]
        _ = out.copy_(delta) if overwrite else out.add_(delta)
        return
    tokens = pairs.tokens
    target[tokens] = (delta if overwrite else target[tokens] + delta).to(target.dtype)


def _rows_of_one(stack: LoraStack, s: int, one: Solo) -> _Rows:
    """Its rows of a[s] and b[s] as float32 [in, rank] and [rank, width]: views."""
    key = (s, one.first_row, one.rank)
    kept: _Rows | None = stack.kept.get(key)
    if kept is None:
        a, b = (stacked.narrow(0, one.first_row, one.rank) for stacked in (stack.a[s], stack.b[s]))
        kept = _keep(stack, key, a.t(), b)
    a, b = kept
    return a.float(), b.float()


def _keep(stack: LoraStack, key: tuple[int, ...], a: torch.Tensor, b: torch.Tensor) -> _Rows:
    """Views cost as much to make as a small product to call."""
    if len(stack.kept) >= MAX_KEPT_VIEWS:
        stack.kept.clear()
    stack.kept[key] = (a, b)
    return a, b


def _plan(maps: LoraMaps, stack: LoraStack, s: int) -> CpuPlan:
    """The layers of a step ask for the same few plans again and again."""
    plans = maps.kept
    of_places = plans.get("of_places")
    if of_places is None:
        of_places = plans["of_places"] = itemgetter(*(segment.place for segment in maps.segments))
    group = plans.get(stack.group)
    if group is None:  # adapters mostly have the same rows in all groups, which then divide alike
        first_rows = tuple([segment.first_rows[stack.group] for segment in maps.segments])
        group = plans[stack.group] = plans.setdefault(first_rows, stack.group)
    a, b = stack.a[s], stack.b[s]
    ranks, scalings = stack.host_ranks[s], stack.host_scalings[s]
    wanted = (group, a.shape[0], of_places(ranks), of_places(scalings))
    # Pairs hold products in float32, as the activations are.
    num_columns = a.shape[1] + b.shape[1] if b.dtype == torch.float32 else None
    plan: CpuPlan | None = plans.get((wanted, num_columns))
    if plan is None:
        shares, min_sharing = (False,) * len(maps.segments), MIN_SHARING
        if in_use(a.device).batch_invariant:  # a pair's product depends on nothing else
            assert num_columns is not None, "rows on a CPU are float32"
            shares, min_sharing = (True,) * len(maps.segments), 1
        elif num_columns is not None:
            shares = shares_of(maps.segments, ranks, num_columns)
        # Slices of other widths mostly divide alike.
        plan = plans.get((wanted, shares))
        if plan is None:
            plan = make_plan(
                *(maps.segments, stack.group, ranks, scalings),
                shares=shares,
                num_rows=a.shape[0],
                min_sharing=min_sharing,
            )
        plans[wanted, shares] = plans[wanted, num_columns] = plan
    return plan


def _targeted(stack: LoraStack, maps: LoraMaps, s: int, *, with_untargeted: bool = False) -> list[tuple[Solo, Segment]]:
    """The segments that slice s has rows for; with rank 0 also those it has none for."""
    found = []
    for segment in maps.segments:
        first_row, rank = segment.first_rows[stack.group], stack.host_ranks[s][segment.place]
        if first_row < 0 or rank == 0:
            first_row, rank = 0, 0
        if rank or with_untargeted:
            scaling = stack.host_scalings[s][segment.place]
            found.append((Solo(segment.start, segment.end, first_row, rank, scaling), segment))
    return found


def _take(source: torch.Tensor, start: int, end: int, row_index: torch.Tensor | None) -> torch.Tensor:
    return source[start:end] if row_index is None else source.index_select(0, row_index[start:end].long())


def _put(
    target: torch.Tensor, start: int, end: int, delta: torch.Tensor, overwrite: bool, row_index: torch.Tensor | None
) -> None:
    rows: slice | torch.Tensor = slice(start, end) if row_index is None else row_index[start:end].long()
    target[rows] = (delta if overwrite else target[rows] + delta).to(target.dtype)
