"""One token of each sequence on NVIDIA GPUs, in one launch: convolution, delta rule and gated norm.

A program has one key head of one sequence and all value heads that share it, so that no other reads the rows of the
convolution's state that it shifts: they hold the inputs of its own channels. A value head's state is read once and
written once. float32 inside, sums in a fixed order, nothing read on the host: a captured call does what a new
one would.

Most of the time goes to the states' bytes, so a program reads on while it computes: it walks tiles of BLOCK_V values
and asks for the next one before it waits for this one, and for the first before anything else. Nor does a tile's second
sum wait for the first: with S the state as it comes, the rule of `ops` (decay, write, read) is

    new = beta * (v - decay * S.T @ k)
    out = (decay * S + outer(k, new)).T @ q = decay * S.T @ q + (q @ k) * new

whose sums over the keys are both of the old state, and q @ k is one number for all tiles. The walk has no barrier but
those inside the sums. Shifting a tile's channels in it would need one more in each tile, at which all warps wait: so
all values are convolved and their rows shifted before the walk, handed to it in memory, and the norm over a value head
is taken behind it, of outputs that are read back.
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

# Measured best on an H200 among 8 to 128 values, 1 to 16 warps, and Triton's own pipeline through shared memory: two
# tiles of 128 keys take 128 of a thread's registers, about 220 with the rest. A core then holds two programs, and each
# has up to 64 KiB of its states on the way or in work, which is enough; more and smaller ones were slower.
MAX_BLOCK_V = 64
NUM_WARPS = 4


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


@triton.jit
def _tile(states_ptr, index, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
          BLOCK_V: tl.constexpr):  # fmt: skip
    """(pointers, mask) of a tile, counted through the value heads from states_ptr on."""
    TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    key = tl.arange(0, BLOCK_K)[:, None]
    value = (index % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    ptr = states_ptr + (index // TILES) * (KEY_DIM * VALUE_DIM) + key * VALUE_DIM + value
    return ptr, (key < KEY_DIM) & (value < VALUE_DIM)


@triton.jit
def _tile_values(ptr, index, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    """(pointers, mask) of a tile's values in a row of the value heads."""
    TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    value = (index % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
    return ptr + (index // TILES) * VALUE_DIM + value, value < VALUE_DIM


@triton.jit
def _load_tile(states_ptr, index, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
               BLOCK_V: tl.constexpr):  # fmt: skip
    """Nobody reads it again before the next step, by when it has left the caches."""
    ptr, mask = _tile(states_ptr, index, KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V)
    return tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_values(values_ptr, index, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    ptr, mask = _tile_values(values_ptr, index, VALUE_DIM, BLOCK_V)
    return tl.load(ptr, mask=mask, other=0.0)


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
    lines_ptr,  # int32 [tokens], sources likewise
    sources_ptr,
    values_ptr,  # [tokens, VALUE_HEADS, VALUE_DIM], scratch: the convolved values
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
    BLOCK_V: tl.constexpr,  # values of a tile
    BLOCK_HEAD: tl.constexpr,  # VALUE_DIM, to a power of two
    BLOCK_SHARED: tl.constexpr,  # value heads of a key head, to a power of two
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (KEY_HEADS, tokens): the programs of a sequence, whose states are neighbours, begin together."""
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    FIRST_VALUE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    COLUMNS: tl.constexpr = FIRST_VALUE + VALUE_HEADS * VALUE_DIM
    key_head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.load(lines_ptr + token).to(tl.int64)
    source = tl.load(sources_ptr + token).to(tl.int64)
    if line < 1:
        return
    first_head = key_head * SHARED
    old_states_ptr = states_ptr + (source * VALUE_HEADS + first_head) * (KEY_DIM * VALUE_DIM)
    states_ptr += (line * VALUE_HEADS + first_head) * (KEY_DIM * VALUE_DIM)
    # On its way before anything else is waited for.
    next_state = _load_tile(old_states_ptr, 0, KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V)

    key = tl.arange(0, BLOCK_K)
    is_key = key < KEY_DIM
    q_channel = key_head * KEY_DIM + key
    k_channel = (KEY_HEADS + key_head) * KEY_DIM + key
    nth = tl.arange(0, BLOCK_SHARED)
    value = tl.arange(0, BLOCK_HEAD)
    place = nth[:, None] * VALUE_DIM + value[None, :]
    is_value = (nth < SHARED)[:, None] & (value < VALUE_DIM)[None, :]
    v_channel = FIRST_VALUE + first_head * VALUE_DIM + place
    qkv_ptr += token * qkv_stride
    z_ptr += token * z_stride + first_head * VALUE_DIM
    old_rows_ptr = rows_ptr + source * ((WIDTH - 1) * COLUMNS)
    rows_ptr += line * ((WIDTH - 1) * COLUMNS)
    out_ptr += token * (VALUE_HEADS * VALUE_DIM) + first_head * VALUE_DIM
    values_ptr += token * (VALUE_HEADS * VALUE_DIM) + first_head * VALUE_DIM
    v_rows = _inputs(qkv_ptr, old_rows_ptr, v_channel, is_value, COLUMNS, WIDTH)
    q_rows = _inputs(qkv_ptr, old_rows_ptr, q_channel, is_key, COLUMNS, WIDTH)
    k_rows = _inputs(qkv_ptr, old_rows_ptr, k_channel, is_key, COLUMNS, WIDTH)
    betas, decays = (), ()
    for index in tl.static_range(SHARED):
        head = first_head + index
        betas = betas + (_sigmoid(tl.load(b_ptr + token * gate_stride + head).to(tl.float32)),)
        x = tl.load(a_ptr + token * gate_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        decays = decays + (tl.exp(-tl.exp(tl.load(a_log_ptr + head)) * softplus),)
    gate = tl.load(z_ptr + place, mask=is_value, other=0.0)
    weight = tl.load(norm_ptr + value, mask=value < VALUE_DIM, other=0.0)
    v = _convolved(v_rows, taps_ptr, v_channel, is_value, COLUMNS, WIDTH)
    tl.store(values_ptr + place, v.to(values_ptr.dtype.element_ty), mask=is_value)
    q = _convolved(q_rows, taps_ptr, q_channel, is_key, COLUMNS, WIDTH)
    k = _convolved(k_rows, taps_ptr, k_channel, is_key, COLUMNS, WIDTH)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * tl.rsqrt(KEY_DIM * 1.0))
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    qk = tl.sum(q * k, 0)
    # Other threads than those that read the rows may write them, and others than those that wrote the values read them.
    tl.debug_barrier()
    _keep(v_rows, rows_ptr, v_channel, is_value, COLUMNS, WIDTH)
    _keep(q_rows, rows_ptr, q_channel, is_key, COLUMNS, WIDTH)
    _keep(k_rows, rows_ptr, k_channel, is_key, COLUMNS, WIDTH)

    next_v = _load_values(values_ptr, 0, VALUE_DIM, BLOCK_V)
    for index in tl.static_range(SHARED * TILES):
        state, v = next_state, next_v
        if index + 1 < SHARED * TILES:
            next_state = _load_tile(old_states_ptr, index + 1, KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V)
            next_v = _load_values(values_ptr, index + 1, VALUE_DIM, BLOCK_V)
        beta, decay = betas[index // TILES], decays[index // TILES]
        kept = tl.sum(state * k[:, None], 0)
        read = tl.sum(state * q[:, None], 0)
        new = (v.to(tl.float32) - kept * decay) * beta
        state = state * decay + k[:, None] * new[None, :]
        ptr, mask = _tile(states_ptr, index, KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V)
        tl.store(ptr, state, mask=mask, eviction_policy="evict_first")
        ptr, mask = _tile_values(out_ptr, index, VALUE_DIM, BLOCK_V)
        tl.store(ptr, (read * decay + qk * new).to(out_ptr.dtype.element_ty), mask=mask)

    # The values read, of all value heads at once; other threads wrote it, and read it before it is written again.
    tl.debug_barrier()
    out = tl.load(out_ptr + place, mask=is_value, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(out * out, 1) / VALUE_DIM + eps)
    normed = (out * scale[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32)
    gate = gate.to(tl.float32)
    result = normed * weight[None, :] * (gate * _sigmoid(gate))
    tl.debug_barrier()
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=is_value)


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
    sources: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See `ops.gated_delta_decode`."""
    _, num_heads, key_dim, value_dim = states.shape
    num_key_heads = num_key_heads_of(qkv, states)
    assert b.stride(0) == a.stride(0), "b and a are columns of one product"
    block_head = triton.next_power_of_2(value_dim)
    out = torch.empty(len(qkv), num_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    values = torch.empty_like(out)
    gated_delta_decode_kernel[num_key_heads, len(qkv)](
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
        sources,
        values,
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
        BLOCK_V=min(MAX_BLOCK_V, block_head),
        BLOCK_HEAD=block_head,
        BLOCK_SHARED=triton.next_power_of_2(num_heads // num_key_heads),
        DEPENDENT_LAUNCH=triton_launch.launches_dependently(qkv.device),
        num_warps=NUM_WARPS,
        **triton_launch.launch_options(qkv.device),
    )
    return out
