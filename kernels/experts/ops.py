"""The experts of a sparse feed-forward layer: the public, checked ops.

route    probabilities = softmax(logits) or sigmoid(logits), the experts with the largest ones, for each token
experts  out[t] = sum over j of weights[t, j] * mlp(x[t], chosen[t, j])
         mlp(x, e) = down[e] @ act(gate[e] @ x, up[e] @ x), with a bias behind each product where experts have them, and
         the deltas of adapters

Tokens do not see each other: what a row of padding holds, NaN say, harms no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs, expert_lora
from kernels.linear.quantised import Quantised, dequantise
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.platform import in_use
from kernels.shapes import Activation
from kernels.swiglu.ops import swiglu


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """The weights of a layer's experts as their implementation holds them; opaque to everybody else.

    gate_up, down   in the implementation's own form
    dtype           of inputs and outputs
    size            width between the two products
    activation      of the gate, as in `kernels.swiglu.ops`
    biases          [num_experts, 2 * size] of gate_up and [num_experts, hidden_size] of down, in dtype; None: none
    nbytes          memory held
    holds_codes     the weights are quantised, and held so
    """

    gate_up: Any
    down: Any
    dtype: torch.dtype
    num_experts: int
    hidden_size: int
    size: int
    implementation: str
    nbytes: int
    activation: Activation = "silu"
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    holds_codes: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ExpertAdapters:
    """LoRA rows of a layer's experts, and whose tokens use them; see `kernels.expert_lora.ops`."""

    gate_up: LoraStack
    down: LoraStack
    maps: LoraMaps

    def add_gate_up(self, x: torch.Tensor, out: torch.Tensor, pairs: Pairs) -> None:
        """Add to the first product, out [pairs, 2 * size]."""
        expert_lora(x, out, self.gate_up, self.maps, pairs)

    def add_down(self, x: torch.Tensor, out: torch.Tensor, pairs: Pairs) -> None:
        """Add to the second product, out [pairs, hidden_size]."""
        expert_lora(x, out, self.down, self.maps, pairs)


def pack_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: Activation = "silu",
) -> PackedExperts:
    """Pack gate_up [num_experts, 2 * size, hidden_size], gate before up, and down [num_experts, hidden_size,
    size], both contiguous, of one dtype. Takes them over: what the device multiplies as it is, is not copied.

    biases, activation  as in `PackedExperts`
    """
    num_experts, double_size, hidden_size = gate_up.shape
    assert down.shape == (num_experts, hidden_size, double_size // 2) and double_size % 2 == 0, "the weights do not fit"
    assert gate_up.dtype == down.dtype, "the weights are of one dtype"
    assert gate_up.is_contiguous() and down.is_contiguous(), "the weights are contiguous"
    packed: PackedExperts = _module(in_use(gate_up.device).implementations["experts"]).pack_experts(gate_up, down)
    return _completed(packed, biases, activation)


def pack_quantised(
    gate_up: Sequence[Quantised],
    down: Sequence[Quantised],
    dtype: torch.dtype,
    *,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: Activation = "silu",
) -> PackedExperts:
    """Pack the quantised weights of each expert, [2 * size, hidden_size] and [hidden_size, size], for inputs and
    outputs of `dtype`; where the device has no kernel for their codes, dequantised. Keeps the weights' tensors, or
    copies.

    biases, activation  as in `PackedExperts`
    """
    module = _module(in_use(down[0].codes.device).implementations["experts"])
    packed: PackedExperts | None = None
    if hasattr(module, "pack_quantised"):
        packed = module.pack_quantised(gate_up, down, dtype)
    if packed is None:
        values = (torch.stack([dequantise(weight, dtype) for weight in weights]) for weights in (gate_up, down))
        return pack_experts(*values, biases=biases, activation=activation)
    return _completed(packed, biases, activation)


def _completed(
    packed: PackedExperts, biases: tuple[torch.Tensor, torch.Tensor] | None, activation: Activation
) -> PackedExperts:
    """With what all implementations hold alike."""
    if biases is None:
        return replace(packed, activation=activation)
    shapes = [(packed.num_experts, size) for size in (2 * packed.size, packed.hidden_size)]
    assert [bias.shape for bias in biases] == shapes, "the biases do not fit"
    nbytes = packed.nbytes + sum(bias.nbytes for bias in biases)
    return replace(packed, activation=activation, biases=biases, nbytes=nbytes)


def route(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    normalises: bool,
    correction: torch.Tensor | None = None,
    scale: float = 1.0,
    expert_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen int64 [tokens, num_chosen], weights of the logits' dtype, same shape) of logits [tokens, num_experts].

    normalises  divide the weights by their sum
    correction  float32 [num_experts], added to the probabilities for the choice alone; they are sigmoids then
    scale       factor of the weights
    expert_scales
                float32 [num_experts], factors of the weights of each expert

    In float32 inside, like transformers' routers; the same plain torch on every device.
    """
    if correction is None:
        weights, chosen = torch.softmax(logits, dim=1, dtype=torch.float32).topk(num_chosen, dim=1)
    else:
        probabilities = torch.sigmoid(logits.float())
        chosen = (probabilities + correction).topk(num_chosen, dim=1).indices
        weights = probabilities.gather(1, chosen)
    if normalises:
        weights = weights / weights.sum(dim=1, keepdim=True)
    if expert_scales is not None:
        weights = weights * expert_scales[chosen]
    return chosen, (weights * scale if scale != 1.0 else weights).to(logits.dtype)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, fresh and contiguous [tokens, hidden_size].

    x        [tokens, hidden_size] of the packed weights' dtype, contiguous; read only, like all others
    chosen   int64 [tokens, num_chosen], experts from 0; no token has one twice
    weights  [tokens, num_chosen], dtype of x
    adapters  None: no token of the step uses an adapter of experts
    """
    assert x.dim() == 2 and x.shape[1] == packed.hidden_size, "x is [tokens, hidden_size]"
    assert x.dtype == weights.dtype == packed.dtype, f"x is {x.dtype}, its weights {weights.dtype}, not {packed.dtype}"
    assert chosen.shape == weights.shape and chosen.shape[0] == x.shape[0], (
        "chosen and weights are [tokens, num_chosen]"
    )
    assert chosen.dtype == torch.int64, "chosen is int64"
    out: torch.Tensor = _module(packed.implementation).experts(x, chosen, weights, packed, adapters)
    return out


def warm_up(packed: PackedExperts, num_chosen: int) -> int:
    """Compile all that products of these weights can need in steps of any size, num_chosen experts for each token.
    Returns the number of variants that were compiled."""
    contract: Contract = _module(packed.implementation).CONTRACT
    return contract.warm_up_and_count(packed, num_chosen)


def _module(implementation: str) -> ModuleType:
    return importlib.import_module(f"kernels.experts.{implementation}")


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
