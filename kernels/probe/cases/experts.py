"""Probe case of a sparse feed-forward layer: experts with no token, with one and with several, and a row of padding."""

from __future__ import annotations

import torch

from kernels.experts import ops
from kernels.probe.cases.tensors import Place, Prepared
from kernels.shapes import ProbeShapes

_NUM_TOKENS = 9
# The truth is computed on the host, in float64: of many experts the first ones will do.
_MAX_EXPERTS = 12


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
