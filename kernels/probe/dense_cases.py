"""Probe cases of the ops that work on each token by itself: projection, norms, rotation, gate."""

from __future__ import annotations

import torch

from kernels.linear import ops as linear_ops
from kernels.probe.place import Place
from kernels.probe.prepared import Prepared
from kernels.probe.shapes import ProbeShapes
from kernels.rms_norm import ops as rms_norm_ops
from kernels.rotary import ops as rotary_ops
from kernels.swiglu import ops as swiglu_ops

_NUM_TOKENS = 5
_MAX_COLUMNS = 1024


def linear(shapes: ProbeShapes, place: Place) -> Prepared:
    """x @ weight.T + bias; of a wide layer its first columns, since the truth is computed on the host."""
    out_features = min(shapes.intermediate_size, _MAX_COLUMNS)
    weight = place.random(out_features, shapes.hidden_size) / shapes.hidden_size**0.5
    packed = linear_ops.pack_weight(place.put(weight), place.put(place.random(out_features)))
    x = place.put(place.random(_NUM_TOKENS, shapes.hidden_size))
    return lambda: (linear_ops.linear(x, packed),)


def rms_norm(shapes: ProbeShapes, place: Place) -> Prepared:
    """Of rows that differ in size by orders of magnitude."""
    x = place.put(place.random(_NUM_TOKENS, shapes.hidden_size) * _sizes())
    weight = place.put(place.random(shapes.hidden_size))
    return lambda: (rms_norm_ops.rms_norm(x, weight, shapes.norm_eps),)


def add_rms_norm(shapes: ProbeShapes, place: Place) -> Prepared:
    """With the sum, which is the next layer's residual."""
    x, residual = (place.put(place.random(_NUM_TOKENS, shapes.hidden_size)) for _ in range(2))
    weight = place.put(place.random(shapes.hidden_size))
    return lambda: rms_norm_ops.add_rms_norm(x, residual.clone(), weight, shapes.norm_eps)


def rms_norm_heads(shapes: ProbeShapes, place: Place) -> Prepared:
    """Query and key heads of a packed projection, whose values stand beside them."""
    num_heads = shapes.num_heads + shapes.num_kv_heads
    packed = place.put(place.random(_NUM_TOKENS, num_heads + shapes.num_kv_heads, shapes.head_dim))
    weight = place.put(place.random(num_heads, shapes.head_dim))
    return lambda: (rms_norm_ops.rms_norm_heads(packed[:, :num_heads], weight, shapes.norm_eps),)


def rotary(shapes: ProbeShapes, place: Place) -> Prepared:
    """Positions near and far, in no order."""
    half, num_heads = shapes.head_dim // 2, shapes.num_heads + shapes.num_kv_heads
    positions = torch.tensor([0.0, 1.0, 17.0, 500.0, 3.0])
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.cat((angles, angles), dim=1).unsqueeze(1)
    cos, sin = place.put(angles.cos()), place.put(angles.sin())
    packed = place.put(place.random(len(positions), num_heads + shapes.num_kv_heads, shapes.head_dim))
    return lambda: rotary_ops.rotary(packed[:, :num_heads], cos, sin, shapes.num_heads)


def swiglu(shapes: ProbeShapes, place: Place) -> Prepared:
    """Gates of both signs, some of them far out."""
    gate_up = place.random(_NUM_TOKENS, 2 * shapes.intermediate_size)
    gate_up[:, 0], gate_up[:, 1] = 30.0, -30.0
    gate_up = place.put(gate_up)
    return lambda: (swiglu_ops.swiglu(gate_up),)


def _sizes() -> torch.Tensor:
    return torch.tensor([1.0, 1e-2, 3.0, 30.0, 0.3]).unsqueeze(1)
