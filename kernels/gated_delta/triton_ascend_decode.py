"""One token of each sequence on Ascend NPUs: delta rule and gated norm, in one launch behind the convolution's. Not
verified on an NPU.

As many programs as the chip has vector cores loop over work items; an item is a value head of one sequence. Its state
is read once and written once, in tiles of all keys and BLOCK_V values. A tile's second sum does not wait for
the first: with S the state as it comes, the rule of `ops` (decay, write, read) is

    new = beta * (v - decay * S.T @ k)
    out = (decay * S + outer(k, new)).T @ q = decay * S.T @ q + (q @ k) * new

whose sums over the keys are both of the old state. float32 inside, sums in a fixed order, nothing read on the host: a
captured call does what a new one would. Every transfer is a contiguous row or tile; the scalar unit reads lines only.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

NULL_LINE = tl.constexpr(0)

_DECODE = ["qkv_ptr", "z_ptr", "b_ptr", "a_ptr", "a_log_ptr", "dt_bias_ptr", "norm_ptr", "states_ptr", "lines_ptr",
           "sources_ptr", "out_ptr", "num_tokens", "qkv_stride", "z_stride", "b_stride", "a_stride", "eps"]  # fmt: skip


@triton.jit
def of_head(values, heads, head):
    """One head's of the values [BLOCK_H]."""
    return tl.sum(tl.where(heads == head, values, 0.0), 0)


@triton.jit
def gates_of_heads(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, heads, NUM_HEADS: tl.constexpr):
    """(beta, the logarithm of the decay) of all value heads of a token, float32 [BLOCK_H]."""
    is_head = heads < NUM_HEADS
    b = tl.load(b_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
    x = tl.load(a_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
    x += tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0)
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    rate = tl.exp(tl.load(a_log_ptr + heads, mask=is_head, other=0.0))
    return 1.0 / (1.0 + tl.exp(-b)), -rate * softplus


@triton.jit(do_not_specialize=_DECODE)
def gated_delta_decode(
    qkv_ptr,  # [num_tokens, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM], convolved, rows of qkv_stride
    z_ptr,  # [num_tokens, VALUE_HEADS * VALUE_DIM], rows of z_stride
    b_ptr,  # [num_tokens, VALUE_HEADS], rows of b_stride
    a_ptr,  # likewise, rows of a_stride
    a_log_ptr,  # float32 [VALUE_HEADS], dt_bias likewise
    dt_bias_ptr,
    norm_ptr,  # float32 [VALUE_DIM]
    states_ptr,  # float32 [lines, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    lines_ptr,  # int32 [num_tokens], sources likewise
    sources_ptr,
    out_ptr,  # [num_tokens, VALUE_HEADS * VALUE_DIM]
    num_tokens,
    qkv_stride,
    z_stride,
    b_stride,
    a_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two that holds the value heads
    BLOCK_K: tl.constexpr,  # power of two that holds a key
    BLOCK_V: tl.constexpr,  # divides VALUE_DIM
    BLOCK_T: tl.constexpr,  # power of two that holds the tiles of a state
):
    TILES: tl.constexpr = VALUE_DIM // BLOCK_V
    FIRST_VALUE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    heads, tiles = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_T)
    keys, values = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_key = keys < KEY_DIM
    in_head = tiles[:, None] * BLOCK_V + values[None, :]
    is_tile = (tiles < TILES)[:, None]
    weight = tl.load(norm_ptr + in_head, mask=is_tile, other=0.0)
    for item in range(tl.program_id(0), num_tokens * VALUE_HEADS, tl.num_programs(0)):
        token = tl.cast(item // VALUE_HEADS, tl.int64)
        head = item % VALUE_HEADS
        line = tl.load(lines_ptr + token)
        if line > NULL_LINE:
            beta, decay_log = gates_of_heads(b_ptr + token * b_stride, a_ptr + token * a_stride, a_log_ptr,
                                             dt_bias_ptr, heads, VALUE_HEADS)  # fmt: skip
            beta = of_head(beta, heads, head)
            decay = of_head(tl.exp(decay_log), heads, head)
            row_ptr = qkv_ptr + token * qkv_stride
            key_head = head // (VALUE_HEADS // KEY_HEADS)
            q = tl.load(row_ptr + key_head * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
            k = tl.load(row_ptr + (KEY_HEADS + key_head) * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
            q = q / tl.sqrt((tl.sum(q * q, 0) + 1e-6) * KEY_DIM)
            k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
            of_itself = tl.sum(q * k, 0)
            outs = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
            state_ptr = states_ptr + (tl.cast(line, tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
            source = tl.cast(tl.load(sources_ptr + token), tl.int64)
            old_ptr = states_ptr + (source * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
            for tile in range(TILES):
                v = tl.load(row_ptr + FIRST_VALUE + head * VALUE_DIM + tile * BLOCK_V + values).to(tl.float32)
                here = tile * BLOCK_V + (keys[:, None] * VALUE_DIM + values[None, :])
                state = tl.load(old_ptr + here, mask=is_key[:, None], other=0.0)
                kept = tl.sum(state * k[:, None], 0)
                read = tl.sum(state * q[:, None], 0)
                new = (v - decay * kept) * beta
                tl.store(state_ptr + here, decay * state + k[:, None] * new[None, :], mask=is_key[:, None])
                out = decay * read + of_itself * new
                outs += tl.where((tiles == tile)[:, None], out[None, :], 0.0)
            # Rounded where transformers rounds.
            outs = outs.to(out_ptr.dtype.element_ty).to(tl.float32)
            mean = tl.sum(tl.sum(outs * outs, 1), 0) / VALUE_DIM
            normed = (outs / tl.sqrt(mean + eps)).to(out_ptr.dtype.element_ty).to(tl.float32)
            z = tl.load(z_ptr + token * z_stride + head * VALUE_DIM + in_head, mask=is_tile, other=0.0).to(tl.float32)
            gated = normed * weight * (z / (1.0 + tl.exp(-z)))
            tl.store(out_ptr + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + in_head,
                     gated.to(out_ptr.dtype.element_ty), mask=is_tile)  # fmt: skip
