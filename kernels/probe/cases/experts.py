"""Probe cases of a sparse feed-forward layer: experts with no token, with one and with several, and a row of padding;
and of adapters of experts, of ranks 0 to 5."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kernels.expert_lora import ops as expert_lora_ops
from kernels.experts import ops
from kernels.linear.quantised import E2M1, Quantised
from kernels.probe.cases.lora import FEW, make_maps, make_stack
from kernels.probe.cases.tensors import Place, Prepared
from kernels.shapes import ProbeShapes

_NUM_TOKENS = 9
Biases = tuple[torch.Tensor, torch.Tensor] | None
# The truth is computed on the host, in float64: of many experts the first ones will do.
_MAX_EXPERTS = 12

# Of the adapters, and rows of each in gate and in up.
_NUM_ADAPTED, _ADAPTED_ROWS = 4, ((16, 4, 8, 20), (4, 0, 16, 8))


def experts(shapes: ProbeShapes, place: Place) -> Prepared:
    """Each token's experts, chosen by random logits."""
    num_experts, _, size = _sizes(shapes)
    gate_up = place.put(place.random(num_experts, 2 * size, shapes.hidden_size) / shapes.hidden_size**0.5)
    down = place.put(place.random(num_experts, shapes.hidden_size, size) / size**0.5)

    def pack(biases: Biases) -> ops.PackedExperts:
        return ops.pack_experts(gate_up, down, biases=biases, activation=shapes.activation)

    return _call(shapes, place, pack)


def experts_quantised(shapes: ProbeShapes, place: Place) -> Prepared:
    """The same in MXFP4, in blocks of 32 where those fit. All values are exact in every dtype."""
    num_experts, _, size = _sizes(shapes)

    def codes(out_features: int, in_features: int) -> list[Quantised]:
        group = 32 if in_features % 32 == 0 else in_features
        power = -round(math.log2(in_features) / 2) - 1
        scales = torch.full((out_features, in_features // group), 2.0**power).to(torch.float8_e8m0fnu)
        values = ((place.random(out_features, in_features // 2) * 64).abs().to(torch.uint8) for _ in range(num_experts))
        table = torch.tensor(E2M1)
        return [Quantised(one, scales, None, table, group, None).to(place.device) for one in values]

    gate_up, down = codes(2 * size, shapes.hidden_size), codes(shapes.hidden_size, size)
    dtype = torch.float32 if place.wide else place.dtype

    def pack(biases: Biases) -> ops.PackedExperts:
        return ops.pack_quantised(gate_up, down, dtype, biases=biases, activation=shapes.activation)

    return _call(shapes, place, pack)


def _sizes(shapes: ProbeShapes) -> tuple[int, int, int]:
    assert shapes.experts is not None
    num_experts, num_chosen, size = shapes.experts
    return max(min(num_experts, _MAX_EXPERTS), num_chosen), num_chosen, size


def _call(shapes: ProbeShapes, place: Place, pack: Callable[[Biases], ops.PackedExperts]) -> Prepared:
    """Tokens for the experts that `pack` makes."""
    num_experts, num_chosen, size = _sizes(shapes)
    x = place.random(_NUM_TOKENS, shapes.hidden_size)
    x[-1] = torch.nan
    x, logits = place.put(x), place.put(place.random(_NUM_TOKENS, num_experts))
    # Chosen on the host in float32, since rounding must not choose otherwise on the device.
    chosen, weights = ops.route(logits.float().cpu(), num_chosen, normalises=True)
    chosen, weights = chosen.to(place.device), place.put(weights)
    biases: Biases = None
    if shapes.has_expert_biases:
        biases = (
            place.put(place.random(num_experts, 2 * size)),
            place.put(place.random(num_experts, shapes.hidden_size)),
        )
    packed = pack(biases)
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
