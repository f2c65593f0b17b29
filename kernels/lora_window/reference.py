"""The window's ops in plain torch, float64 inside, rounded once at the end: the truth for every implementation."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.contract import Contract
from kernels.lora.maps import LoraMaps, LoraStack

CONTRACT = Contract()  # segments are read on the host


def lora_expand_window(product: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> None:
    """See `ops.lora_expand_window`."""
    _add_deltas(product, product, stack, maps)


def swiglu_window(product: torch.Tensor, stack: LoraStack, maps: LoraMaps, *, out: torch.Tensor) -> None:
    """See `ops.swiglu_window`."""
    size = stack.b[0].shape[1]
    gate_up = product[:, : 2 * size].double()
    _add_deltas(gate_up, product, stack, maps)
    out.copy_(functional.silu(gate_up[:, :size]) * gate_up[:, size:])


def _add_deltas(out: torch.Tensor, product: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> None:
    """out[t, slice s] += delta[t, slice s]; `out` may be `product`."""
    num_slices, first_column = len(stack.b), stack.output_width
    for segment in maps.segments:
        first_row, tokens = segment.first_rows[stack.group], slice(segment.start, segment.end)
        for s, (b, start) in enumerate(zip(stack.b, stack.slice_starts, strict=True)):
            rank = stack.host_ranks[s][segment.place] if first_row >= 0 else 0
            if rank:
                columns = first_column + s + num_slices * torch.arange(first_row, first_row + rank)
                h = product[tokens, columns.to(product.device)].double() * stack.host_scalings[s][segment.place]
                target = out[tokens, start : start + b.shape[1]]
                target.copy_(target.double() + h @ b[first_row : first_row + rank].double())
