"""What the LoRA ops read besides activations: where each adapter's tokens stand, and where its rows stand.

A step is laid out in adapter order: the tokens of one adapter form one contiguous *segment*, and the tokens of the
base model (no adapter) come last. Only integers live here; the weights are in `LoraStack`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.lora.side import SideLines


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a step, all using the adapter at `place`, whose rows begin at `first_rows[group]`.

    `first_rows` has one entry per projection group; -1 where the adapter does not target the group.
    """

    start: int
    end: int
    place: int
    first_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoraMaps:
    """Index maps of one step. Host integers and their device copies say the same; nothing here needs a device sync.

    segments         host view, in adapter order, without padding; empty segments do not occur
    num_tokens       tokens of the step, the base model's included
    segment_starts   int32 [max_segments + 1]; padding segments are empty (start = end = last token of the last segment)
    places           int32 [max_segments]; padding -1
    first_rows       int32 [num_groups, max_segments]; -1 where the adapter has no rows in the group
    token_segment    int32 [num_tokens]; -1 for tokens of the base model
    num_segments     int32 [1]; the active ones, read by persistent kernels on the device
    side             lines of what adapters have beside rows; None where no adapter of the step has such
    runs_once        the step is captured by nobody, so that what is launched may follow from `segments`
    kept             what an implementation derived from `segments`, for the other layers of the step
    """

    segments: tuple[Segment, ...]
    num_tokens: int
    segment_starts: torch.Tensor
    places: torch.Tensor
    first_rows: torch.Tensor
    token_segment: torch.Tensor
    num_segments: torch.Tensor
    side: SideLines | None = None
    runs_once: bool = False
    kept: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class LoraStack:
    """The stacked LoRA rows of one (packed) projection of one layer; owned by the row pool, read by the ops.

    a            per slice [rows, in_features]: row j of an adapter's range is row j of its lora_A
                 (for a token embedding: [rows, vocab]). Unit stride along the inputs and one row stride for all slices:
                 contiguous, or on devices that want it (`Platform.window_rows`) interleaved by slice behind the base
                 weight, so that row j of slice s is row out_features + j * num_slices + s of that buffer
    b            per slice [rows, slice width], contiguous: row j is column j of lora_B, so that it is the vector that
                 rank j scales. In a and b an adapter's rows from its rank on are zero up to the next multiple of 16
    ranks        int32 [num_slices, num_places], on the device; 0 = this slice is not targeted by the adapter
    scalings     float32 [num_slices, num_places], on the device; never folded into the rows
    group        index of the projection group: which row of `LoraMaps.first_rows` holds this stack's ranges
    slice_starts first output column of each slice in the packed output
    host_ranks, host_scalings
                 the same two tables as nested lists [slice][place], changed by the pool together with the tensors, for
                 implementations that run on the host
    kept         what an implementation derived from where a and b lie, for its next steps; it ends with the stack
    """

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    ranks: torch.Tensor
    scalings: torch.Tensor
    group: int
    slice_starts: tuple[int, ...]
    host_ranks: list[list[int]] = field(default_factory=list)
    host_scalings: list[list[float]] = field(default_factory=list)
    kept: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def output_width(self) -> int:
        """The column after the last one of any slice."""
        return max(start + b.shape[1] for start, b in zip(self.slice_starts, self.b, strict=True))
