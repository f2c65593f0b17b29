"""`kernels.experts.ops` pair by pair, in float64."""

from __future__ import annotations

import torch

from kernels.contract import Contract
from kernels.experts.ops import PackedExperts
from kernels.swiglu.reference import swiglu

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
            gate_up = packed.gate_up[expert].double() @ x[token].double()
            if packed.biases is not None:
                gate_up += packed.biases[0][expert].double()
            product = packed.down[expert].double() @ swiglu(gate_up[None], packed.activation)[0]
            if packed.biases is not None:
                product += packed.biases[1][expert].double()
            out[token] += weight * product
    return out.to(x.dtype)
