"""The walk of a long prompt's chunks with the state on the chip, on Ascend NPUs. Not verified on an NPU.

As many programs as the chip has cubes loop over work items; an item is a tile of BLOCK_V values of one value head of
the sequence. With what `triton_ascend_prepare` left of a chunk (its names), S the state before it, and g = exp(G):

    new = matrix @ (beta * (v - g * (k @ S)))
    out = g * (q @ S) + scores @ new
    S   = exp(G of the last token) * S + k.T @ (exp(G of the last token - G) * new)

Products are of float32, which the cube takes as it is. What a product needs of the vector cores, and they of it, goes
through the compiler's workspace in global memory.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_delta.triton_ascend_decode import NULL_LINE
from kernels.gated_delta.triton_ascend_prepare import NUM_FACTORS

_SCAN = ["qkv_ptr", "normed_ptr", "factors_ptr", "matrix_ptr", "scores_ptr", "states_ptr", "lines_ptr", "sources_ptr",
         "continued_ptr", "out_ptr", "sequence", "first_token", "num_tokens", "is_begun"]  # fmt: skip


@triton.jit(do_not_specialize=_SCAN)
def gated_delta_scan(
    qkv_ptr,  # [tokens, COLUMNS]
    normed_ptr,
    factors_ptr,
    matrix_ptr,
    scores_ptr,
    states_ptr,  # float32 [lines, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    lines_ptr,  # int32 [sequences], sources likewise
    sources_ptr,
    continued_ptr,  # int8 [sequences]
    out_ptr,  # [tokens, VALUE_HEADS, VALUE_DIM]
    sequence,
    first_token,
    num_tokens,
    is_begun,  # 1 where tokens of the sequence before first_token are in its line by now, else 0
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two that holds a key
    BLOCK_V: tl.constexpr,  # divides VALUE_DIM
    CHUNK: tl.constexpr,
):
    TILES: tl.constexpr = VALUE_DIM // BLOCK_V
    FIRST_VALUE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    COLUMNS: tl.constexpr = FIRST_VALUE + VALUE_HEADS * VALUE_DIM
    keys, values, row = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, CHUNK)
    square = row[:, None] * CHUNK + row[None, :]
    for item in range(tl.program_id(0), VALUE_HEADS * TILES, tl.num_programs(0)):
        head = item // TILES
        first_value = item % TILES * BLOCK_V
        line = tl.load(lines_ptr + sequence)
        if line > NULL_LINE:
            tile = head * (KEY_DIM * VALUE_DIM) + first_value + (keys[:, None] * VALUE_DIM + values[None, :])
            source = tl.where(is_begun != 0, line, tl.load(sources_ptr + sequence))
            old = states_ptr + tl.cast(source, tl.int64) * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + tile
            # A bound, not a product: a line that nobody has written may hold NaN.
            num_keys = tl.where(is_begun + tl.load(continued_ptr + sequence) != 0, KEY_DIM, 0)
            state = tl.load(old, mask=(keys < num_keys)[:, None], other=0.0)
            for chunk in range(tl.cdiv(num_tokens, CHUNK)):
                first = tl.cast(first_token, tl.int64) + chunk * CHUNK
                is_row = (row < num_tokens - chunk * CHUNK)[:, None]
                of_head_rows = tl.cast(chunk, tl.int64) * (2 * KEY_HEADS) + head // (VALUE_HEADS // KEY_HEADS)
                q_ptr = normed_ptr + of_head_rows * (CHUNK * BLOCK_K) + (row[:, None] * BLOCK_K + keys[None, :])
                k_ptr = q_ptr + KEY_HEADS * CHUNK * BLOCK_K
                place = tl.cast(chunk, tl.int64) * VALUE_HEADS + head
                factors = factors_ptr + place * (NUM_FACTORS * CHUNK) + row
                decay = tl.load(factors + CHUNK)[:, None]
                v_ptr = qkv_ptr + first * COLUMNS + FIRST_VALUE + head * VALUE_DIM + first_value
                v = tl.load(v_ptr + (row[:, None] * COLUMNS + values[None, :]), mask=is_row, other=0.0)
                kept = tl.dot(tl.load(k_ptr), state, input_precision="ieee") * decay
                new = (v.to(tl.float32) - kept) * tl.load(factors)[:, None]
                new = tl.dot(tl.load(matrix_ptr + place * (CHUNK * CHUNK) + square), new, input_precision="ieee")
                out = tl.dot(tl.load(q_ptr), state, input_precision="ieee") * decay
                scores = tl.load(scores_ptr + place * (CHUNK * CHUNK) + square)
                out += tl.dot(scores, new, input_precision="ieee")
                to = out_ptr + (first * VALUE_HEADS + head) * VALUE_DIM + first_value
                tl.store(to + (row[:, None] * (VALUE_HEADS * VALUE_DIM) + values[None, :]),
                         out.to(out_ptr.dtype.element_ty), mask=is_row)  # fmt: skip
                new = new * tl.load(factors + 2 * CHUNK)[:, None]
                remaining = tl.max(tl.load(factors + 3 * CHUNK), 0)
                state = remaining * state + tl.dot(tl.trans(tl.load(k_ptr)), new, input_precision="ieee")
            here = states_ptr + tl.cast(line, tl.int64) * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + tile
            tl.store(here, state, mask=(keys < KEY_DIM)[:, None])
