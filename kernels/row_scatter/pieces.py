"""Pieces of `scatter_rows` and `swap_rows`: one for each tensor that a load writes, or whose rows are swapped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

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
