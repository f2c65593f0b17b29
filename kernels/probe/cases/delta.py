"""Probe cases of the gated delta rule: new and continued sequences, decode tokens and padding in one step."""

from __future__ import annotations

import torch

from kernels.gated_delta import ops
from kernels.probe.cases.tensors import Place, Prepared
from kernels.shapes import ProbeShapes

# Per sequence: tokens, state line (-1 is padding), whether it has a state. Lines 0 and 4 are nobody's.
_LENGTHS, _LINES, _CONTINUES = (5, 1, 70, 2, 1), (3, 1, 5, -1, 2), (False, True, True, True, True)
_NUM_LINES = 6
_COLUMNS_BEHIND = 16


def prefill(shapes: ProbeShapes, place: Place) -> Prepared:
    """Chunks of prompts beside single tokens."""
    states, inputs = _inputs(shapes, place, sum(_LENGTHS))
    starts = [sum(_LENGTHS[:i]) for i in range(len(_LENGTHS) + 1)]
    query_start_loc, lines = place.ints(starts), place.ints(_LINES)
    continued = torch.tensor(_CONTINUES).to(place.device)
    real = torch.tensor([t for n, line in enumerate(_LINES) if line > 0 for t in range(starts[n], starts[n + 1])])

    def call() -> tuple[torch.Tensor, ...]:
        out = ops.gated_delta_prefill(*inputs, states, query_start_loc, lines, continued, query_starts=starts)
        return out[real.to(out.device)], states

    return call


def decode(shapes: ProbeShapes, place: Place) -> Prepared:
    """One token for each of four sequences and one that is padding, with convolution and norm."""
    states, (qkv, *gates) = _inputs(shapes, place, len(_LINES))
    num_heads, value_dim = states.shape[1], states.shape[3]
    width = max(shapes.conv_width, 2)
    conv_states = place.fresh(_NUM_LINES, width - 1, qkv.shape[1])
    for line in _LINES:
        if line > 0:
            conv_states[line] = place.random(*conv_states.shape[1:])
    conv_states = place.put(conv_states)
    z = place.put(place.random(len(_LINES), num_heads * value_dim))
    taps = place.put(place.random(width, qkv.shape[1]) / width)
    norm_weight = place.random(value_dim).to(place.device)
    b, a, a_log, dt_bias = gates
    lines = place.ints(_LINES)
    real = torch.tensor([n for n, line in enumerate(_LINES) if line > 0])

    def call() -> tuple[torch.Tensor, ...]:
        args = (qkv, z, b, a, taps, conv_states, a_log, dt_bias, norm_weight, states, lines)
        return ops.gated_delta_decode(*args, eps=shapes.norm_eps)[real.to(states.device)], conv_states, states

    return call


def _inputs(
    shapes: ProbeShapes, place: Place, num_tokens: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The states, and what stands before them in a call; gates are columns of a wider product."""
    assert shapes.delta is not None
    num_key_heads, num_heads, key_dim, value_dim = shapes.delta
    states = place.fresh(_NUM_LINES, num_heads, key_dim, value_dim)
    for line, goes_on in zip(_LINES, _CONTINUES, strict=True):
        if goes_on and line > 0:
            states[line] = place.random(*states.shape[1:])
    columns = 2 * num_key_heads * key_dim + num_heads * value_dim
    qkv = place.put(place.random(num_tokens, columns))
    gates = place.put(place.random(num_tokens, 2 * num_heads + _COLUMNS_BEHIND))
    a_log, dt_bias = (place.random(num_heads).to(place.device) for _ in range(2))
    b, a = gates[:, :num_heads], gates[:, num_heads : 2 * num_heads]
    return states.to(place.device), (qkv, b, a, a_log, dt_bias)
