"""`kernels.experts.ops` pair by pair, in float64."""

from __future__ import annotations

import torch

from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.expert_lora.reference import expert_lora
from kernels.experts.ops import ExpertAdapters, PackedExperts
from kernels.swiglu.reference import swiglu

CONTRACT = Contract()


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
    """Keep the weights as they are."""
    num_experts, hidden_size, size = down.shape
    nbytes = gate_up.nbytes + down.nbytes
    return PackedExperts(gate_up, down, down.dtype, num_experts, hidden_size, size, "reference", nbytes)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """See `ops.experts`."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (experts_of, weights_of) in enumerate(zip(chosen.tolist(), weights.double(), strict=True)):
        for expert, weight in zip(experts_of, weights_of, strict=True):
            pairs = Pairs(torch.tensor([expert]), torch.tensor([token]), packed.num_experts)
            of_token = x[token : token + 1].double()
            gate_up = of_token @ packed.gate_up[expert].double().t()
            if packed.biases is not None:
                gate_up += packed.biases[0][expert].double()
            if adapters is not None:
                expert_lora(of_token, gate_up, adapters.gate_up, adapters.maps, pairs)
            gated = swiglu(gate_up, packed.activation)
            product = gated @ packed.down[expert].double().t()
            if packed.biases is not None:
                product += packed.biases[1][expert].double()
            if adapters is not None:
                expert_lora(gated, product, adapters.down, adapters.maps, pairs)
            out[token] += weight * product[0]
    return out.to(x.dtype)
