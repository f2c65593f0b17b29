"""`kernels.experts.ops` on any device: one pair of products for each expert that a token of the step has chosen, by the
device's own base projection. Waits for the device to learn which these are."""

from __future__ import annotations

import torch

from kernels.contract import Contract
from kernels.experts.ops import PackedExperts
from kernels.experts.pairs import by_expert, summed
from kernels.linear.ops import linear, pack_weight
from kernels.swiglu.ops import swiglu

CONTRACT = Contract()


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
    """Each expert's weights as `kernels.linear` holds them."""
    num_experts, hidden_size, size = down.shape
    of_gate_up, of_down = (tuple(pack_weight(weight) for weight in weights) for weights in (gate_up, down))
    nbytes = sum(weight.nbytes for weight in (*of_gate_up, *of_down))
    return PackedExperts(of_gate_up, of_down, down.dtype, num_experts, hidden_size, size, "any_device", nbytes)


def experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, packed: PackedExperts) -> torch.Tensor:
    """See `ops.experts`."""
    in_order, order, rows = by_expert(x, chosen)
    counts = torch.bincount(in_order, minlength=packed.num_experts).tolist()
    out = torch.empty_like(rows)
    start = 0
    for gate_up, down, num in zip(packed.gate_up, packed.down, counts, strict=True):
        if num:
            here = slice(start, start + num)
            out[here] = linear(swiglu(linear(rows[here], gate_up)), down)
            start += num
    return summed(out, order, weights)
