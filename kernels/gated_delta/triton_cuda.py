"""`kernels.gated_delta.ops` on NVIDIA GPUs. Decode is a launch of its own (`triton_cuda_decode`); of a prefill, long
sequences are computed in chunks (`triton_cuda_chunks`), and short ones here, by a program for each sequence, value head
and tile of its values that keeps the state in registers and walks the tokens.

float32 inside, sums in a fixed order, nothing read on the host: a captured call does what a new one would.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from kernels import triton_launch
from kernels.causal_conv1d.ops import causal_conv1d_update
from kernels.contract import Contract
from kernels.gated_delta.ops import gated_norm, num_key_heads_of
from kernels.gated_delta.triton_cuda_chunks import (
    MANY_SEQUENCES,
    MAX_SHORT_TOKENS,
    plan_kernel,
    prefill_long,
    prepare_kernel,
    scan_kernel,
)
from kernels.gated_delta.triton_cuda_decode import gated_delta_decode_kernel, launch_decode
from kernels.platform import in_use

_MAX_BLOCK_V = 32
_ALL_TOKENS = 2**30


@triton.jit(do_not_specialize=["gate_stride"], do_not_specialize_on_alignment=["b_ptr", "a_ptr"])
def gated_delta_kernel(
    qkv_ptr,  # [tokens, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM]
    b_ptr,  # [tokens, VALUE_HEADS], rows of gate_stride, a likewise
    a_ptr,
    a_log_ptr,  # float32 [VALUE_HEADS], dt_bias likewise
    dt_bias_ptr,
    states_ptr,  # float32 [lines, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    starts_ptr,  # int32 [sequences + 1]
    lines_ptr,  # int32 [sequences], sources likewise
    sources_ptr,
    continued_ptr,  # bool [sequences]
    out_ptr,  # [tokens, VALUE_HEADS, VALUE_DIM]
    gate_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
):
    """Grid (sequences, VALUE_HEADS, tiles of values). Longer sequences than MAX_TOKENS are left to others."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    line = tl.load(lines_ptr + sequence).to(tl.int64)
    if line < 1:
        return
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    end = tl.load(starts_ptr + sequence + 1).to(tl.int64)
    if (start >= end) | (end - start > MAX_TOKENS):
        return
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    mask = is_key[:, None] & is_value[None, :]
    source = tl.load(sources_ptr + sequence).to(tl.int64)
    states_ptr += (line * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    old_ptr = states_ptr + (source - line) * (VALUE_HEADS * KEY_DIM * VALUE_DIM)
    # A mask, not a product: a line that nobody has written may hold NaN.
    state = tl.load(old_ptr, mask=mask & tl.load(continued_ptr + sequence), other=0.0)
    rate = -tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head)
    first_value: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    columns: tl.constexpr = first_value + VALUE_HEADS * VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    for token in range(start, end):
        row_ptr = qkv_ptr + token * columns
        q = tl.load(row_ptr + key_head * KEY_DIM + key, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(row_ptr + (KEY_HEADS + key_head) * KEY_DIM + key, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(row_ptr + first_value + head * VALUE_DIM + value, mask=is_value, other=0.0).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * tl.rsqrt(KEY_DIM * 1.0))
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + token * gate_stride + head).to(tl.float32)))
        x = tl.load(a_ptr + token * gate_stride + head).to(tl.float32) + bias
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        state = state * tl.exp(rate * softplus)
        new = (v - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * new[None, :]
        out = tl.sum(state * q[:, None], 0)
        out_row = out_ptr + (token * VALUE_HEADS + head) * VALUE_DIM
        tl.store(out_row + value, out.to(out_ptr.dtype.element_ty), mask=is_value)
    tl.store(states_ptr, state, mask=mask)


def prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_starts: Sequence[int] | None,
    sources: torch.Tensor | None = None,
    *,
    max_short_tokens: int | None = None,
) -> torch.Tensor:
    """See `ops.gated_delta_prefill`. Which way a sequence goes is decided on the device, by its length; the host's view
    of the starts decides on no more than the size of tiles, which captured calls keep from the empty step they were
    captured with.

    max_short_tokens  of the longest sequence that is walked; another one for measurements. Where steps must not matter
                      all are, as chunks begin where a step does
    """
    if max_short_tokens is None:
        max_short_tokens = _ALL_TOKENS if in_use(qkv.device).batch_invariant else MAX_SHORT_TOKENS
    _, num_heads, key_dim, value_dim = states.shape
    assert b.stride(0) == a.stride(0), "b and a are columns of one product"
    sources = state_indices if sources is None else sources
    out = torch.empty(len(qkv), num_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    block_v = min(_MAX_BLOCK_V, triton.next_power_of_2(value_dim))
    gated_delta_kernel[len(state_indices), num_heads, triton.cdiv(value_dim, block_v)](
        qkv,
        b,
        a,
        a_log,
        dt_bias,
        states,
        query_start_loc,
        state_indices,
        sources,
        has_initial_state,
        out,
        b.stride(0),
        KEY_HEADS=num_key_heads_of(qkv, states),
        VALUE_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        MAX_TOKENS=max_short_tokens,
        num_warps=4,
    )
    where = (query_start_loc, state_indices, sources, has_initial_state)
    num_long = min(len(state_indices), len(qkv) // (max_short_tokens + 1))
    if query_starts is not None:
        num_long = _num_longer(tuple(query_starts), max_short_tokens)
    prefill_long(qkv, b, a, a_log, dt_bias, states, *where, out, max_short_tokens, num_long)
    return out


@functools.lru_cache(maxsize=4)
def _num_longer(query_starts: tuple[int, ...], num_tokens: int) -> int:
    """Sequences of more tokens than that, counted once for the layers of a step."""
    return sum(end - start > num_tokens for start, end in pairwise(query_starts))


def decode(
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
    eps: float,
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.gated_delta_decode`. Where steps must not matter, by the launches of a prefill."""
    sources = state_indices if sources is None else sources
    if in_use(qkv.device).batch_invariant:
        options: dict[str, Any] = {"activation": "silu", "source_state_indices": sources}
        qkv = causal_conv1d_update(qkv, taps, None, conv_states, state_indices, **options)
        num, device = len(state_indices), qkv.device
        starts = torch.arange(num + 1, dtype=torch.int32, device=device)
        continued = torch.ones(num, dtype=torch.bool, device=device)
        out = prefill(qkv, b, a, a_log, dt_bias, states, starts, state_indices, continued, None, sources)
        return gated_norm(out, z, norm_weight, eps)
    args = (qkv, z, b, a, taps, conv_states, a_log, dt_bias, norm_weight, states, state_indices, sources)
    return launch_decode(*args, eps)


def warm_up(states: torch.Tensor, conv_states: torch.Tensor) -> None:
    """See `ops.warm_up`: all kernels, on padding, which a prefill of this length sends through the chunks too."""
    _, num_heads, _, value_dim = states.shape
    _, num_rows, num_channels = conv_states.shape
    num_tokens, device, dtype = MAX_SHORT_TOKENS + 1, states.device, conv_states.dtype
    qkv, z, gate, taps = (
        torch.zeros(num, size, dtype=dtype, device=device)
        for num, size in (
            (num_tokens, num_channels),
            (num_tokens, num_heads * value_dim),
            (num_tokens, num_heads),
            (num_rows + 1, num_channels),
        )
    )
    weight, norm_weight = torch.zeros(num_heads, device=device), torch.zeros(value_dim, device=device)
    line = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    decode(qkv, z, gate, gate, taps, conv_states, weight, weight, norm_weight, states, line, 1e-6)
    for starts_on_host in ((0,), tuple(range(0, MANY_SEQUENCES * num_tokens, num_tokens))):  # either size of tiles
        prefill(qkv, gate, gate, weight, weight, states, starts, line[:1], line[:1].bool(), starts_on_host)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(
        gated_delta_kernel, gated_delta_decode_kernel, plan_kernel, prepare_kernel, scan_kernel
    )


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)
