"""What `scatter_rows` writes where: one piece for each tensor that a load reaches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# Ranges that a load takes: one for each of four groups of projections, and its place in the tables.
MAX_STARTS = 5


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
