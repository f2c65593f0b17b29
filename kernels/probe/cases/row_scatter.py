"""Probe cases of an adapter's rows: the scatter, with mixed ranks, rows that stand apart and a column of a table; and
the swap of rows of several tensors.

Rows that nobody has written are NaN, and stay so beyond the range.
"""

from __future__ import annotations

import torch

from kernels.probe.cases.tensors import Place, Prepared
from kernels.row_scatter import ops
from kernels.row_scatter.ops import RowPiece, RowPieces, RowTensorSet
from kernels.shapes import ProbeShapes

_NUM_ROWS, _LENGTH, _NUM_PLACES = 48, 16, 5
# Of two groups, and the place. Ranks of the four pieces: of two slices that stand interleaved, and of two alone.
_STARTS = (16, 32, 3)
_RANKS = (16, 5, 0, 7)


def scatter(shapes: ProbeShapes, place: Place) -> Prepared:
    """All of what a load writes, and what it must leave."""
    dtype = shapes.torch_row_dtype
    behind = place.put(place.fresh(_NUM_ROWS * 2, shapes.hidden_size), dtype)
    alone = [place.put(place.fresh(_NUM_ROWS, width), dtype) for width in (shapes.hidden_size, 37)]
    table = place.put(place.random(6, _NUM_PLACES), torch.float32)
    targets = (behind[0::2], behind[1::2], *alone)
    pieces = [
        RowPiece(rows, rank, _LENGTH, at // 2) for at, (rows, rank) in enumerate(zip(targets, _RANKS, strict=True))
    ]
    sources = [place.put(place.random(one.rank, one.target.shape[1]), dtype) for one in pieces if one.rank]
    column = place.put(place.random(1, 6), torch.float32)
    written = RowPieces((*pieces, RowPiece(table.t(), 1, 1, 2)))
    held = (*sources, column)

    def call() -> tuple[torch.Tensor, ...]:
        ops.prepare(written, held)
        ops.scatter_rows(written, held, _STARTS)
        return behind, *alone, table

    return call


def swap(shapes: ProbeShapes, place: Place) -> Prepared:
    """Two ranges of rows that stand apart, and of rows that do not."""
    dtype = shapes.torch_row_dtype
    behind = place.put(place.random(_NUM_ROWS * 2, shapes.hidden_size), dtype)
    alone = [place.put(place.random(_NUM_ROWS, width), dtype) for width in (shapes.hidden_size, 37)]
    swapped = RowTensorSet((behind[0::2], behind[1::2], *alone))

    def call() -> tuple[torch.Tensor, ...]:
        ops.swap_rows(swapped, 3, 24, _LENGTH)
        return behind, *alone

    return call
