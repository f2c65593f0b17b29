"""Gated delta rule with a state per sequence (Yang et al., "Gated Delta Networks", 2025): the public, checked ops.

What a short convolution has left of queries, keys and values comes in, and what the delta rule reads out of the state
goes out. Value head h reads and writes by key head h // (num_value_heads / num_key_heads). For each token t of a
sequence, in float32, with S [key_dim, value_dim] the state of a value head:

    q = normed(q[t]) / sqrt(key_dim),  k = normed(k[t]),  normed(x) = x / sqrt(sum(x ** 2) + 1e-6)
    beta  = sigmoid(b[t]),  decay = exp(-exp(a_log) * softplus(a[t] + dt_bias))
    S     = decay * S
    S    += outer(k, beta * (v[t] - S.T @ k))
    out[t] = S.T @ q

Line 0 of the states is the null line: such a sequence is padding, as with any index below 1; it reads and writes no
state, and its outputs are anything. With `source_state_indices` a sequence reads its old state from one line and
writes the new one to another, as one does that continues a kept state (copy-on-write). All metadata stays on the
device; nothing here synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels.platform import contract, implementation


def gated_delta_prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    *,
    source_state_indices: torch.Tensor | None = None,
    query_starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Advance sequences by whole prompts, chunks of them, or single tokens.

    Args:
        qkv: [tokens, 2 * num_key_heads * key_dim + num_value_heads * value_dim]: queries, keys, values; float32,
            bfloat16 or float16, contiguous.
        b, a: [tokens, num_value_heads], dtype of qkv, unit stride along the heads, any stride between tokens.
        a_log, dt_bias: float32 [num_value_heads], contiguous.
        states: float32 [lines, num_value_heads, key_dim, value_dim], contiguous; changed in place.
        query_start_loc: int32 [sequences + 1], ascending from 0. Empty sequences read and write nothing.
        state_indices: int32 [sequences], the lines, each at most once beside padding.
        has_initial_state: bool [sequences]; where False, the sequence starts with zeros, whatever its line holds.
        source_state_indices: int32 [sequences], the lines that initial states are read from, unchanged; lines wherever
            state_indices has one. Sequences may share a source that no other sequence of the call writes. None:
            state_indices.
        query_starts: query_start_loc as host integers, for implementations that run on the host.

    Returns: [tokens, num_value_heads, value_dim], dtype of qkv, fresh and contiguous. Tokens of no sequence come out as
    anything.
    """
    _check(qkv, b, a, a_log, dt_bias, states)
    assert qkv.is_contiguous(), "qkv is contiguous"
    num_sequences = state_indices.shape[0]
    assert query_start_loc.shape == (num_sequences + 1,), "query_start_loc is int32 [sequences + 1]"
    assert has_initial_state.shape == (num_sequences,), "has_initial_state is bool [sequences]"
    out: torch.Tensor = implementation("gated_delta", qkv.device, "prefill").prefill(
        qkv, b, a, a_log, dt_bias, states, query_start_loc, state_indices, has_initial_state, query_starts,
        _sources(state_indices, source_state_indices),
    )  # fmt: skip
    return out


def gated_delta_decode(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    taps: torch.Tensor,
    conv_states: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    eps: float,
    source_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance each sequence by one token: token n is sequence n's, and continues what its line holds. From what the
    layer's input products yield to what its output product reads, the convolution before the rule and the gated norm
    behind it included; with out[n] of the rule above for a value head, in the dtype of qkv:

        qkv    = silu(causal_conv1d(qkv)), as `kernels.causal_conv1d.ops.causal_conv1d_update`
        normed = out / sqrt(mean(out ** 2) + eps)
        result = normed * norm_weight * silu(z), float32 inside, out and normed rounded to the dtype of qkv

    Args:
        qkv: [tokens, channels], as the convolution reads it; b, a, a_log, dt_bias and states as in
            `gated_delta_prefill`. Unit stride along the columns and any stride between tokens.
        z: [tokens, num_value_heads * value_dim], strided like qkv.
        taps: [width, channels], dtype of qkv, contiguous; 2 to 8 of them.
        conv_states: [lines, width - 1, channels], dtype of qkv, contiguous; changed in place.
        norm_weight: float32 [value_dim].
        state_indices: int32 [tokens], lines of both states, each at most once beside padding.
        source_state_indices: int32 [tokens], lines that both states are read from, as in `gated_delta_prefill`.

    Returns: [tokens, num_value_heads * value_dim], dtype of qkv, fresh and contiguous.
    """
    _check(qkv, b, a, a_log, dt_bias, states)
    num_tokens, num_channels = qkv.shape
    value_size = states.shape[1] * states.shape[3]
    assert state_indices.shape == (num_tokens,), "state_indices is int32 [tokens]"
    assert z.shape == (num_tokens, value_size) and z.stride(1) == 1, "z is [tokens, num_value_heads * value_dim]"
    assert taps.shape[1:] == (num_channels,) and taps.is_contiguous(), "taps are [width, channels]"
    shape = (states.shape[0], taps.shape[0] - 1, num_channels)
    assert conv_states.shape == shape and conv_states.is_contiguous(), "conv_states are [lines, width - 1, channels]"
    assert qkv.dtype == z.dtype == taps.dtype == conv_states.dtype, "qkv, z, taps and conv_states are of one dtype"
    assert norm_weight.shape == states.shape[3:] and norm_weight.dtype == torch.float32, "norm_weight is [value_dim]"
    out: torch.Tensor = implementation("gated_delta", qkv.device).decode(
        qkv, z, b, a, taps, conv_states, a_log, dt_bias, norm_weight, states, state_indices, eps,
        _sources(state_indices, source_state_indices),
    )  # fmt: skip
    return out


def warm_up(states: torch.Tensor, conv_states: torch.Tensor) -> int:
    """Compile all that calls with these states can need, whatever their tokens; the number of variants compiled.

    states, conv_states  of a layer, as in `gated_delta_decode`; neither read nor changed
    """
    return contract("gated_delta", states.device).warm_up_and_count(states, conv_states)


def num_key_heads_of(qkv: torch.Tensor, states: torch.Tensor) -> int:
    """How many key heads qkv has beside the states' value heads."""
    _, num_value_heads, key_dim, value_dim = states.shape
    return (qkv.shape[1] - num_value_heads * value_dim) // (2 * key_dim)


def _sources(lines: torch.Tensor, sources: torch.Tensor | None) -> torch.Tensor:
    """The lines that states are read from."""
    if sources is None:
        return lines
    assert sources.shape == lines.shape and sources.dtype == torch.int32, "source_state_indices are like state_indices"
    return sources


def _check(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
) -> None:
    assert states.dim() == 4 and states.is_contiguous() and states.dtype == torch.float32, (
        "states are float32 [lines, num_value_heads, key_dim, value_dim], contiguous"
    )
    num_value_heads, key_dim, value_dim = states.shape[1:]
    num_key_heads = num_key_heads_of(qkv, states)
    assert qkv.dim() == 2 and qkv.stride(1) == 1, "qkv is [tokens, columns], unit stride along the columns"
    assert num_key_heads > 0 and qkv.shape[1] == 2 * num_key_heads * key_dim + num_value_heads * value_dim, (
        "qkv holds whole heads of queries, keys and values"
    )
    assert num_value_heads % num_key_heads == 0, "the value heads are a multiple of the key heads"
    for gate in (b, a):
        assert gate.shape == (qkv.shape[0], num_value_heads), "b and a are [tokens, num_value_heads]"
        assert gate.dtype == qkv.dtype and gate.stride(1) == 1, "b and a have qkv's dtype and unit stride"
    for weight in (a_log, dt_bias):
        assert weight.shape == (num_value_heads,), "a_log and dt_bias are [num_value_heads]"
        assert weight.dtype == torch.float32, "a_log and dt_bias are float32"


_EPS = 1e-6


def heads_of(
    qkv: torch.Tensor, states: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v): q and k [tokens, num_value_heads, key_dim], normed, q scaled too; v [tokens, num_value_heads,
    value_dim]."""
    _, num_value_heads, key_dim, value_dim = states.shape
    num_key_heads = num_key_heads_of(qkv, states)
    sizes = (num_key_heads * key_dim, num_key_heads * key_dim, num_value_heads * value_dim)
    q, k, v = qkv.to(dtype).split(sizes, dim=1)
    q, k = (_normed(x.unflatten(1, (num_key_heads, key_dim))) for x in (q, k))
    num_shared = num_value_heads // num_key_heads
    if num_shared > 1:
        q, k = (x.repeat_interleave(num_shared, dim=1) for x in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(1, (num_value_heads, value_dim))


def gates_of(
    b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(beta, the logarithm of the decay), each [tokens, num_value_heads]; the latter is at most 0."""
    decay_log = -a_log.to(dtype).exp() * functional.softplus(a.to(dtype) + dt_bias.to(dtype))
    return b.to(dtype).sigmoid(), decay_log


def gated_norm(
    out: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[tokens, num_value_heads * value_dim] of out [tokens, num_value_heads, value_dim] and z of the same size: normed
    head by head before it is gated, computed in `dtype`, rounded where transformers rounds."""
    wide = out.to(dtype)
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(out.dtype)
    gated = normed.to(dtype) * weight.to(dtype) * functional.silu(z.unflatten(1, out.shape[1:]).to(dtype))
    return gated.to(out.dtype).flatten(1)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
