"""`kernels.experts.ops` on any device: one pair of products for each expert that a token of the step has chosen, by the
device's own base projection. Waits for the device to learn which these are. Codes are dequantised in each step, of the
experts that it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.experts.ops import ExpertAdapters, PackedExperts, by_expert, mlps, summed
from kernels.linear.ops import PackedWeight, linear, pack_weight
from kernels.linear.quantised import Quantised, dequantise

CONTRACT = Contract()


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
    """Each expert's weights as `kernels.linear` holds them."""
    num_experts, hidden_size, size = down.shape
    of_gate_up, of_down = (tuple(pack_weight(weight) for weight in weights) for weights in (gate_up, down))
    nbytes = sum(weight.nbytes for weight in (*of_gate_up, *of_down))
    return PackedExperts(of_gate_up, of_down, down.dtype, num_experts, hidden_size, size, "any_device", nbytes)


def pack_quantised(gate_up: Sequence[Quantised], down: Sequence[Quantised], dtype: torch.dtype) -> PackedExperts:
    """Keep the codes as they are."""
    hidden_size, size = down[0].out_features, down[0].in_features
    nbytes = sum(weight.nbytes for weight in (*gate_up, *down))
    return PackedExperts(gate_up, down, dtype, len(down), hidden_size, size, "any_device", nbytes, holds_codes=True)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """See `ops.experts`."""
    in_order, order = by_expert(chosen)
    counts = torch.bincount(in_order, minlength=packed.num_experts).tolist()
    pairs = Pairs(in_order, order // chosen.shape[1], packed.num_experts)
    out = mlps(x, pairs, packed, adapters, lambda rows, weights: _multiply(rows, weights, counts))
    return summed(out, order, weights)


def _multiply(rows: torch.Tensor, weights: Sequence[PackedWeight | Quantised], counts: Sequence[int]) -> torch.Tensor:
    """The rows of each expert, which follow one another, by its weight."""
    out = rows.new_empty(len(rows), weights[0].out_features)
    start = 0
    for weight, num in zip(weights, counts, strict=True):
        if num:
            if isinstance(weight, Quantised):
                weight = pack_weight(dequantise(weight, rows.dtype))
            out[start : start + num] = linear(rows[start : start + num], weight)
            start += num
    return out
