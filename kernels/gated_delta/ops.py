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
state, and its outputs are anything. All metadata stays on the device; nothing here synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
    query_starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Advance sequences by whole prompts, chunks of them, or single tokens.

    Args:
        qkv: [tokens, 2 * num_key_heads * key_dim + num_value_heads * value_dim]: queries, keys, values; float32,
            bfloat16 or float16, contiguous.
        b, a: [tokens, num_value_heads], dtype of qkv, unit stride along the heads, any stride between tokens.
        a_log, dt_bias: float32 [num_value_heads], contiguous.
        states: float32 [lines, num_value_heads, key_dim, value_dim], contiguous; changed in place.
        query_start_loc: int32 [sequences + 1], ascending from 0. Empty sequences keep their state.
        state_indices: int32 [sequences], the lines, each at most once beside padding.
        has_initial_state: bool [sequences]; where False, the sequence starts with zeros, whatever its line holds.
        query_starts: query_start_loc as host integers, for implementations that run on the host.

    Returns: [tokens, num_value_heads, value_dim], dtype of qkv, fresh and contiguous. Tokens of no sequence come out as
    anything.
    """
    _check(qkv, b, a, a_log, dt_bias, states)
    num_sequences = state_indices.shape[0]
    assert query_start_loc.shape == (num_sequences + 1,), "query_start_loc is int32 [sequences + 1]"
    assert has_initial_state.shape == (num_sequences,), "has_initial_state is bool [sequences]"
    out: torch.Tensor = implementation("gated_delta", qkv.device, "prefill").prefill(
        qkv, b, a, a_log, dt_bias, states, query_start_loc, state_indices, has_initial_state, query_starts
    )
    return out


def gated_delta_update(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    """Advance each sequence by one token (decode): token n is sequence n's, and continues what its line holds.

    Arguments and result are as in `gated_delta_prefill`.
    """
    _check(qkv, b, a, a_log, dt_bias, states)
    assert state_indices.shape == (qkv.shape[0],), "state_indices is int32 [tokens]"
    out: torch.Tensor = implementation("gated_delta", qkv.device).update(
        qkv, b, a, a_log, dt_bias, states, state_indices
    )
    return out


def warm_up(states: torch.Tensor, num_key_heads: int, dtype: torch.dtype) -> int:
    """Compile all that calls with these states can need, whatever their tokens; the number of variants compiled.

    states  of a layer; neither read nor changed
    dtype   of qkv
    """
    return contract("gated_delta", states.device).warm_up_and_count(states, num_key_heads, dtype)


def num_key_heads_of(qkv: torch.Tensor, states: torch.Tensor) -> int:
    """How many key heads qkv has beside the states' value heads."""
    _, num_value_heads, key_dim, value_dim = states.shape
    return (qkv.shape[1] - num_value_heads * value_dim) // (2 * key_dim)


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
    assert qkv.dim() == 2 and qkv.is_contiguous(), "qkv is [tokens, columns], contiguous"
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
