"""The state-independent part of the delta rule of long prompts on Ascend NPUs. Not verified on an NPU.

For each chunk of CHUNK tokens and value head (Yang et al., "Parallelizing Linear Transformers with the Delta Rule",
2024), with G the summed logarithms of the decay within the chunk, of which only exp(G[i] - G[j]) with i >= j is used:

    scores[i, j] = q[i] @ k[j] * exp(G[i] - G[j]),  i >= j
    L[i, j]      = -beta[i] * k[i] @ k[j] * exp(G[i] - G[j]),  i > j
    matrix       = inverse of 1 - L

`norm` norms the rows, `prepare` has the cube multiply them, `solve` and `double` turn L into the inverse in place, by
blocks on its diagonal: blocks of 16 rows row by row on the vector cores, then twice as many at a time on the cube,
[[A, 0], [-C, B]] into [[A', 0], [B' C A', B']]. A series of powers would lose all digits where keys are alike.

They are separate launches, since the cores of a program see the writes of others only after a launch's end. Products
are of float32, which the cube takes as it is. Sums over a chunk are of a masked square, because running sums would run
on the scalar unit. The tail of a last chunk is zero.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_delta.triton_ascend_decode import of_head

BLOCK = tl.constexpr(16)
# Factors of each token of a chunk: beta, exp(G), exp(G of the last token - G), and exp(G of the last token).
NUM_FACTORS = tl.constexpr(4)


@triton.jit
def column_of(ptr, rows, stride, heads, head, is_row, NUM_HEADS: tl.constexpr):
    """One head's column of rows [rows, NUM_HEADS], float32; zero in rows that are none."""
    mask = is_row[:, None] & (heads < NUM_HEADS)[None, :]
    x = tl.load(ptr + rows[:, None] * stride + heads[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(tl.where((heads == head)[None, :], x, 0.0), 1)


@triton.jit(do_not_specialize=["qkv_ptr", "normed_ptr", "first_token", "num_tokens"])
def gated_delta_norm(
    qkv_ptr,  # [tokens, COLUMNS]
    normed_ptr,  # float32 [chunks, 2 * KEY_HEADS, CHUNK, BLOCK_K]: queries, scaled too, then keys
    first_token,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two that holds a key
    CHUNK: tl.constexpr,
):
    COLUMNS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    keys, row = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), tl.cdiv(num_tokens, CHUNK) * (2 * KEY_HEADS), tl.num_programs(0)):
        head = item % (2 * KEY_HEADS)
        first_row = item // (2 * KEY_HEADS) * CHUNK
        mask = (row < num_tokens - first_row)[:, None] & (keys < KEY_DIM)[None, :]
        rows_ptr = qkv_ptr + (tl.cast(first_token, tl.int64) + first_row) * COLUMNS + head * KEY_DIM
        x = tl.load(rows_ptr + (row[:, None] * COLUMNS + keys[None, :]), mask=mask, other=0.0).to(tl.float32)
        size = tl.where(head < KEY_HEADS, KEY_DIM, 1).to(tl.float32)
        x = x / tl.sqrt((tl.sum(x * x, 1) + 1e-6) * size)[:, None]
        to = normed_ptr + tl.cast(item, tl.int64) * (CHUNK * BLOCK_K)
        tl.store(to + (row[:, None] * BLOCK_K + keys[None, :]), x)


_PREPARE = ["normed_ptr", "b_ptr", "a_ptr", "a_log_ptr", "dt_bias_ptr", "factors_ptr", "matrix_ptr", "scores_ptr",
            "first_token", "num_tokens", "b_stride", "a_stride"]  # fmt: skip


@triton.jit(do_not_specialize=_PREPARE)
def gated_delta_prepare(
    normed_ptr,
    b_ptr,  # [tokens, VALUE_HEADS], rows of b_stride
    a_ptr,  # likewise, rows of a_stride
    a_log_ptr,  # float32 [VALUE_HEADS], dt_bias likewise
    dt_bias_ptr,
    factors_ptr,  # float32 [chunks, VALUE_HEADS, NUM_FACTORS, CHUNK]
    matrix_ptr,  # float32 [chunks, VALUE_HEADS, CHUNK, CHUNK]: L
    scores_ptr,  # likewise
    first_token,
    num_tokens,
    b_stride,
    a_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two that holds the value heads
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    heads, keys, row = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    is_head = heads < VALUE_HEADS
    for item in range(tl.program_id(0), tl.cdiv(num_tokens, CHUNK) * VALUE_HEADS, tl.num_programs(0)):
        chunk = item // VALUE_HEADS
        head = item % VALUE_HEADS
        first = tl.cast(first_token, tl.int64) + chunk * CHUNK
        is_row = row < num_tokens - chunk * CHUNK
        of_head_rows = tl.cast(chunk, tl.int64) * (2 * KEY_HEADS) + head // (VALUE_HEADS // KEY_HEADS)
        q_ptr = normed_ptr + of_head_rows * (CHUNK * BLOCK_K) + (row[:, None] * BLOCK_K + keys[None, :])
        k = tl.load(q_ptr + KEY_HEADS * CHUNK * BLOCK_K)
        of_keys = tl.dot(k, tl.trans(k), input_precision="ieee")
        of_queries = tl.dot(tl.load(q_ptr), tl.trans(k), input_precision="ieee")
        b = column_of(b_ptr + first * b_stride, row, b_stride, heads, head, is_row, VALUE_HEADS)
        beta = 1.0 / (1.0 + tl.exp(-b))
        x = column_of(a_ptr + first * a_stride, row, a_stride, heads, head, is_row, VALUE_HEADS)
        x += of_head(tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0), heads, head)
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        rate = tl.exp(of_head(tl.load(a_log_ptr + heads, mask=is_head, other=0.0), heads, head))
        decay_log = tl.where(is_row, -rate * softplus, 0.0)
        is_before = row[:, None] >= row[None, :]
        total = tl.sum(tl.where(is_before, decay_log[None, :], 0.0), 1)
        last = tl.sum(decay_log, 0)
        # One tile, as the two vector cores of a program would both store a row by itself.
        which = tl.arange(0, NUM_FACTORS)[:, None]
        factors = tl.where(which == 0, beta[None, :], tl.exp(total)[None, :])
        factors = tl.where(which == 2, tl.exp(last - total)[None, :], factors)
        factors = tl.where(which == 3, tl.exp(last), factors)
        place = tl.cast(item, tl.int64)
        tl.store(factors_ptr + place * (NUM_FACTORS * CHUNK) + which * CHUNK + row[None, :], factors)
        decay = tl.where(is_before, tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0)), 0.0)
        to = place * (CHUNK * CHUNK) + (row[:, None] * CHUNK + row[None, :])
        tl.store(scores_ptr + to, of_queries * decay)
        decay = tl.where(row[:, None] > row[None, :], decay, 0.0)
        tl.store(matrix_ptr + to, of_keys * decay * (-beta)[:, None])


@triton.jit(do_not_specialize=["matrix_ptr", "num_matrices"])
def gated_delta_solve(matrix_ptr, num_matrices, CHUNK: tl.constexpr):
    """The inverse of 1 - L in each block of BLOCK rows on the diagonal, in place; row i once those before it are."""
    block, row = tl.arange(0, CHUNK // BLOCK), tl.arange(0, BLOCK)
    here = (block * (BLOCK * CHUNK + BLOCK))[:, None, None] + (row * CHUNK)[None, :, None] + row[None, None, :]
    nothing = tl.zeros((CHUNK // BLOCK, BLOCK, BLOCK), tl.float32)
    for item in range(tl.program_id(0), num_matrices, tl.num_programs(0)):
        at = matrix_ptr + tl.cast(item, tl.int64) * (CHUNK * CHUNK) + here
        changes = tl.load(at)
        inverse = tl.where(row[None, :, None] == row[None, None, :], 1.0, nothing)
        for i in range(BLOCK - 1):
            weights = tl.sum(tl.where(row[None, None, :] == i, changes, 0.0), 2)
            solved = tl.sum(tl.where(row[None, :, None] == i, inverse, 0.0), 1)
            inverse += weights[:, :, None] * solved[:, None, :]
        tl.store(at, inverse)


@triton.jit(do_not_specialize=["matrix_ptr", "num_matrices"])
def gated_delta_double(matrix_ptr, num_matrices, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Blocks of WIDTH rows on the diagonal are inverted; afterwards those of twice as many are."""
    PAIRS: tl.constexpr = CHUNK // (2 * WIDTH)
    row = tl.arange(0, WIDTH)
    here = row[:, None] * CHUNK + row[None, :]
    for item in range(tl.program_id(0), num_matrices * PAIRS, tl.num_programs(0)):
        corner = tl.cast(item // PAIRS, tl.int64) * (CHUNK * CHUNK) + item % PAIRS * (2 * WIDTH * (CHUNK + 1))
        upper = tl.load(matrix_ptr + corner + here)
        below = matrix_ptr + corner + WIDTH * CHUNK + here
        lower = tl.load(below + WIDTH)
        product = tl.dot(lower, tl.load(below), input_precision="ieee")
        tl.store(below, tl.dot(product, upper, input_precision="ieee"))
