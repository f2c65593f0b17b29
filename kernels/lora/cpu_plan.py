"""How a step's segments are divided into products on a CPU: pure functions from host integers; `cpu` runs them.

Segments of little work share two calls, whatever their ranks and wherever their rows lie: token by token they name the
rows that the token meets, so that nothing is padded and no row is copied. Others amortise products of their own.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kernels.lora.maps import Segment

# Says once in a process that sparse CSR tensors are in beta, to users who cannot do anything about it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], torch.empty(0, dtype=torch.int64), torch.empty(0), (1, 1), check_invariants=False)

# Multiplications of one segment up to which the calls of its own products would cost more than what a matrix product
# saves, which reads each row once for all tokens.
MAX_SHARED_WORK = 2**18
# Two segments have products of their own as fast.
MIN_SHARING = 3


class Solo(NamedTuple):  # of which a plan makes one for each adapter of the step
    """One segment with a product of its own: tokens [start, end), rows [first_row, first_row + rank)."""

    start: int
    end: int
    first_row: int
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class Pairs:
    """Each token of several segments with each row of its adapter, token by token.

    start, end  all tokens lie in [start, end)
    tokens      int64 [T] the tokens, or None when they are all of [start, end)
    products    float32 CSR [T, rows of the stack] with an entry for each of N pairs, which the products of x and the
                rows of A overwrite
    rows        int32 [N] the row of each pair
    offsets     int32 [T] the first pair of each token
    factor      the one scaling of all segments, or 1 where each pair has its own
    scaling     float32 [N], or None
    """

    start: int
    end: int
    tokens: torch.Tensor | None
    products: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    factor: float
    scaling: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """How one slice's segments are computed; `untargeted` are token ranges whose adapter leaves this slice alone."""

    solos: tuple[Solo, ...]
    pairs: Pairs | None
    untargeted: tuple[tuple[int, int], ...]


def shares_of(segments: tuple[Segment, ...], ranks: list[int], num_columns: int) -> tuple[bool, ...]:
    """Whether each segment has so little work that it shares calls.

    num_columns  of a row of A and of B together
    """
    most = MAX_SHARED_WORK // num_columns
    return tuple([(segment.end - segment.start) * ranks[segment.place] <= most for segment in segments])


def make_plan(
    segments: tuple[Segment, ...],
    group: int,
    ranks: list[int],
    scalings: list[float],
    *,
    shares: tuple[bool, ...],
    num_rows: int,
    min_sharing: int = MIN_SHARING,
) -> CpuPlan:
    """Pure function from host integers: what is computed by which calls.

    shares       of each segment; one that has too few to share with has products of its own
    num_rows     of the stack
    min_sharing  segments that share
    """
    solos: list[Solo] = []
    shared: list[Solo] = []
    untargeted = []
    for segment, is_shared in zip(segments, shares, strict=True):
        first_row, rank = segment.first_rows[group], ranks[segment.place]
        if first_row < 0 or rank == 0:
            untargeted.append((segment.start, segment.end))
            continue
        one = Solo(segment.start, segment.end, first_row, rank, scalings[segment.place])
        (shared if is_shared else solos).append(one)
    if len(shared) < min_sharing:
        return CpuPlan((*solos, *shared), None, tuple(untargeted))
    return CpuPlan(tuple(solos), _make_pairs(shared, num_rows), tuple(untargeted))


def _make_pairs(members: list[Solo], num_rows: int) -> Pairs:
    lengths = [one.end - one.start for one in members]
    ranks = np.repeat([one.rank for one in members], lengths)
    ends = ranks.cumsum()
    starts = ends - ranks
    # Pair p of a token is with row first_row + p - its first pair.
    rows = np.repeat(np.repeat([one.first_row for one in members], lengths) - starts, ranks) + np.arange(ends[-1])
    bounds = torch.from_numpy(np.append(starts, ends[-1]).astype(np.int32))
    indices = torch.from_numpy(rows.astype(np.int32))
    tokens = scaling = None
    start, end = members[0].start, members[-1].end
    if len(ranks) < end - start:
        tokens = torch.tensor([token for one in members for token in range(one.start, one.end)])
    factor = members[0].scaling
    if any(one.scaling != factor for one in members):
        each = np.repeat(np.array([one.scaling for one in members], np.float32), lengths)
        factor, scaling = 1.0, torch.from_numpy(np.repeat(each, ranks))
    size = (len(ranks), num_rows)
    return Pairs(
        start=start,
        end=end,
        tokens=tokens,
        products=torch.sparse_csr_tensor(bounds, indices, torch.empty(len(rows)), size, check_invariants=False),
        rows=indices,
        offsets=bounds[:-1],
        factor=factor,
        scaling=scaling,
    )
