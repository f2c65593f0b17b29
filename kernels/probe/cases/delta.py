"""Probe cases of the gated delta rule and Mamba-2: new and continued sequences, decode tokens, padding in one step."""

from __future__ import annotations

import torch

from kernels.gated_delta import ops
from kernels.mamba2 import ops as mamba2_ops
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


def mamba2_prefill(shapes: ProbeShapes, place: Place) -> Prepared:
    """As `prefill`."""
    states, inputs = _mamba2_inputs(shapes, place, sum(_LENGTHS))
    starts = [sum(_LENGTHS[:i]) for i in range(len(_LENGTHS) + 1)]
    where = (place.ints(starts), place.ints(_LINES), torch.tensor(_CONTINUES).to(place.device))
    real = torch.tensor([t for n, line in enumerate(_LINES) if line > 0 for t in range(starts[n], starts[n + 1])])

    def call() -> tuple[torch.Tensor, ...]:
        out = mamba2_ops.mamba2_prefill(*inputs, states, *where, query_starts=starts)
        return out[real.to(out.device)], states

    return call


def mamba2_decode(shapes: ProbeShapes, place: Place) -> Prepared:
    """One token for each of four sequences and one that is padding."""
    states, inputs = _mamba2_inputs(shapes, place, len(_LINES))
    lines = place.ints(_LINES)
    real = torch.tensor([n for n, line in enumerate(_LINES) if line > 0])

    def call() -> tuple[torch.Tensor, ...]:
        return mamba2_ops.mamba2_decode(*inputs, states, lines)[real.to(states.device)], states

    return call


def _mamba2_inputs(
    shapes: ProbeShapes, place: Place, num_tokens: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """As `_inputs`."""
    assert shapes.mamba2 is not None
    num_groups, num_heads, state_size, head_dim = shapes.mamba2
    states = _states(place, num_heads, state_size, head_dim)
    xbc = place.put(place.random(num_tokens, num_heads * head_dim + 2 * num_groups * state_size))
    dt = place.put(place.random(num_tokens, num_heads + _COLUMNS_BEHIND))[:, :num_heads]
    a_log, dt_bias, d = (place.random(num_heads).to(place.device) for _ in range(3))
    return states, (xbc, dt, a_log, dt_bias, d)


def _states(place: Place, *sizes: int) -> torch.Tensor:
    """[_NUM_LINES, *sizes], with values where a sequence continues."""
    states = place.fresh(_NUM_LINES, *sizes)
    for line, goes_on in zip(_LINES, _CONTINUES, strict=True):
        if goes_on and line > 0:
            states[line] = place.random(*sizes)
    return states.to(place.device)


def _inputs(
    shapes: ProbeShapes, place: Place, num_tokens: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The states, and what stands before them in a call; gates are columns of a wider product."""
    assert shapes.delta is not None
    num_key_heads, num_heads, key_dim, value_dim = shapes.delta
    states = _states(place, num_heads, key_dim, value_dim)
    columns = 2 * num_key_heads * key_dim + num_heads * value_dim
    qkv = place.put(place.random(num_tokens, columns))
    gates = place.put(place.random(num_tokens, 2 * num_heads + _COLUMNS_BEHIND))
    a_log, dt_bias = (place.random(num_heads).to(place.device) for _ in range(2))
    b, a = gates[:, :num_heads], gates[:, num_heads : 2 * num_heads]
    return states, (qkv, b, a, a_log, dt_bias)
