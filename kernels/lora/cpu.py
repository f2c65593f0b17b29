"""The LoRA ops on a CPU: few, batched matrix products over segments, computed in float32.

A CPU step costs what its rows' bytes cost only when the products of all adapters run as one batched product: a product
per adapter is dominated by call overhead. Segments of similar length and rank therefore form a batch, tokens padded to
the longest segment (activations are small), rows read in place where the adapters' ranges are evenly spaced and
gathered once per adapter (never per token) where they are not. Long segments go through plain products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import torch

from kernels.lora.maps import LoraMaps, LoraStack, Segment

# Segments and ranks of one class share a batch; padding inside a class costs less than a second batch. Longer segments
# amortise a product of their own.
_LENGTH_CLASSES_TOKENS = (16, 64)
_RANK_CLASSES = (16, 64, 256)
_MAX_CACHED_STEPS = 4
_MAX_KEPT_VIEWS = 64  # of a stack


@dataclass(frozen=True, slots=True)
class _Solo:
    """One segment with a product of its own: tokens [start, end), rows [first_row, first_row + rank)."""

    start: int
    end: int
    first_row: int
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class _Batch:
    """Segments that one batched product serves.

    num_segments S, length L (tokens, padded), rank R (padded)
    start, end   all tokens of the batch lie in [start, end)
    tokens       int64 [S * L] token of each padded position (a segment's last token repeats); None when position i is
                 token start + i
    valid        int64 [end - start] padded position of each token; None like `tokens`, or when `members` is given
    members      the tokens and their padded positions, when other segments stand in between; else None
    first_row, row_step  adapter i's rows begin at first_row + i * row_step; row_step 0: read through `rows`
    rows         int64 [S * R] row of each padded rank (an adapter's last row repeats), or None
    scaling      float32 [S, 1, R], zero beyond an adapter's rank
    factor       the one scaling of all segments, which then costs no pass of its own, or None. Padding to a larger rank
                 leaves none, as `scaling` also masks the repeated rows
    """

    num_segments: int
    length: int
    rank: int
    start: int
    end: int
    tokens: torch.Tensor | None
    valid: torch.Tensor | None
    members: tuple[torch.Tensor, torch.Tensor] | None
    first_row: int
    row_step: int
    rows: torch.Tensor | None
    scaling: torch.Tensor
    factor: float | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one slice's segments are computed; `untargeted` are token ranges whose adapter leaves this slice alone."""

    solos: tuple[_Solo, ...]
    batches: tuple[_Batch, ...]
    untargeted: tuple[tuple[int, int], ...]


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
    padded: dict[int, torch.Tensor] = {}  # x of a batch, by identity of its token index: slices share it
    for s, (a, b) in enumerate(zip(stack.a, stack.b, strict=True)):
        plan = _plan(maps.segments, stack, s)
        target = out.narrow(1, stack.slice_starts[s], b.shape[1])
        for one in plan.solos:
            _run_solo(x, target, a, b, one, overwrite)
        for batch in plan.batches:
            _run_batch(_padded_x(x, batch, padded), target, stack, s, batch, overwrite)
        if overwrite:
            for start, end in plan.untargeted:
                target[start:end].zero_()


def _run_solo(
    x: torch.Tensor, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, one: _Solo, overwrite: bool
) -> None:
    h = x[one.start : one.end] @ a[one.first_row : one.first_row + one.rank].float().t()
    b = b[one.first_row : one.first_row + one.rank].float()
    rows = target[one.start : one.end]
    if rows.dtype == torch.float32 and not overwrite:
        rows.addmm_(h, b, alpha=one.scaling)
    else:
        delta = (h * one.scaling) @ b
        _ = rows.copy_(delta) if overwrite else rows.add_(delta)


def _padded_x(x: torch.Tensor, batch: _Batch, padded: dict[int, torch.Tensor]) -> torch.Tensor:
    """x of the batch as [S, L, in]."""
    if batch.tokens is None:
        return x[batch.start : batch.end].unflatten(0, (batch.num_segments, batch.length))
    key = id(batch.tokens)
    if key not in padded:
        padded[key] = x.index_select(0, batch.tokens).unflatten(0, (batch.num_segments, batch.length))
    return padded[key]


def _run_batch(x: torch.Tensor, target: torch.Tensor, stack: LoraStack, s: int, batch: _Batch, overwrite: bool) -> None:
    h = torch.bmm(x, _batch_rows(stack, s, batch, of_b=False).transpose(1, 2))  # [S, L, R]
    factor = batch.factor
    if factor is None:
        h *= batch.scaling
        factor = 1.0
    b_rows = _batch_rows(stack, s, batch, of_b=True)  # [S, R, width]
    rows = target[batch.start : batch.end]
    if batch.tokens is None and not overwrite and rows.dtype == torch.float32 and rows.is_contiguous():
        rows.view(batch.num_segments, batch.length, -1).baddbmm_(h, b_rows, alpha=factor)
        return
    delta = torch.bmm(h, b_rows).flatten(0, 1)  # [S * L, width]
    if batch.members is not None:
        tokens, positions = batch.members
        delta = delta.index_select(0, positions) * factor
        target[tokens] = delta.to(target.dtype) if overwrite else (target[tokens] + delta).to(target.dtype)
        return
    if batch.valid is not None:
        delta = delta.index_select(0, batch.valid)
    _ = rows.copy_(delta.mul_(factor)) if overwrite else rows.add_(delta, alpha=factor)


def _batch_rows(stack: LoraStack, s: int, batch: _Batch, *, of_b: bool) -> torch.Tensor:
    """The batch's rows of a[s] or b[s] as float32 [S, R, columns]: a view where the ranges are evenly spaced."""
    stacked = stack.b[s] if of_b else stack.a[s]
    if batch.rows is not None:
        return stacked.index_select(0, batch.rows).float().unflatten(0, (batch.num_segments, batch.rank))
    key = (s, of_b, batch.first_row, batch.row_step, batch.num_segments, batch.rank)
    view = stack.kept.get(key)
    if view is None:  # making one costs as much as the call of a small product
        if len(stack.kept) >= _MAX_KEPT_VIEWS:
            stack.kept.clear()
        columns = stacked.shape[1]
        shape, strides = (batch.num_segments, batch.rank, columns), (batch.row_step * columns, columns, 1)
        view = stacked.as_strided(shape, strides, stacked.storage_offset() + batch.first_row * columns)
        stack.kept[key] = view
    return view.float()


# The layers of a step ask for the same few plans again and again. Keyed by identity of the segments, which the entry
# keeps alive, so that an identity is never reused while its entry exists.
_plans: dict[int, tuple[tuple[Segment, ...], Callable[[Sequence[object]], object], dict[object, _Plan]]] = {}


def _plan(segments: tuple[Segment, ...], stack: LoraStack, s: int) -> _Plan:
    entry = _plans.get(id(segments))
    if entry is None:
        while len(_plans) >= _MAX_CACHED_STEPS:
            del _plans[next(iter(_plans))]
        entry = _plans[id(segments)] = (segments, itemgetter(*(segment.place for segment in segments)), {})
    _, of_places, plans = entry
    ranks, scalings = stack.host_ranks[s], stack.host_scalings[s]
    key = (stack.group, of_places(ranks), of_places(scalings))
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = _make_plan(segments, stack.group, ranks, scalings)
    return plan


def _make_plan(segments: tuple[Segment, ...], group: int, ranks: list[int], scalings: list[float]) -> _Plan:
    """Pure function from host integers: which segments of one slice share a batched product."""
    classes: dict[tuple[int, int], list[_Solo]] = {}
    solos, untargeted = [], []
    for segment in segments:
        first_row, rank = segment.first_rows[group], ranks[segment.place]
        if first_row < 0 or rank == 0:
            untargeted.append((segment.start, segment.end))
            continue
        one = _Solo(segment.start, segment.end, first_row, rank, scalings[segment.place])
        length_class = _class(segment.end - segment.start, _LENGTH_CLASSES_TOKENS)
        rank_class = _class(rank, _RANK_CLASSES)
        if length_class is None or rank_class is None:
            solos.append(one)
        else:
            classes.setdefault((length_class, rank_class), []).append(one)
    batches = []
    for members in classes.values():
        if len(members) == 1:
            solos.append(members[0])
        else:
            batches.append(_make_batch(members))
    return _Plan(tuple(solos), tuple(batches), tuple(untargeted))


def _class(size: int, limits: tuple[int, ...]) -> int | None:
    return next((i for i, limit in enumerate(limits) if size <= limit), None)


def _make_batch(members: list[_Solo]) -> _Batch:
    lengths = [one.end - one.start for one in members]
    length, rank = max(lengths), max(one.rank for one in members)
    start, end = members[0].start, members[-1].end
    scaling = torch.zeros(len(members), 1, rank)
    for i, one in enumerate(members):
        scaling[i, 0, : one.rank] = one.scaling
    tokens = valid = pairs = rows = None
    adjacent = end - start == sum(lengths)
    if not adjacent or min(lengths) < length:
        tokens = torch.tensor([min(one.start + i, one.end - 1) for one in members for i in range(length)])
        positions = torch.tensor([i * length + j for i, num in enumerate(lengths) for j in range(num)])
        if adjacent:
            valid = positions
        else:
            pairs = (tokens.index_select(0, positions), positions)
    row_step = members[1].first_row - members[0].first_row
    evenly = all(b.first_row - a.first_row == row_step for a, b in pairwise(members))
    if row_step <= 0 or not evenly or any(one.rank != rank for one in members):
        row_step = 0
        rows = torch.tensor([one.first_row + min(j, one.rank - 1) for one in members for j in range(rank)])
    is_uniform = all(one.rank == rank and one.scaling == members[0].scaling for one in members)
    return _Batch(
        num_segments=len(members),
        length=length,
        rank=rank,
        start=start,
        end=end,
        tokens=tokens,
        valid=valid,
        members=pairs,
        first_row=members[0].first_row,
        row_step=row_step,
        rows=rows,
        scaling=scaling,
        factor=members[0].scaling if is_uniform else None,
    )


def _targeted(
    stack: LoraStack, maps: LoraMaps, s: int, *, with_untargeted: bool = False
) -> list[tuple[_Solo, Segment]]:
    """The segments that slice s has rows for; with rank 0 also those it has none for."""
    found = []
    for segment in maps.segments:
        first_row, rank = segment.first_rows[stack.group], stack.host_ranks[s][segment.place]
        if first_row < 0 or rank == 0:
            first_row, rank = 0, 0
        if rank or with_untargeted:
            scaling = stack.host_scalings[s][segment.place]
            found.append((_Solo(segment.start, segment.end, first_row, rank, scaling), segment))
    return found


def _take(source: torch.Tensor, start: int, end: int, row_index: torch.Tensor | None) -> torch.Tensor:
    return source[start:end] if row_index is None else source.index_select(0, row_index[start:end].long())


def _put(
    target: torch.Tensor, start: int, end: int, delta: torch.Tensor, overwrite: bool, row_index: torch.Tensor | None
) -> None:
    rows: slice | torch.Tensor = slice(start, end) if row_index is None else row_index[start:end].long()
    target[rows] = (delta if overwrite else target[rows] + delta).to(target.dtype)
