"""Probe cases of the ops that work on each token by itself: projection, norms, rotation and cache write, gate.

What they read stands in rows with further columns behind, and a row of padding follows: nobody has written either.
"""

from __future__ import annotations

import torch

from kernels.linear import ops as linear_ops
from kernels.linear.quantised import Quantised
from kernels.paged_attention.cache_layout import made
from kernels.platform import in_use
from kernels.probe.cases.tensors import Place, Prepared
from kernels.rms_norm import ops as rms_norm_ops
from kernels.rotary_kv import ops as rotary_kv_ops
from kernels.shapes import ProbeShapes
from kernels.swiglu import ops as swiglu_ops

_NUM_TOKENS = 5
_MAX_COLUMNS = 1024
_NUM_COLUMNS_BEHIND = 16
_NUM_BLOCKS = 10


def linear(shapes: ProbeShapes, place: Place) -> Prepared:
    """x @ weight.T + bias; of a wide layer its first columns, since the truth is computed on the host."""
    out_features = min(shapes.intermediate_size, _MAX_COLUMNS)
    weight = place.random(out_features, shapes.hidden_size) / shapes.hidden_size**0.5
    packed = linear_ops.pack_weight(place.put(weight), place.put(place.random(out_features)))
    x = place.put(place.random(_NUM_TOKENS, shapes.hidden_size))
    return lambda: (linear_ops.linear(x, packed),)


def linear_quantised(shapes: ProbeShapes, place: Place) -> Prepared:
    """Codes of eight bits with a scale for each row, of four with zeros, in groups where those fit, and of a checkpoint
    for rounded inputs, which rounding leaves as they are. All values are exact in every dtype."""
    out_features, in_features = min(shapes.intermediate_size, _MAX_COLUMNS), shapes.hidden_size
    bias = place.put(place.random(out_features))
    codes = place.random(out_features, in_features).to(torch.float8_e4m3fn)
    bytes_ = (place.random(out_features, in_features // 2) * 64).abs().to(torch.uint8)
    group = 32 if in_features % 32 == 0 else in_features
    scales = torch.full((out_features, in_features // group), 2.0**-8)
    scales[1::2] /= 4
    row_scales = torch.full((out_features, 1), 2.0**-5)
    rounded = (place.random(out_features, in_features) * 40).clamp(-127, 127).to(torch.int8)
    weights = (
        Quantised(codes, row_scales, None, None, in_features, None),
        Quantised(bytes_, scales, -8 * scales, None, group, None),
        Quantised(rounded, row_scales / 32, None, None, in_features, None, rounds_inputs=True),
    )
    dtype = torch.float32 if place.wide else place.dtype
    packed = [linear_ops.pack_quantised(weight.to(place.device), bias, dtype) for weight in weights]
    x = (place.random(_NUM_TOKENS, in_features) * 40).clamp(-127, 127).round()
    x[:, 0] = 127
    x = place.put(x / 32)
    return lambda: tuple(linear_ops.linear(x, weight) for weight in packed)


def rms_norm(shapes: ProbeShapes, place: Place) -> Prepared:
    """Rows that differ in size by orders of magnitude."""
    x = place.put(_packed(place.random(_NUM_TOKENS, shapes.hidden_size) * _sizes(), place))[:, : shapes.hidden_size]
    weight = _norm_weight(shapes, place, shapes.hidden_size)
    return lambda: (rms_norm_ops.rms_norm(x, weight, shapes.norm_eps)[:_NUM_TOKENS],)


def add_rms_norm(shapes: ProbeShapes, place: Place) -> Prepared:
    """With the sum, which is the next layer's residual."""
    x = place.put(_packed(place.random(_NUM_TOKENS, shapes.hidden_size), place))[:, : shapes.hidden_size]
    residual = place.put(place.random(x.shape[0], shapes.hidden_size))
    weight = _norm_weight(shapes, place, shapes.hidden_size)

    def call() -> tuple[torch.Tensor, ...]:
        normed, total = rms_norm_ops.add_rms_norm(x, residual.clone(), weight, shapes.norm_eps)
        return normed[:_NUM_TOKENS], total[:_NUM_TOKENS]

    return call


def rotary_kv(shapes: ProbeShapes, place: Place) -> Prepared:
    """Queries and keys as they come out of the projection."""
    return _rotary_kv(shapes, place, None)


def rotary_kv_normed(shapes: ProbeShapes, place: Place) -> Prepared:
    """With a norm of each query and key head."""
    query, key = _norm_weight(shapes, place, 2, shapes.head_dim)
    weight = torch.cat((query.expand(shapes.num_heads, -1), key.expand(shapes.num_kv_heads, -1)))
    return _rotary_kv(shapes, place, weight)


def _rotary_kv(shapes: ProbeShapes, place: Place, head_weight: torch.Tensor | None) -> Prepared:
    """Positions near and far, slots in and out of order, over the end of a block; all others stay as they are.

    Into both layouts that an NPU's caches may have: which one they get, the cases of attention decide.
    """
    block_size = shapes.block_size
    num_all_heads = shapes.num_heads * (2 if shapes.has_output_gate else 1) + 2 * shapes.num_kv_heads
    cache_shape = (_NUM_BLOCKS, block_size, shapes.num_kv_heads, shapes.head_dim)
    on_npu = in_use(place.device).device == "npu"

    def fresh(shape: tuple[int, ...]) -> torch.Tensor:
        return place.put(place.fresh(*shape))

    caches = [[made(fresh, cache_shape, heads_first=first) for _ in range(2)] for first in (False, on_npu)]
    inside = min(3, block_size - 1)
    slots = [2 * block_size - 1, 2 * block_size, 7 * block_size + inside, 5 * block_size, 5 * block_size + 1]
    slot_mapping = place.ints([*slots, -1], torch.int64)
    half = (shapes.rotary_dim or shapes.head_dim) // 2
    positions = torch.tensor([0.0, 1.0, 17.0, 500.0, 3.0, 0.0])
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.cat((angles, angles), dim=1).unsqueeze(1)
    cos, sin = place.put(angles.cos()), place.put(angles.sin())
    width = num_all_heads * shapes.head_dim
    packed = place.put(_packed(place.random(_NUM_TOKENS, width), place))
    qkv = packed[:, :width].unflatten(1, (num_all_heads, shapes.head_dim))

    def call() -> tuple[torch.Tensor, ...]:
        outputs = []
        for k_cache, v_cache in caches:
            q = rotary_kv_ops.rotary_kv(
                *(qkv, cos, sin, k_cache, v_cache, slot_mapping),
                head_weight=head_weight,
                eps=shapes.norm_eps,
                has_gates=shapes.has_output_gate,
            )
            outputs += [q[:_NUM_TOKENS], k_cache, v_cache]
        return tuple(outputs)

    return call


def swiglu(shapes: ProbeShapes, place: Place) -> Prepared:
    """Gates of both signs, some of them far out."""
    gate_up = place.random(_NUM_TOKENS, 2 * shapes.intermediate_size)
    gate_up[:, 0], gate_up[:, 1] = 30.0, -30.0
    gate_up = place.put(_packed(gate_up, place))[:, : 2 * shapes.intermediate_size]
    return lambda: (swiglu_ops.swiglu(gate_up, shapes.activation)[:_NUM_TOKENS],)


def _norm_weight(shapes: ProbeShapes, place: Place, *size: int) -> torch.Tensor:
    weight = place.put(place.random(*size))
    return weight.float() if shapes.exact_norms and weight.dtype.itemsize < 4 else weight


def _packed(values: torch.Tensor, place: Place) -> torch.Tensor:
    """values [tokens, size] -> [tokens + 1, size + columns behind], on the host."""
    num_tokens, size = values.shape
    packed = place.fresh(num_tokens + 1, size + _NUM_COLUMNS_BEHIND)
    packed[:num_tokens, :size] = values
    return packed


def _sizes() -> torch.Tensor:
    return torch.tensor([1.0, 1e-2, 3.0, 30.0, 0.3]).unsqueeze(1)
