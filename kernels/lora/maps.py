"""Index maps of the LoRA ops: the tokens of each adapter, and its first rows.

A step is laid out in adapter order: the tokens of one adapter form one contiguous *segment*, and the tokens of the
base model (no adapter) come last. Only integers live here; the weights are in `LoraStack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import torch

from kernels.arrays import LAST, Array, HostArray, declared
from kernels.lora.non_lora import NonLoraLines


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
class LoraSizes:
    """Sizes of the arrays of a step, or of its rows of logits.

    max_segments  the same in all steps, so that kernels are compiled for one length
    side          fields of `NonLoraArrays` that are present
    """

    num_tokens: int
    max_segments: int
    num_groups: int
    side: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LoraArrays(Generic[Array]):
    """Index maps of one step, by `LoraSizes`.

    segment_starts   token at which each segment begins, and where the last one ends; padding segments are empty
    places           of each segment's adapter
    first_rows       of each segment's adapter in each group; -1 where it has no rows in the group
    token_segment    of each token; -1 for tokens of the base model
    num_segments     the active ones, read by persistent kernels on the device
    """

    segment_starts: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.max_segments + 1,), LAST))
    places: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.max_segments,), -1))
    first_rows: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.num_groups, sizes.max_segments), -1))
    token_segment: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.num_tokens,), -1))
    num_segments: Array = field(metadata=declared(np.int32, lambda _: (1,)))


def fill_lora(arrays: LoraArrays[HostArray], segments: Sequence[Segment]) -> None:
    """Write what the segments say, in the order of their tokens."""
    num = len(segments)
    arrays.segment_starts.put([*(segment.start for segment in segments), segments[-1].end if segments else 0])
    arrays.places.put([segment.place for segment in segments])
    arrays.first_rows.put(np.array([segment.first_rows for segment in segments], np.int32).T)
    lengths = [segment.end - segment.start for segment in segments]
    arrays.token_segment.put(np.repeat(np.arange(num, dtype=np.int32), lengths))
    arrays.num_segments.put([num])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraMaps(LoraArrays[torch.Tensor]):
    """Index maps of one step. Host integers and their device copies say the same; nothing here needs a device sync.

    segments         host view, in adapter order, without padding; empty segments do not occur
    num_tokens       tokens of the step, the base model's included
    side             lines of what adapters have beside rows; None where no adapter of the step has such
    runs_once        the step is captured by nobody, so that what is launched may follow from `segments`
    has_experts      an adapter of the step has rows for experts
    kept             what an implementation derived from `segments`, for the other layers of the step
    """

    segments: tuple[Segment, ...]
    num_tokens: int
    side: NonLoraLines | None = None
    runs_once: bool = False
    has_experts: bool = False
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
    output_width the column after the last one of any slice
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

    # Found once, since every launch asks for it.
    output_width: int = field(init=False)

    def __post_init__(self) -> None:
        widths = (b.shape[1] for b in self.b)
        last = max(start + width for start, width in zip(self.slice_starts, widths, strict=True))
        object.__setattr__(self, "output_width", last)
