"""The LoRA ops on a CPU: few, batched matrix products over segments, computed in float32.

A CPU step costs what its rows' bytes cost only when the products of many adapters run as one batched product: a product
per adapter is dominated by call overhead. Short segments of similar rank therefore form batches, tokens padded to the
longest segment (activations are small). A batch reads rows in place where its adapters' ranges are evenly spaced. Where
they are not, it is split into batches that do; or, where so many calls would cost more, rows are gathered once per
adapter (never per token). Longer segments go through plain products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import torch

from kernels.lora.maps import LoraMaps, LoraStack, Segment

# Longer segments amortise a product of their own.
_MAX_BATCHED_TOKENS = 8
# Ranks of one class may share a batch; padding inside a class costs less than a second batch.
_RANK_CLASSES = (16, 64, 256)
# Copying so many bytes takes about as long as the calls of one more batch.
_BYTES_PER_BATCH = 256 * 2**10
_MAX_CACHED_STEPS = 4
_MAX_KEPT_VIEWS = 64  # pairs, of a stack

# Of A and of B.
_Rows = tuple[torch.Tensor, torch.Tensor]


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
    padded: dict[int, torch.Tensor] = {}  # x of a batch, by identity of the batch: slices may share it
    for s, (start, b) in enumerate(zip(stack.slice_starts, stack.b, strict=True)):
        plan = _plan(maps.segments, stack, s)
        target = out.narrow(1, start, b.shape[1])
        for one in plan.solos:
            _run_solo(x, target, _rows_of_one(stack, s, one), one, overwrite)
        for batch in plan.batches:
            batch_x = padded.get(id(batch))
            if batch_x is None:
                batch_x = padded[id(batch)] = _padded_x(x, batch)
            _run_batch(batch_x, target, _rows_of_batch(stack, s, batch), batch, overwrite)
        if overwrite:
            for first, end in plan.untargeted:
                target[first:end].zero_()


def _run_solo(x: torch.Tensor, target: torch.Tensor, rows: _Rows, one: _Solo, overwrite: bool) -> None:
    """rows  [in, rank] and [rank, width]"""
    a, b = rows
    h = torch.mm(x[one.start : one.end], a)
    out = target[one.start : one.end]
    if out.dtype == torch.float32 and not overwrite:
        out.addmm_(h, b, alpha=one.scaling)
    else:
        delta = (h * one.scaling) @ b
        _ = out.copy_(delta) if overwrite else out.add_(delta)


def _padded_x(x: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """x of the batch as [S, L, in]."""
    chosen = x[batch.start : batch.end] if batch.tokens is None else x.index_select(0, batch.tokens)
    return chosen.view(batch.num_segments, batch.length, -1)


def _run_batch(x: torch.Tensor, target: torch.Tensor, rows: _Rows, batch: _Batch, overwrite: bool) -> None:
    """rows  [S, in, R] and [S, R, width]"""
    a, b = rows
    h = torch.bmm(x, a)  # [S, L, R]
    factor = batch.factor
    if factor is None:
        h *= batch.scaling
        factor = 1.0
    out = target[batch.start : batch.end]
    if batch.tokens is None and not overwrite and out.dtype == torch.float32 and out.is_contiguous():
        out.view(batch.num_segments, batch.length, -1).baddbmm_(h, b, alpha=factor)
        return
    delta = torch.bmm(h, b).flatten(0, 1)  # [S * L, width]
    if batch.members is not None:
        tokens, positions = batch.members
        delta = delta.index_select(0, positions) * factor
        target[tokens] = delta.to(target.dtype) if overwrite else (target[tokens] + delta).to(target.dtype)
        return
    if batch.valid is not None:
        delta = delta.index_select(0, batch.valid)
    _ = out.copy_(delta.mul_(factor)) if overwrite else out.add_(delta, alpha=factor)


def _rows_of_one(stack: LoraStack, s: int, one: _Solo) -> _Rows:
    """Its rows of a[s] and b[s] as float32 [in, rank] and [rank, width]: views."""
    key = (s, one.first_row, one.rank)
    kept: _Rows | None = stack.kept.get(key)
    if kept is None:
        a, b = (stacked.narrow(0, one.first_row, one.rank) for stacked in (stack.a[s], stack.b[s]))
        kept = _keep(stack, key, a.t(), b)
    a, b = kept
    return a.float(), b.float()


def _rows_of_batch(stack: LoraStack, s: int, batch: _Batch) -> _Rows:
    """The batch's rows of a[s] and b[s] as float32 [S, in, R] and [S, R, width]: views where the ranges are evenly
    spaced."""
    if batch.rows is not None:
        a, b = (stacked.index_select(0, batch.rows).float() for stacked in (stack.a[s], stack.b[s]))
        num, rank = batch.num_segments, batch.rank
        return a.view(num, rank, -1).transpose(1, 2), b.view(num, rank, -1)
    key = (s, batch.first_row, batch.row_step, batch.num_segments, batch.rank)
    kept: _Rows | None = stack.kept.get(key)
    if kept is None:
        a, b = (_view_of_rows(stacked, batch) for stacked in (stack.a[s], stack.b[s]))
        kept = _keep(stack, key, a.transpose(1, 2), b)
    a, b = kept
    return a.float(), b.float()


def _view_of_rows(stacked: torch.Tensor, batch: _Batch) -> torch.Tensor:
    columns = stacked.shape[1]
    shape, strides = (batch.num_segments, batch.rank, columns), (batch.row_step * columns, columns, 1)
    return stacked.as_strided(shape, strides, stacked.storage_offset() + batch.first_row * columns)


def _keep(stack: LoraStack, key: tuple[int, ...], a: torch.Tensor, b: torch.Tensor) -> _Rows:
    """Views cost as much to make as a small product to call."""
    if len(stack.kept) >= _MAX_KEPT_VIEWS:
        stack.kept.clear()
    stack.kept[key] = (a, b)
    return a, b


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
    num_columns = stack.a[s].shape[1] + stack.b[s].shape[1]
    key = (stack.group, num_columns, of_places(ranks), of_places(scalings))
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = _make_plan(segments, stack.group, ranks, scalings, num_columns)
    return plan


def _make_plan(
    segments: tuple[Segment, ...], group: int, ranks: list[int], scalings: list[float], num_columns: int
) -> _Plan:
    """Pure function from host integers: which segments of one slice share a batched product.

    num_columns  of a row of A and of B together
    """
    classes: dict[int, list[_Solo]] = {}
    solos, untargeted = [], []
    for segment in segments:
        first_row, rank = segment.first_rows[group], ranks[segment.place]
        if first_row < 0 or rank == 0:
            untargeted.append((segment.start, segment.end))
            continue
        one = _Solo(segment.start, segment.end, first_row, rank, scalings[segment.place])
        rank_class = next((limit for limit in _RANK_CLASSES if rank <= limit), None)
        if segment.end - segment.start > _MAX_BATCHED_TOKENS or rank_class is None:
            solos.append(one)
        else:
            classes.setdefault(rank_class, []).append(one)
    batches = []
    for members in classes.values():
        for batched in _divided(members, num_columns):
            if len(batched) == 1:
                solos.append(batched[0])
            else:
                batches.append(_make_batch(batched))
    return _Plan(tuple(solos), tuple(batches), tuple(untargeted))


def _divided(members: list[_Solo], num_columns: int) -> list[list[_Solo]]:
    """The members as one batch, or as several that copy nothing, whichever costs less."""
    runs: list[list[_Solo]] = []
    for one in members:
        if runs and _is_run([*runs[-1][-2:], one]):
            runs[-1].append(one)
        else:
            runs.append([one])
    copied_bytes = 0
    if not _are_evenly_spaced(members):
        copied_bytes += len(members) * max(one.rank for one in members) * num_columns * 4
    if not _are_adjacent(members):
        copied_bytes += sum(one.end - one.start for one in members) * num_columns * 4
    return runs if (len(runs) - 1) * _BYTES_PER_BATCH <= copied_bytes else [members]


def _is_run(members: list[_Solo]) -> bool:
    return _are_evenly_spaced(members) and _are_adjacent(members)


def _are_evenly_spaced(members: list[_Solo]) -> bool:
    """Whether a view can show the rows of all: equal ranks at equal, positive distances."""
    step = members[1].first_row - members[0].first_row if len(members) > 1 else 1
    is_even = all(b.first_row - a.first_row == step for a, b in pairwise(members))
    return is_even and step > 0 and all(one.rank == members[0].rank for one in members)


def _are_adjacent(members: list[_Solo]) -> bool:
    return all(a.end == b.start for a, b in pairwise(members))


def _make_batch(members: list[_Solo]) -> _Batch:
    lengths = [one.end - one.start for one in members]
    length, rank = max(lengths), max(one.rank for one in members)
    start, end = members[0].start, members[-1].end
    scaling = torch.zeros(len(members), 1, rank)
    for i, one in enumerate(members):
        scaling[i, 0, : one.rank] = one.scaling
    tokens = valid = pairs = rows = None
    adjacent = _are_adjacent(members)
    if not adjacent or min(lengths) < length:
        tokens = torch.tensor([min(one.start + i, one.end - 1) for one in members for i in range(length)])
        positions = torch.tensor([i * length + j for i, num in enumerate(lengths) for j in range(num)])
        if adjacent:
            valid = positions
        else:
            pairs = (tokens.index_select(0, positions), positions)
    row_step = members[1].first_row - members[0].first_row
    if not _are_evenly_spaced(members):
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
