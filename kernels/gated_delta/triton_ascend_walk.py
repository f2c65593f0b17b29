"""Short prompts by the delta rule on Ascend NPUs, token by token, in one launch on the vector cores. Not verified on an
NPU.

As many programs as the chip has vector cores loop over work items; an item is a tile of BLOCK_V values of one value
head of one sequence. Its part of the state is read once, stays on the chip while the sequence's tokens are walked, and
is written once. As in `triton_ascend_decode` a token's second sum does not wait for the first. float32
inside, sums in a fixed order, nothing read on the host. Every transfer is a contiguous row or tile; the scalar unit
reads maps only.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_delta.triton_ascend_decode import NULL_LINE, of_head

_WALK = ["qkv_ptr", "b_ptr", "a_ptr", "a_log_ptr", "dt_bias_ptr", "states_ptr", "starts_ptr", "lines_ptr",
         "sources_ptr", "continued_ptr", "out_ptr", "num_sequences", "max_tokens", "b_stride", "a_stride"]  # fmt: skip


@triton.jit
def _rates_of_heads(a_log_ptr, dt_bias_ptr, heads, NUM_HEADS: tl.constexpr):
    """(rate, bias) of the decay of all value heads, the same for every token, float32 [BLOCK_H]."""
    is_head = heads < NUM_HEADS
    rate = tl.exp(tl.load(a_log_ptr + heads, mask=is_head, other=0.0))
    return rate, tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0)


@triton.jit
def _gates_of_heads(b_ptr, a_ptr, rate, bias, heads, NUM_HEADS: tl.constexpr):
    """As `triton_ascend_decode.gates_of_heads`, which has no room to keep the rates on the chip."""
    is_head = heads < NUM_HEADS
    b = tl.load(b_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
    x = tl.load(a_ptr + heads, mask=is_head, other=0.0).to(tl.float32) + bias
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return 1.0 / (1.0 + tl.exp(-b)), -rate * softplus


@triton.jit(do_not_specialize=_WALK)
def gated_delta_walk(
    qkv_ptr,  # [tokens, COLUMNS], convolved
    b_ptr,  # [tokens, VALUE_HEADS], rows of b_stride
    a_ptr,  # likewise, rows of a_stride
    a_log_ptr,  # float32 [VALUE_HEADS], dt_bias likewise
    dt_bias_ptr,
    states_ptr,  # float32 [lines, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    starts_ptr,  # int32 [num_sequences + 1]
    lines_ptr,  # int32 [num_sequences], sources likewise
    sources_ptr,
    continued_ptr,  # int8 [num_sequences]
    out_ptr,  # [tokens, VALUE_HEADS, VALUE_DIM]
    num_sequences,
    max_tokens,  # longer sequences are left to others
    b_stride,
    a_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two that holds the value heads
    BLOCK_K: tl.constexpr,  # power of two that holds a key
    BLOCK_V: tl.constexpr,  # divides VALUE_DIM
):
    TILES: tl.constexpr = VALUE_DIM // BLOCK_V
    FIRST_VALUE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    COLUMNS: tl.constexpr = FIRST_VALUE + VALUE_HEADS * VALUE_DIM
    heads, keys, values = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_key = keys < KEY_DIM
    rate, bias = _rates_of_heads(a_log_ptr, dt_bias_ptr, heads, VALUE_HEADS)
    for item in range(tl.program_id(0), num_sequences * (VALUE_HEADS * TILES), tl.num_programs(0)):
        sequence = item // (VALUE_HEADS * TILES)
        head = item // TILES % VALUE_HEADS
        first_value = item % TILES * BLOCK_V
        line = tl.load(lines_ptr + sequence)
        start = tl.load(starts_ptr + sequence)
        end = tl.load(starts_ptr + sequence + 1)
        if (line > NULL_LINE) & (end > start) & (end - start <= max_tokens):
            key_head = head // (VALUE_HEADS // KEY_HEADS)
            tile = head * (KEY_DIM * VALUE_DIM) + first_value + (keys[:, None] * VALUE_DIM + values[None, :])
            source = tl.cast(tl.load(sources_ptr + sequence), tl.int64)
            old = states_ptr + source * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + tile
            # A bound, not a product: a line that nobody has written may hold NaN.
            num_keys = tl.where(tl.load(continued_ptr + sequence) != 0, KEY_DIM, 0)
            state = tl.load(old, mask=(keys < num_keys)[:, None], other=0.0)
            for index in range(start, end):
                token = tl.cast(index, tl.int64)
                beta, decay_log = _gates_of_heads(b_ptr + token * b_stride, a_ptr + token * a_stride, rate, bias, heads,
                                                  VALUE_HEADS)  # fmt: skip
                beta = of_head(beta, heads, head)
                decay = of_head(tl.exp(decay_log), heads, head)
                row_ptr = qkv_ptr + token * COLUMNS
                q = tl.load(row_ptr + key_head * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
                k = tl.load(row_ptr + (KEY_HEADS + key_head) * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
                v = tl.load(row_ptr + FIRST_VALUE + head * VALUE_DIM + first_value + values).to(tl.float32)
                q = q / tl.sqrt((tl.sum(q * q, 0) + 1e-6) * KEY_DIM)
                k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
                of_itself = tl.sum(q * k, 0)
                state = decay * state
                new = (v - tl.sum(state * k[:, None], 0)) * beta
                out = tl.sum(state * q[:, None], 0) + of_itself * new
                state += k[:, None] * new[None, :]
                to = out_ptr + (token * VALUE_HEADS + head) * VALUE_DIM + first_value + values
                tl.store(to, out.to(out_ptr.dtype.element_ty))
            here = states_ptr + tl.cast(line, tl.int64) * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + tile
            tl.store(here, state, mask=is_key[:, None])
