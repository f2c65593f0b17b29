"""`kernels.experts.ops` pair by pair, in float64."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.contract import Contract
from kernels.experts.ops import PackedExperts

CONTRACT = Contract()


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
    """Keep the weights as they are."""
    num_experts, hidden_size, size = down.shape
    nbytes = gate_up.nbytes + down.nbytes
    return PackedExperts(gate_up, down, down.dtype, num_experts, hidden_size, size, "reference", nbytes)


def experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, packed: PackedExperts) -> torch.Tensor:
    """See `ops.experts`."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (experts_of, weights_of) in enumerate(zip(chosen.tolist(), weights.double(), strict=True)):
        for expert, weight in zip(experts_of, weights_of, strict=True):
            gate, up = (packed.gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (packed.down[expert].double() @ (functional.silu(gate) * up))
    return out.to(x.dtype)
