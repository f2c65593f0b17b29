"""`kernels.row_scatter.ops` in plain torch: as few launches as it has for many tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.contract import Contract
from kernels.row_scatter.ops import RowPieces, RowTensorSet

CONTRACT = Contract(replayable=True)


def prepare(pieces: RowPieces, sources: tuple[torch.Tensor, ...]) -> None:
    """See `ops.prepare`."""


def scatter_rows(pieces: RowPieces, sources: tuple[torch.Tensor, ...], starts: Sequence[int]) -> None:
    """See `ops.scatter_rows`."""
    targets, zeros = [], []
    for one in pieces.pieces:
        start = starts[one.start]
        if one.rank:
            targets.append(one.target.narrow(0, start, one.rank))
        if one.rank < one.length:
            zeros.append(one.target.narrow(0, start + one.rank, one.length - one.rank))
    _copy_all(targets, sources)
    if zeros:
        torch._foreach_zero_(zeros)


def swap_rows(tensors: RowTensorSet, low: int, high: int, num_rows: int) -> None:
    """See `ops.swap_rows`."""
    for one in tensors.tensors:
        lower, higher = one.narrow(0, low, num_rows), one.narrow(0, high, num_rows)
        held = lower.clone()
        lower.copy_(higher)
        higher.copy_(held)


def _copy_all(targets: list[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """targets[i] = sources[i]. Contiguous ones by a few launches for all; others take a launch each, as would all that
    are in one call with them."""
    pairs = list(zip(targets, sources, strict=True))
    for is_dense in (True, False):
        chosen = [pair for pair in pairs if pair[0].is_contiguous() is is_dense]
        if chosen:
            torch._foreach_copy_([target for target, _ in chosen], [source for _, source in chosen])
