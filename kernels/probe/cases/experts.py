"""Probe cases of a sparse feed-forward layer: experts with no token, with one and with several, and a row of padding;
and of adapters of experts, of ranks 0 to 5."""

from __future__ import annotations

import torch

from kernels.expert_lora import ops as expert_lora_ops
from kernels.experts import ops
from kernels.probe.cases.lora import FEW, make_maps, make_stack
from kernels.probe.cases.tensors import Place, Prepared
from kernels.shapes import ProbeShapes

_NUM_TOKENS = 9
# The truth is computed on the host, in float64: of many experts the first ones will do.
_MAX_EXPERTS = 12

# Of the adapters, and rows of each in gate and in up.
_NUM_ADAPTED, _ADAPTED_ROWS = 4, ((16, 4, 8, 20), (4, 0, 16, 8))


def experts(shapes: ProbeShapes, place: Place) -> Prepared:
    """Each token's experts, chosen by random logits."""
    assert shapes.experts is not None
    num_experts, num_chosen, size = shapes.experts
    num_experts = max(min(num_experts, _MAX_EXPERTS), num_chosen)
    gate_up = place.put(place.random(num_experts, 2 * size, shapes.hidden_size) / shapes.hidden_size**0.5)
    down = place.put(place.random(num_experts, shapes.hidden_size, size) / size**0.5)
    x = place.random(_NUM_TOKENS, shapes.hidden_size)
    x[-1] = torch.nan
    x, logits = place.put(x), place.put(place.random(_NUM_TOKENS, num_experts))
    # Chosen on the host in float32, since rounding must not choose otherwise on the device.
    chosen, weights = ops.route(logits.float().cpu(), num_chosen, normalises=True)
    chosen, weights = chosen.to(place.device), place.put(weights)
    biases = None
    if shapes.has_expert_biases:
        biases = (
            place.put(place.random(num_experts, 2 * size)),
            place.put(place.random(num_experts, shapes.hidden_size)),
        )
    packed = ops.pack_experts(gate_up, down, biases=biases, activation=shapes.activation)
    return lambda: (ops.experts(x, chosen, weights, packed)[: _NUM_TOKENS - 1],)


def lora(shapes: ProbeShapes, place: Place) -> Prepared:
    """Gate and up of four experts; each token, base tokens among them, is in two pairs."""
    assert shapes.experts is not None
    size = shapes.experts[2]
    stack, maps = make_stack(shapes, place, (size, size), shapes.hidden_size, _ADAPTED_ROWS), make_maps(place, FEW)
    met = sorted(((token * step + 1) % _NUM_ADAPTED, token) for token in range(maps.num_tokens) for step in (1, 3))
    experts_of, tokens = (place.ints([*column], torch.int64) for column in zip(*met, strict=True))
    pairs = expert_lora_ops.Pairs(experts_of, tokens, _NUM_ADAPTED)
    x = place.random(len(met), shapes.hidden_size)
    x[torch.tensor([token >= sum(FEW) for _, token in met])] = torch.nan
    x, out = place.put(x), place.put(place.random(len(met), 2 * size))

    def call() -> tuple[torch.Tensor, ...]:
        expert_lora_ops.expert_lora(x, out, stack, maps, pairs)
        return (out,)

    return call
