"""Pairs of a token and one of its experts: in the order of the experts for the products, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.expert_lora.ops import Pairs
from kernels.experts.ops import ExpertAdapters, PackedExperts
from kernels.platform import in_use
from kernels.swiglu.ops import swiglu

# (rows [pairs, in], the weights of all experts as they are packed) -> [pairs, out], each row by its expert's weights.
Product = Callable[[torch.Tensor, Any], torch.Tensor]


def by_expert(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts [pairs], ascending; order [pairs], the pair at each place, of those of chosen row by row)."""
    in_order, order = chosen.flatten().sort(stable=True)
    return in_order, order


def mlps(
    x: torch.Tensor, pairs: Pairs, packed: PackedExperts, adapters: ExpertAdapters | None, multiply: Product
) -> torch.Tensor:
    """The answer of each pair's expert to its token's row of x, [pairs, hidden_size], with biases and deltas."""
    rows = x.index_select(0, pairs.tokens)
    gate_up = multiply(rows, packed.gate_up)
    if packed.biases is not None:
        gate_up.add_(packed.biases[0].index_select(0, pairs.experts))
    if adapters is not None:
        adapters.add_gate_up(rows, gate_up, pairs)
    gated = swiglu(gate_up, packed.activation)
    out = multiply(gated, packed.down)
    if packed.biases is not None:
        out.add_(packed.biases[1].index_select(0, pairs.experts))
    if adapters is not None:
        adapters.add_down(gated, out, pairs)
    return out


def summed(out: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum over each token's experts, always in one order; out [pairs, hidden_size] in the order of the
    experts, weights [tokens, num_chosen]."""
    by_token = torch.empty_like(out).index_copy_(0, order, out).unflatten(0, weights.shape)
    if in_use(out.device).batch_invariant:
        total = torch.zeros(by_token.shape[0], by_token.shape[2], device=out.device)
        for weight, product in zip(weights.float().unbind(1), by_token.unbind(1), strict=True):
            total += product * weight.unsqueeze(1)
        return total.to(out.dtype)
    return (weights.unsqueeze(1) @ by_token).squeeze(1)
