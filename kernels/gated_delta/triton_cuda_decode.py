"""One token of each sequence on NVIDIA GPUs, in one launch: convolution, delta rule and gated norm.

A program has one key head of one sequence and all value heads that share it, so that no other reads the rows of the
convolution's state that it shifts: they hold the inputs of its own channels. A value head's state is read once and
written once, in place. float32 inside, sums in a fixed order, nothing read on the host: a captured call does what a new
one would.
"""

# Triton's functions are untyped, and its tuples grow by `+` alone.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, var-annotated"
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import triton_launch
from kernels.gated_delta.ops import num_key_heads_of

# A tile of the state takes 32 registers of each thread, so that a core holds several programs, whose loads overlap.
_MAX_BLOCK_V = 32
_NUM_WARPS = 4


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _inputs(x_ptr, rows_ptr, channel, mask, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """The last WIDTH inputs of some channels, oldest first: those of the state, and the new one."""
    rows = ()
    for row in tl.static_range(WIDTH - 1):
        rows = rows + (tl.load(rows_ptr + row * COLUMNS + channel, mask=mask, other=0.0),)
    return rows + (tl.load(x_ptr + channel, mask=mask, other=0.0),)


@triton.jit
def _convolved(rows, taps_ptr, channel, mask, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """silu of the convolution, float32, rounded to the inputs' dtype."""
    total = tl.zeros(channel.shape, tl.float32)
    for row in tl.static_range(WIDTH):
        tap = tl.load(taps_ptr + row * COLUMNS + channel, mask=mask, other=0.0).to(tl.float32)
        total += rows[row].to(tl.float32) * tap
    return (total * _sigmoid(total)).to(rows[0].dtype).to(tl.float32)


@triton.jit
def _keep(rows, rows_ptr, channel, mask, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """The last WIDTH - 1 inputs become the state. All threads have read the old one: call a barrier before."""
    for row in tl.static_range(WIDTH - 1):
        tl.store(rows_ptr + row * COLUMNS + channel, rows[row + 1], mask=mask)


@triton.jit(
    do_not_specialize=["qkv_stride", "z_stride", "gate_stride"], do_not_specialize_on_alignment=["b_ptr", "a_ptr"]
)
def gated_delta_decode_kernel(
    qkv_ptr,  # [tokens, COLUMNS], rows of qkv_stride
    z_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM], rows of z_stride
    b_ptr,  # [tokens, VALUE_HEADS], rows of gate_stride, a likewise
    a_ptr,
    taps_ptr,  # [WIDTH, COLUMNS]
    rows_ptr,  # [lines, WIDTH - 1, COLUMNS]
    a_log_ptr,  # float32 [VALUE_HEADS], dt_bias likewise
    dt_bias_ptr,
    norm_ptr,  # float32 [VALUE_DIM]
    states_ptr,  # float32 [lines, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    lines_ptr,  # int32 [tokens]
    out_ptr,  # [tokens, VALUE_HEADS, VALUE_DIM]
    qkv_stride,
    z_stride,
    gate_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tokens, KEY_HEADS)."""
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    FIRST_VALUE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    COLUMNS: tl.constexpr = FIRST_VALUE + VALUE_HEADS * VALUE_DIM
    token = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.load(lines_ptr + token).to(tl.int64)
    if line < 1:
        return
    key = tl.arange(0, BLOCK_K)
    is_key = key < KEY_DIM
    qkv_ptr += token * qkv_stride
    rows_ptr += line * ((WIDTH - 1) * COLUMNS)
    q_channel = key_head * KEY_DIM + key
    k_channel = (KEY_HEADS + key_head) * KEY_DIM + key
    q_rows = _inputs(qkv_ptr, rows_ptr, q_channel, is_key, COLUMNS, WIDTH)
    k_rows = _inputs(qkv_ptr, rows_ptr, k_channel, is_key, COLUMNS, WIDTH)
    q = _convolved(q_rows, taps_ptr, q_channel, is_key, COLUMNS, WIDTH)
    k = _convolved(k_rows, taps_ptr, k_channel, is_key, COLUMNS, WIDTH)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * tl.rsqrt(KEY_DIM * 1.0))
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    for index in range(SHARED):
        head = key_head * SHARED + index
        beta = _sigmoid(tl.load(b_ptr + token * gate_stride + head).to(tl.float32))
        x = tl.load(a_ptr + token * gate_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head)) * softplus)
        outs = ()
        squares = 0.0
        for tile in tl.static_range(TILES):
            value = tile * BLOCK_V + tl.arange(0, BLOCK_V)
            is_value = value < VALUE_DIM
            mask = is_key[:, None] & is_value[None, :]
            state_ptr = states_ptr + (line * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
            state_ptr += key[:, None] * VALUE_DIM + value[None, :]
            state = tl.load(state_ptr, mask=mask, other=0.0)
            channel = FIRST_VALUE + head * VALUE_DIM + value
            v_rows = _inputs(qkv_ptr, rows_ptr, channel, is_value, COLUMNS, WIDTH)
            v = _convolved(v_rows, taps_ptr, channel, is_value, COLUMNS, WIDTH)
            state = state * decay
            new = (v - tl.sum(state * k[:, None], 0)) * beta
            state += k[:, None] * new[None, :]
            tl.store(state_ptr, state, mask=mask)
            out = tl.sum(state * q[:, None], 0).to(out_ptr.dtype.element_ty).to(tl.float32)
            squares += tl.sum(out * out, 0)
            outs = outs + (out,)
            # What is shifted was read by this program, though not always by the thread that writes it.
            tl.debug_barrier()
            _keep(v_rows, rows_ptr, channel, is_value, COLUMNS, WIDTH)
        scale = tl.rsqrt(squares / VALUE_DIM + eps)
        for tile in tl.static_range(TILES):
            value = tile * BLOCK_V + tl.arange(0, BLOCK_V)
            is_value = value < VALUE_DIM
            place = head * VALUE_DIM + value
            weight = tl.load(norm_ptr + value, mask=is_value, other=0.0)
            gate = tl.load(z_ptr + token * z_stride + place, mask=is_value, other=0.0).to(tl.float32)
            normed = (outs[tile] * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
            result = normed * weight * (gate * _sigmoid(gate))
            out_row = out_ptr + token * (VALUE_HEADS * VALUE_DIM)
            tl.store(out_row + place, result.to(out_ptr.dtype.element_ty), mask=is_value)
    tl.debug_barrier()
    _keep(q_rows, rows_ptr, q_channel, is_key, COLUMNS, WIDTH)
    _keep(k_rows, rows_ptr, k_channel, is_key, COLUMNS, WIDTH)


def launch_decode(
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
) -> torch.Tensor:
    """See `ops.gated_delta_decode`."""
    _, num_heads, key_dim, value_dim = states.shape
    num_key_heads = num_key_heads_of(qkv, states)
    assert b.stride(0) == a.stride(0), "b and a are columns of one product"
    block_v = min(_MAX_BLOCK_V, triton.next_power_of_2(value_dim))
    out = torch.empty(len(qkv), num_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    gated_delta_decode_kernel[len(qkv), num_key_heads](
        qkv,
        z,
        b,
        a,
        taps,
        conv_states,
        a_log,
        dt_bias,
        norm_weight,
        states,
        state_indices,
        out,
        qkv.stride(0),
        z.stride(0),
        b.stride(0),
        eps,
        KEY_HEADS=num_key_heads,
        VALUE_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=taps.shape[0],
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        TILES=triton.cdiv(value_dim, block_v),
        DEPENDENT_LAUNCH=triton_launch.launches_dependently(qkv.device),
        num_warps=_NUM_WARPS,
        **triton_launch.launch_options(qkv.device),
    )
    return out
