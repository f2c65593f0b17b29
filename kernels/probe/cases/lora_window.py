"""Probe cases of the LoRA window: products whose last columns are h, among them NaN of rows that nobody owns."""

from __future__ import annotations

import torch

from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora_window import ops
from kernels.probe.cases.lora import FEW, MANY, make_maps, make_stack, qkv_widths
from kernels.probe.cases.tensors import Place, Prepared
from kernels.shapes import ProbeShapes

# Rows of A are not read here.
_NO_INPUTS = 1


def expand(shapes: ProbeShapes, place: Place) -> Prepared:
    """The deltas of three slices, for few tokens."""
    return _expand(shapes, place, FEW)


def expand_many(shapes: ProbeShapes, place: Place) -> Prepared:
    """The same for many."""
    return _expand(shapes, place, MANY)


def swiglu(shapes: ProbeShapes, place: Place) -> Prepared:
    """The gate with the deltas of its two slices, for few tokens."""
    return _swiglu(shapes, place, FEW)


def swiglu_many(shapes: ProbeShapes, place: Place) -> Prepared:
    """The same for many."""
    return _swiglu(shapes, place, MANY)


def _expand(shapes: ProbeShapes, place: Place, lengths: tuple[int, ...]) -> Prepared:
    widths, maps = qkv_widths(shapes), make_maps(place, lengths)
    stack = make_stack(shapes, place, widths, _NO_INPUTS)
    product = _product(shapes, place, stack, maps)

    def call() -> tuple[torch.Tensor, ...]:
        out = product.clone()
        ops.lora_expand_window(out, stack, maps)
        return (out[:, : sum(widths)],)

    return call


def _swiglu(shapes: ProbeShapes, place: Place, lengths: tuple[int, ...]) -> Prepared:
    maps = make_maps(place, lengths)
    stack = make_stack(shapes, place, (shapes.intermediate_size,) * 2, _NO_INPUTS)
    product = _product(shapes, place, stack, maps)
    return lambda: (ops.swiglu_window(product, stack, maps),)


def _product(shapes: ProbeShapes, place: Place, stack: LoraStack, maps: LoraMaps) -> torch.Tensor:
    """A base output, then h: of each token only in the columns of its own adapter's ranks, NaN elsewhere."""
    num_slices, num_columns = len(stack.b), stack.output_width
    num_rows = stack.b[0].shape[0]
    product = torch.full((maps.num_tokens, num_columns + num_rows * num_slices), torch.nan)
    product[:, :num_columns] = place.random(maps.num_tokens, num_columns)
    for segment in maps.segments:
        for s, ranks in enumerate(stack.host_ranks):
            rank, first = ranks[segment.place], num_columns + segment.first_rows[0] * num_slices + s
            h = product[segment.start : segment.end, first::num_slices][:, :rank]
            h.copy_(place.random(segment.end - segment.start, rank))
    return place.put(product, shapes.torch_row_dtype)
