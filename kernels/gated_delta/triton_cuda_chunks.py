"""Prompts by the delta rule on NVIDIA GPUs: in chunks of matrix products, all of which but a short scan are parallel.

Three launches. `plan` counts the chunks of each sequence. `prepare` solves each chunk's recurrence as far as it can be
without the state before it (see `any_device` for the source and for the exponentials that are taken). `scan` walks the
chunks of a sequence with the state in registers. Grids follow from shapes alone, and nothing is read on the host.
float32 throughout, but for the factors of products where inputs are of half precision: these are TF32, which has more
digits than the inputs. The tensor cores cut off the digits beyond, and all errors of a sum have one sign then, so
`prepare` rounds its factors and what it leaves as factors to `scan`.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gated_delta.ops import num_key_heads_of

CHUNK = 64
# Sequences up to this length are walked token by token.
MAX_SHORT_TOKENS = 16
_PLAN_BLOCK = 128
# Rows of a block that is inverted row by row.
SIDE = 16
# Tiles of values of the scan, and its stages. Narrow ones, of which the next chunk is fetched beside this one's work,
# while sequences are too few to fill the GPU with wide ones; which changes no bit of what comes out.
NARROW_SCAN, WIDE_SCAN = {"BLOCK_V": 32, "STAGES": 2}, {"BLOCK_V": 64, "STAGES": 1}
_MANY_PROGRAMS = 256
MANY_SEQUENCES = _MANY_PROGRAMS + 2  # whatever the model


@triton.jit
def normed_rows(x_ptr, rows, columns, is_row, is_column, stride):
    """x / sqrt(sum(x ** 2) + 1e-6) of each row, float32; rows that are none are 0."""
    mask = is_row[:, None] & is_column[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def rows_and_norms(x_ptr, rows, columns, is_row, is_column, stride):
    """Rows as they are, and what makes them `normed_rows`: float32 [rows]."""
    mask = is_row[:, None] & is_column[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    squares = x.to(tl.float32) * x.to(tl.float32)
    return x, tl.rsqrt(tl.sum(squares, 1) + 1e-6)


@triton.jit
def as_factor(x, PRECISION: tl.constexpr):
    """float32 x, which a product of that precision is to read, rounded to the digits that it does not cut off. By the
    bits, and NaN as it is: the largest would become 0."""
    if PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def inverse_of_one_and(changes, CHUNK: tl.constexpr, SIDE: tl.constexpr):
    """The inverse of 1 + changes [CHUNK, CHUNK], which are 0 on the diagonal and above.

    Blocks of SIDE on the diagonal are inverted row by row, all at once, since each row depends on those above it. Then
    two known blocks and the block below the first make one of twice the size, until one is left. Powers are never used:
    those of like keys grow beyond all bounds.
    """
    NUM: tl.constexpr = CHUNK // SIDE
    block, side, row = tl.arange(0, NUM), tl.arange(0, SIDE), tl.arange(0, CHUNK)
    is_same = (block[:, None] == block[None, :])[:, None, :, None]
    on_diagonal = tl.sum(tl.where(is_same, tl.reshape(changes, (NUM, SIDE, NUM, SIDE)), 0.0), 2)
    blocks = tl.where(side[:, None] == side[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(on_diagonal)
    for i in range(1, SIDE):
        is_row = side[None, :, None] == i
        weights = tl.sum(tl.where(is_row, on_diagonal, 0.0), 1)
        change = tl.sum(weights[:, :, None] * blocks, 1)
        blocks = tl.where(is_row, blocks - change[:, None, :], blocks)
    inverse = tl.reshape(tl.where(is_same, blocks[:, :, None, :], 0.0), (CHUNK, CHUNK))
    width = SIDE
    while width < CHUNK:
        number = row // width
        is_below = (number[:, None] == number[None, :] + 1) & (number[None, :] % 2 == 0)
        left = tl.dot(inverse, tl.where(is_below, changes, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(left, inverse, input_precision="tf32x3")
        width *= 2
    return inverse


@triton.jit(do_not_specialize=["num_sequences"])
def plan_kernel(starts_ptr, lines_ptr, ends_ptr, num_sequences, MAX_SHORT: tl.constexpr, CHUNK: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """ends[n]: chunks of sequences 0 to n; short sequences and padding have none. One program."""
    before = 0
    for first in range(0, num_sequences, BLOCK):
        sequence = first + tl.arange(0, BLOCK)
        is_one = sequence < num_sequences
        length = tl.load(starts_ptr + sequence + 1, mask=is_one, other=0)
        length -= tl.load(starts_ptr + sequence, mask=is_one, other=0)
        line = tl.load(lines_ptr + sequence, mask=is_one, other=0)
        count = tl.where((length > MAX_SHORT) & (line > 0), (length + CHUNK - 1) // CHUNK, 0)
        tl.store(ends_ptr + sequence, before + tl.cumsum(count, 0), mask=is_one)
        before += tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_sequences", "gate_stride"], do_not_specialize_on_alignment=["b_ptr", "a_ptr"])
def prepare_kernel(
    qkv_ptr,  # [tokens, COLUMNS]
    b_ptr,  # [tokens, VALUE_HEADS], rows of gate_stride, a likewise
    a_ptr,
    a_log_ptr,  # float32 [VALUE_HEADS], dt_bias likewise
    dt_bias_ptr,
    starts_ptr,  # int32 [sequences + 1]
    ends_ptr,  # int32 [sequences], of `plan_kernel`
    total_ptr,  # float32 [chunks, VALUE_HEADS, CHUNK]: summed logarithms of the decay
    written_ptr,  # float32 [chunks, VALUE_HEADS, CHUNK, VALUE_DIM]: what is written if the state before is 0
    erased_ptr,  # float32 [chunks, VALUE_HEADS, CHUNK, KEY_DIM]: times the state before, what is written less
    scores_ptr,  # float32 [chunks, VALUE_HEADS, CHUNK, CHUNK]: what each token reads of the writes of the chunk
    num_sequences,
    gate_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (chunks, VALUE_HEADS)."""
    FIRST_VALUE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    COLUMNS: tl.constexpr = FIRST_VALUE + VALUE_HEADS * VALUE_DIM
    chunk, head = tl.program_id(0), tl.program_id(1)
    if chunk >= tl.load(ends_ptr + num_sequences - 1):
        return
    # The first sequence whose chunks end behind this one.
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high) // 2
        is_behind = tl.load(ends_ptr + middle) > chunk
        low = tl.where(is_behind, low, middle + 1)
        high = tl.where(is_behind, middle, high)
    first = tl.load(ends_ptr + low - 1, mask=low > 0, other=0)
    start = tl.load(starts_ptr + low) + (chunk - first) * CHUNK
    end = tl.load(starts_ptr + low + 1)
    row = tl.arange(0, CHUNK)
    token = (start + row).to(tl.int64)
    is_token = token < end
    key, value = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    # One address of 64 bits and offsets of 32: a tile of addresses would take all registers.
    qkv_ptr += start.to(tl.int64) * COLUMNS
    # Multiplied as they are, and normed behind: half the registers of float32, and of what the inputs' digits say
    # nothing is rounded away.
    k, k_norm = rows_and_norms(qkv_ptr + (KEY_HEADS + key_head) * KEY_DIM, row, key, is_token, is_key, COLUMNS)
    b = tl.load(b_ptr + token * gate_stride + head, mask=is_token, other=0.0).to(tl.float32)
    beta = tl.where(is_token, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    x = tl.load(a_ptr + token * gate_stride + head, mask=is_token, other=0.0).to(tl.float32)
    x += tl.load(dt_bias_ptr + head)
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    total = tl.cumsum(tl.where(is_token, -tl.exp(tl.load(a_log_ptr + head)) * softplus, 0.0), 0)
    is_before = row[:, None] >= row[None, :]
    decay = tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0))
    decay = tl.where(is_before, decay * k_norm[None, :], 0.0)
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay
    changes = tl.where(row[:, None] > row[None, :], products * (beta * k_norm)[:, None], 0.0)
    # Keys are read again behind the inverse, for which registers are few.
    place = chunk.to(tl.int64) * VALUE_HEADS + head
    tl.store(total_ptr + place * CHUNK + row, total)
    first_row = place * CHUNK
    q, q_norm = rows_and_norms(qkv_ptr + key_head * KEY_DIM, row, key, is_token, is_key, COLUMNS)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * (q_norm * tl.rsqrt(KEY_DIM * 1.0))[:, None]
    tl.store(scores_ptr + first_row * CHUNK + row[:, None] * CHUNK + row[None, :], as_factor(scores, PRECISION))
    inverse = as_factor(inverse_of_one_and(changes, CHUNK, SIDE), PRECISION)
    v_ptr = qkv_ptr + FIRST_VALUE + head * VALUE_DIM + row[:, None] * COLUMNS + value[None, :]
    v = tl.load(v_ptr, mask=is_token[:, None] & is_value[None, :], other=0.0).to(tl.float32)
    written = tl.dot(inverse, as_factor(v * beta[:, None], PRECISION), input_precision=PRECISION)
    written_ptr += first_row * VALUE_DIM
    tl.store(written_ptr + row[:, None] * VALUE_DIM + value[None, :], written, mask=is_value[None, :])
    k = normed_rows(qkv_ptr + (KEY_HEADS + key_head) * KEY_DIM, row, key, is_token, is_key, COLUMNS)
    k = as_factor(k * (beta * tl.exp(total))[:, None], PRECISION)
    erased = as_factor(tl.dot(inverse, k, input_precision=PRECISION), PRECISION)
    erased_ptr += first_row * KEY_DIM
    tl.store(erased_ptr + row[:, None] * KEY_DIM + key[None, :], erased, mask=is_key[None, :])


@triton.jit
def scan_kernel(
    qkv_ptr,
    states_ptr,  # float32 [lines, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    starts_ptr,
    lines_ptr,  # int32 [sequences], sources likewise
    sources_ptr,
    continued_ptr,  # bool [sequences]
    ends_ptr,
    total_ptr,
    written_ptr,
    erased_ptr,
    scores_ptr,
    out_ptr,  # [tokens, VALUE_HEADS, VALUE_DIM]
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (sequences, VALUE_HEADS, tiles of values)."""
    COLUMNS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    sequence, head = tl.program_id(0), tl.program_id(1)
    first_chunk = tl.load(ends_ptr + sequence - 1, mask=sequence > 0, other=0)
    last_chunk = tl.load(ends_ptr + sequence)
    if first_chunk >= last_chunk:
        return
    start = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    line = tl.load(lines_ptr + sequence).to(tl.int64)
    source = tl.load(sources_ptr + sequence).to(tl.int64)
    row, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    mask = is_key[:, None] & is_value[None, :]
    states_ptr += (line * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    old_ptr = states_ptr + (source - line) * (VALUE_HEADS * KEY_DIM * VALUE_DIM)
    # A mask, not a product: a line that nobody has written may hold NaN.
    state = tl.load(old_ptr, mask=mask & tl.load(continued_ptr + sequence), other=0.0)
    for chunk in tl.range(first_chunk, last_chunk, num_stages=STAGES):
        first = start + (chunk - first_chunk) * CHUNK
        is_token = first + row < end
        # As in `prepare_kernel`: addresses of 64 bits for the chunk, offsets of 32 within. Each tile is read when it is
        # needed, since registers are few.
        rows_ptr = qkv_ptr + first.to(tl.int64) * COLUMNS
        place = (chunk * VALUE_HEADS + head).to(tl.int64)
        total = tl.load(total_ptr + place * CHUNK + row)
        all_of_it = tl.load(total_ptr + place * CHUNK + CHUNK - 1)
        erased_at = erased_ptr + place * (CHUNK * KEY_DIM) + row[:, None] * KEY_DIM + key[None, :]
        new = tl.dot(tl.load(erased_at, mask=is_key[None, :], other=0.0), state, input_precision=PRECISION)
        written_at = written_ptr + place * (CHUNK * VALUE_DIM) + row[:, None] * VALUE_DIM + value[None, :]
        new = tl.load(written_at, mask=is_value[None, :], other=0.0) - new
        q = normed_rows(rows_ptr + key_head * KEY_DIM, row, key, is_token, is_key, COLUMNS)
        out = tl.dot(q * (tl.rsqrt(KEY_DIM * 1.0) * tl.exp(total))[:, None], state, input_precision=PRECISION)
        scores = tl.load(scores_ptr + place * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :])
        out += tl.dot(scores, new, input_precision=PRECISION)
        out_at = out_ptr + (first.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM
        out_at += row[:, None] * (VALUE_HEADS * VALUE_DIM) + value[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_value[None, :])
        k = normed_rows(rows_ptr + (KEY_HEADS + key_head) * KEY_DIM, row, key, is_token, is_key, COLUMNS)
        left = tl.trans(k * tl.exp(all_of_it - total)[:, None])
        state = tl.exp(all_of_it) * state + tl.dot(left, new, input_precision=PRECISION)
    tl.store(states_ptr, state, mask=mask)


def max_chunks(num_tokens: int, num_sequences: int, max_short_tokens: int) -> int:
    """The most chunks that so many tokens can be of."""
    num_long = min(num_sequences, num_tokens // (max_short_tokens + 1))
    return num_tokens // CHUNK + num_long if num_long else 0


def prefill_long(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    lines: torch.Tensor,
    sources: torch.Tensor,
    continued: torch.Tensor,
    out: torch.Tensor,
    max_short_tokens: int,
    num_expected: int,
) -> None:
    """Advance the sequences of more than max_short_tokens tokens; see `ops.gated_delta_prefill`. Writes their tokens
    of out [tokens, num_value_heads, value_dim].

    num_expected  how many there may be, by which tiles are chosen
    """
    _, num_heads, key_dim, value_dim = states.shape
    num_sequences = len(lines)
    num_chunks = max_chunks(len(qkv), num_sequences, max_short_tokens)
    if num_chunks == 0:
        return
    ends = torch.empty(num_sequences, dtype=torch.int32, device=qkv.device)
    plan_kernel[1,](
        starts, lines, ends, num_sequences, MAX_SHORT=max_short_tokens, CHUNK=CHUNK, BLOCK=_PLAN_BLOCK, num_warps=4
    )
    sizes = {
        "KEY_HEADS": num_key_heads_of(qkv, states),
        "VALUE_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "CHUNK": CHUNK,
        "BLOCK_K": max(16, triton.next_power_of_2(key_dim)),
        # Triton's interpreter multiplies in float32, whatever it is asked for.
        "PRECISION": "tf32" if qkv.is_cuda and qkv.dtype != torch.float32 else "tf32x3",
    }
    block_v = max(16, triton.next_power_of_2(value_dim))
    total, written, erased, scores = (
        torch.empty(num_chunks, num_heads, CHUNK, size, dtype=torch.float32, device=qkv.device)
        for size in (1, value_dim, key_dim, CHUNK)
    )
    prepare_kernel[num_chunks, num_heads](
        qkv, b, a, a_log, dt_bias, starts, ends, total, written, erased, scores, num_sequences, b.stride(0),
        BLOCK_V=block_v, SIDE=SIDE, num_warps=4, **sizes,
    )  # fmt: skip
    num_wide = num_expected * num_heads * triton.cdiv(value_dim, WIDE_SCAN["BLOCK_V"])
    scan = WIDE_SCAN if num_wide >= _MANY_PROGRAMS else NARROW_SCAN
    block_v = min(block_v, scan["BLOCK_V"])
    scan_kernel[num_sequences, num_heads, triton.cdiv(value_dim, block_v)](
        qkv, states, starts, lines, sources, continued, ends, total, written, erased, scores, out,
        num_warps=4, **sizes, **(scan | {"BLOCK_V": block_v}),
    )  # fmt: skip
