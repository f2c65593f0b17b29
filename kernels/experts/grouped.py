"""`kernels.experts.ops` with torch's grouped matrix products: two launches for all experts, whatever tokens choose.

How many tokens each expert has is computed and read on the device, so a captured call does what a new one would.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.batch_invariant.mode import replacing
from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.experts.ops import ExpertAdapters, PackedExperts, by_expert, mlps, summed
from kernels.platform import in_use
from kernels.shapes import ProbeShapes
from kernels.triton_launch import HOPPER

# Rows of what the products read start at multiples of this.
_ALIGNED_BYTES = 16


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
    """Keep the weights as they are."""
    num_experts, hidden_size, size = down.shape
    nbytes = gate_up.nbytes + down.nbytes
    return PackedExperts(gate_up, down, down.dtype, num_experts, hidden_size, size, "grouped", nbytes)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """See `ops.experts`."""
    in_order, order = by_expert(chosen)
    ends = ends_of(in_order, packed.num_experts)
    pairs = Pairs(in_order, order // chosen.shape[1], packed.num_experts)

    def multiply(rows: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        if in_use(rows.device).batch_invariant:
            return replacing(rows.device).product(rows, held, ends=ends)
        return functional.grouped_mm(rows, held.transpose(1, 2), offs=ends)

    out = mlps(x, pairs, packed, adapters, multiply)
    return summed(out, order, weights)


def ends_of(in_order: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 [num_experts]: how many of the pairs' experts, ascending, are up to each one."""
    each = torch.arange(num_experts, device=in_order.device)
    return torch.searchsorted(in_order, each, right=True).to(torch.int32)


def refuses(shapes: ProbeShapes) -> str | None:
    """See `Contract`. Where torch has no kernel of its own for it, it would wait for the device to learn the numbers of
    tokens."""
    if shapes.experts is None:
        return None
    if shapes.torch_dtype != torch.bfloat16:
        return f"torch multiplies groups in bfloat16 only, not in {shapes.dtype}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < HOPPER:
        return "torch multiplies groups on GPUs of compute capability 9.0 and above"
    if any(size * shapes.torch_dtype.itemsize % _ALIGNED_BYTES for size in (shapes.hidden_size, shapes.experts[2])):
        return f"rows of {shapes.hidden_size} and {shapes.experts[2]} numbers are not aligned to {_ALIGNED_BYTES} bytes"
    return None


def warm_up(packed: PackedExperts, _num_chosen: int) -> None:
    """See `ops.warm_up`: nothing, but where steps must not matter."""
    for held in (packed.gate_up, packed.down):
        if in_use(held.device).batch_invariant:
            replacing(held.device).warm_up_groups(held)


CONTRACT = Contract(refuses=refuses, warm_up=warm_up, replayable=True)
