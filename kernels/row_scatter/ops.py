"""An adapter's weights from where they lie together to the rows that are its own, and rows of all tensors that change
places: shapes are checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.platform import contract, implementation

# Ranges that a load takes: one for each of four groups of projections, and its place in the tables.
MAX_STARTS = 6


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Rows [start, start + length) of `target`, of which the first `rank` are written and the others zeroed.

    target  [rows, width], any strides of elements of one memory; where the columns have no unit stride, length is 1
    rank    0: no source, all is zeroed
    start   which of the call's starts is the first row
    """

    target: torch.Tensor
    rank: int
    length: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class RowPieces:
    """Pieces that are written together, whose targets do not overlap.

    kept  what an implementation derived from where they lie, for the next calls; it ends with this
    """

    pieces: tuple[RowPiece, ...]
    kept: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class RowTensorSet:
    """Tensors whose rows belong together: at least one, of one device.

    tensors  each [rows, width], with unit stride along its columns and any distance of its rows; no two share memory
    kept     as in `RowPieces`
    """

    tensors: tuple[torch.Tensor, ...]
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        assert self.tensors, "at least one"
        for one in self.tensors:
            assert one.dim() == 2 and one.stride(1) == 1, "rows have unit stride along their columns"
            assert one.device == self.tensors[0].device, "of one device"


def scatter_rows(pieces: RowPieces, sources: tuple[torch.Tensor, ...], starts: Sequence[int]) -> None:
    """For each piece p, from its first row r = starts[p.start]:

        p.target[r : r + p.rank] = source;  p.target[r + p.rank : r + p.length] = 0

    pieces   targets are changed in place, in these rows alone; at least one
    sources  one for each piece with a rank, in their order: [rank, width], contiguous, of the target's dtype and
             device. Where the same tuple is given again, nothing is derived from it again
    starts   at most MAX_STARTS; each range ends within its target, which the caller knows

    Asked of the current stream; nothing waits.
    """
    assert 0 < len(starts) <= MAX_STARTS and min(starts) >= 0, "starts are first rows"
    implementation("row_scatter", _device(pieces)).scatter_rows(pieces, sources, starts)


def prepare(pieces: RowPieces, sources: tuple[torch.Tensor, ...]) -> None:
    """Derive all that `scatter_rows` of these needs. It may allocate, and wait for the current stream.

    Raises AssertionError where pieces and sources do not belong together.
    """
    held = [one for one in pieces.pieces if one.rank]
    assert len(held) == len(sources), "one source for each piece with a rank"
    for one in pieces.pieces:
        assert one.target.dim() == 2 and 0 <= one.rank <= one.length and 0 <= one.start < MAX_STARTS, "a piece of rows"
        assert one.target.stride(1) == 1 or one.length == 1, "several rows have unit stride along their columns"
    for one, source in zip(held, sources, strict=True):
        assert source.shape == (one.rank, one.target.shape[1]), "sources are [rank, width]"
        assert source.is_contiguous() and source.dtype == one.target.dtype, "sources are contiguous, of their dtype"
        assert source.device == one.target.device, "sources lie on the device of the rows"
    implementation("row_scatter", _device(pieces)).prepare(pieces, sources)


def swap_rows(tensors: RowTensorSet, low: int, high: int, num_rows: int) -> None:
    """In each tensor, rows [low, low + num_rows) and [high, high + num_rows) change places, bit for bit.

    tensors  changed in place, in these rows alone
    low      low + num_rows <= high; both ends lie within each tensor, which the caller knows

    Asked of the current stream; nothing waits.
    """
    assert num_rows > 0 and 0 <= low <= high - num_rows, "two ranges that have no row in common, the lower one first"
    implementation("row_scatter", tensors.tensors[0].device).swap_rows(tensors, low, high, num_rows)


def warm_up(device: torch.device) -> int:
    """Compile all that any call can need; the number of variants compiled. 0 where nothing is ever compiled."""
    return contract("row_scatter", device).warm_up_and_count(device)


def _device(pieces: RowPieces) -> torch.device:
    return pieces.pieces[0].target.device
