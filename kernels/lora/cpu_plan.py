"""How a step's segments are divided into products on a CPU: pure functions from host integers; `cpu` runs them.

Short segments of similar rank form batches, tokens padded to the longest segment (activations are small). A batch reads
rows in place where its adapters' ranges are evenly spaced. Where they are not, it is split into batches that do; or,
where so many calls would cost more, rows are gathered once per adapter (never per token). Longer segments go through
plain products.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.lora.maps import Segment

# Longer segments amortise a product of their own.
_MAX_BATCHED_TOKENS = 8
# Ranks of one class may share a batch; padding inside a class costs less than a second batch, but for the smallest.
_RANK_CLASSES = (4, 16, 64, 256)
# Copying so many bytes takes about as long as the calls of one more batch.
_BYTES_PER_BATCH = 256 * 2**10


@dataclass(frozen=True, slots=True)
class Solo:
    """One segment with a product of its own: tokens [start, end), rows [first_row, first_row + rank)."""

    start: int
    end: int
    first_row: int
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class Batch:
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
class CpuPlan:
    """How one slice's segments are computed; `untargeted` are token ranges whose adapter leaves this slice alone."""

    solos: tuple[Solo, ...]
    batches: tuple[Batch, ...]
    untargeted: tuple[tuple[int, int], ...]


def make_plan(
    segments: tuple[Segment, ...], group: int, ranks: list[int], scalings: list[float], num_columns: int
) -> CpuPlan:
    """Pure function from host integers: which segments of one slice share a batched product.

    num_columns  of a row of A and of B together
    """
    classes: dict[int, list[Solo]] = {}
    solos, untargeted = [], []
    for segment in segments:
        first_row, rank = segment.first_rows[group], ranks[segment.place]
        if first_row < 0 or rank == 0:
            untargeted.append((segment.start, segment.end))
            continue
        one = Solo(segment.start, segment.end, first_row, rank, scalings[segment.place])
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
    return CpuPlan(tuple(solos), tuple(batches), tuple(untargeted))


def _divided(members: list[Solo], num_columns: int) -> list[list[Solo]]:
    """The members as one batch, or as several that copy nothing, whichever costs less."""
    runs: list[list[Solo]] = []
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


def _is_run(members: list[Solo]) -> bool:
    return _are_evenly_spaced(members) and _are_adjacent(members)


def _are_evenly_spaced(members: list[Solo]) -> bool:
    """Whether a view can show the rows of all: equal ranks at equal, positive distances."""
    step = members[1].first_row - members[0].first_row if len(members) > 1 else 1
    is_even = all(b.first_row - a.first_row == step for a, b in pairwise(members))
    return is_even and step > 0 and all(one.rank == members[0].rank for one in members)


def _are_adjacent(members: list[Solo]) -> bool:
    return all(a.end == b.start for a, b in pairwise(members))


def _make_batch(members: list[Solo]) -> Batch:
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
    return Batch(
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
