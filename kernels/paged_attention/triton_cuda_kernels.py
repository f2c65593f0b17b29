"""Triton kernels of the paged attention for NVIDIA GPUs: tiles of queries against blocks of keys, sums of splits.

The query heads of one key/value head are folded into the rows of a tile: row m is query m // GROUPS of the tile and
head m % GROUPS of the group. A tile never crosses from one sequence to the next. An item is one split of the keys of
one tile: items are numbered on the device, sequence by sequence, by what the sequences need, so that padded ones and
splits without keys take no program's time.

Softmax is computed in base 2, block by block, in float32. No slot outside of the keys that a tile may see is read: what
other sequences, freed blocks or the null block hold there does not matter.

The file is long because one loop over keys serves whole and split tiles, and two sums belong to the splits.
"""

# Triton's functions are untyped, and its tuples grow by `+` alone.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, var-annotated"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SEARCH_BLOCK = tl.constexpr(256)

# Arguments that change from step to step must not cause another compilation.
_STEP_ARGUMENTS = [
    "starts_ptr",
    "kv_lens_ptr",
    "table_ptr",
    "num_tokens",
    "num_sequences",
    "num_splits",
    "min_split_blocks",
    "window",
    "table_stride",
]


@triton.jit
def _tiles_and_splits(
    starts_ptr,
    kv_lens_ptr,
    sequence,
    num_tokens,
    num_sequences,
    num_splits,
    min_split_blocks,
    window,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FIXED_BLOCKS: tl.constexpr,
):
    """(first token, end, length, tiles, splits of a tile that may have keys, at least one) of these sequences.

    The tokens behind the last sequence, which pad a step, count as a sequence of their own: number num_sequences.
    """
    is_sequence = sequence < num_sequences
    start = tl.load(starts_ptr + sequence, mask=sequence <= num_sequences, other=0)
    end = tl.load(starts_ptr + sequence + 1, mask=is_sequence, other=0)
    end = tl.where(sequence == num_sequences, num_tokens, end)
    kv_len = tl.load(kv_lens_ptr + sequence, mask=is_sequence, other=0)
    blocks = tl.cdiv(kv_len, BLOCK_N)
    if HAS_WINDOW:
        blocks = tl.minimum(blocks, tl.cdiv(window + BLOCK_Q, BLOCK_N) + 1)
    if FIXED_BLOCKS:
        splits = tl.cdiv(blocks, FIXED_BLOCKS)
        if HAS_WINDOW:
            splits += 1  # the first one begins before the window
    else:
        splits = tl.cdiv(blocks, min_split_blocks)
    splits = tl.minimum(tl.maximum(splits, 1), num_splits)
    return start, end, kv_len, tl.cdiv(end - start, BLOCK_Q), splits


@triton.jit
def _attend(
    q,  # [BLOCK_M, BLOCK_D]
    mixed,  # [BLOCK_M, BLOCK_D] float32: sum of weights * values so far
    row_max,  # [BLOCK_M] float32
    row_sum,  # [BLOCK_M] float32
    block,
    k_ptr,
    v_ptr,
    table_ptr,
    position,
    first_key,
    end_key,
    window,
    scale,
    cap,
    dims,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes one block of keys into account. MASKED: not all of its keys are seen by all rows."""
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_key = (keys >= first_key) & (keys < end_key)
    if BLOCK_SIZE % BLOCK_N == 0:
        page = tl.load(table_ptr + block * BLOCK_N // BLOCK_SIZE).to(tl.int64)
        slots = page * BLOCK_SIZE + block * BLOCK_N % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    elif MASKED:
        pages = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slots = pages * BLOCK_SIZE + keys % BLOCK_SIZE
    else:
        pages = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
        slots = pages * BLOCK_SIZE + keys % BLOCK_SIZE
    offsets = slots[:, None] * ROW_STRIDE + dims[None, :]
    if MASKED:
        mask = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    elif EVEN_D:
        k = tl.load(k_ptr + offsets)
        v = tl.load(v_ptr + offsets)
    else:
        mask = (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # tanh
    if MASKED:
        is_seen = is_key[None, :] & (keys[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet has no maximum to subtract.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    shrunk = tl.exp2(row_max - shift)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrunk[:, None], input_precision=PRECISION)
    return mixed, new_max, row_sum * shrunk + tl.sum(weights, 1)


@triton.jit
def _attend_blocks(
    q,
    mixed,
    row_max,
    row_sum,
    block,
    end_block,
    k_ptr,
    v_ptr,
    table_ptr,
    position,
    first_position,
    first_key,
    end_key,
    window,
    scale,
    cap,
    dims,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """Takes blocks [block, end_block) of keys into account; IN_ORDER: one after the other, even those of which a row
    sees a part before those that all rows see."""
    full_block = block
    if HAS_WINDOW:
        full_block = tl.maximum(block, tl.cdiv(tl.maximum(end_key - window, 0), BLOCK_N))
    full_block = tl.minimum(full_block, end_block)
    end_full = tl.maximum(tl.minimum(end_block, tl.maximum(first_position + 1, 0) // BLOCK_N), full_block)
    if HAS_WINDOW and IN_ORDER:
        is_cut = full_block > block
        full_block = tl.where(is_cut, block, full_block)
        end_full = tl.where(is_cut, block, end_full)
    # Keys are found through pages, which Triton fetches as many stages ahead again.
    for full in tl.range(full_block, end_full, num_stages=2 * STAGES + 1):
        mixed, row_max, row_sum = _attend(
            q, mixed, row_max, row_sum, full, k_ptr, v_ptr, table_ptr, position, first_key, end_key, window,
            scale, cap, dims, ROW_STRIDE, BLOCK_SIZE, BLOCK_N, EVEN_D, HEAD_DIM, HAS_WINDOW, HAS_CAP,
            PRECISION, False)  # fmt: skip
    # The blocks before and behind, of which a row sees a part.
    num_full = end_full - full_block
    for edge in tl.range(block, end_block - num_full, num_stages=1):
        edge += tl.where(edge >= full_block, num_full, 0)
        mixed, row_max, row_sum = _attend(
            q, mixed, row_max, row_sum, edge, k_ptr, v_ptr, table_ptr, position, first_key, end_key, window,
            scale, cap, dims, ROW_STRIDE, BLOCK_SIZE, BLOCK_N, EVEN_D, HEAD_DIM, HAS_WINDOW, HAS_CAP,
            PRECISION, True)  # fmt: skip
    return mixed, row_max, row_sum


@triton.jit
def _add_part(mixed, row_max, row_sum, part_mixed, part_max, part_sum):
    """The same of the keys so far and of a part behind them; products and sums are rounded one by one wherever it is
    computed (`enable_fp_fusion`)."""
    new_max = tl.maximum(row_max, part_max)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    shrunk = tl.exp2(row_max - shift)
    part_shrunk = tl.exp2(part_max - shift)
    mixed = mixed * shrunk[:, None] + part_mixed * part_shrunk[:, None]
    return mixed, new_max, row_sum * shrunk + part_sum * part_shrunk


@triton.jit
def _attend_item(
    item,
    kv_head,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    starts_ptr,
    kv_lens_ptr,
    table_ptr,
    num_tokens,
    num_sequences,
    num_splits,
    min_split_blocks,
    window,
    table_stride,
    q_stride,
    scale,
    cap,
    sinks_ptr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    FIXED_BLOCKS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """One split of one tile; the first one also says that those from used_splits on saw no key. Arguments are those of
    `paged_attention_kernel`."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUPS
    ROW_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    EVEN_D: tl.constexpr = BLOCK_D == HEAD_DIM
    if ONE_TOKEN:
        first_token = item % num_tokens
        split = item // num_tokens
        used_splits = num_splits
        end = first_token + 1
        sequence = tl.minimum(first_token, num_sequences - 1)
        is_there = tl.load(starts_ptr + sequence + 1) == end
        kv_len = tl.where(is_there, tl.load(kv_lens_ptr + sequence), 0)
    else:
        sequence = 0
        items_before = 0
        items = 0
        for base in range(0, num_sequences + 1, SEARCH_BLOCK):
            _, _, _, tiles, splits = _tiles_and_splits(
                starts_ptr, kv_lens_ptr, base + tl.arange(0, SEARCH_BLOCK), num_tokens, num_sequences, num_splits,
                min_split_blocks, window, BLOCK_Q, BLOCK_N, HAS_WINDOW, FIXED_BLOCKS)  # fmt: skip
            running = items + tl.cumsum(tiles * splits, 0)
            is_before = running <= item
            sequence += tl.sum(is_before.to(tl.int32), 0)
            items_before = tl.maximum(items_before, tl.max(tl.where(is_before, running, 0), 0))
            items = tl.max(running, 0)
        start, end, kv_len, tiles, used_splits = _tiles_and_splits(
            starts_ptr, kv_lens_ptr, sequence, num_tokens, num_sequences, num_splits, min_split_blocks, window, BLOCK_Q,
            BLOCK_N, HAS_WINDOW, FIXED_BLOCKS)  # fmt: skip
        # Later tiles of a sequence see more keys, and start first.
        first_token = start + (tiles - 1 - (item - items_before) // used_splits) * BLOCK_Q
        split = (item - items_before) % used_splits

    # Keys [first_key, end_key) are seen by some row of the tile, those of blocks [full_block, end_full) by all rows.
    first_position = kv_len - end + first_token
    end_key = tl.maximum(kv_len - end + tl.minimum(first_token + BLOCK_Q, end), 0)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position + 1 - window, 0)
    block = first_key // BLOCK_N
    end_block = tl.cdiv(end_key, BLOCK_N)
    if FIXED_BLOCKS:
        first_part = block // FIXED_BLOCKS
        end_part = tl.cdiv(end_block, FIXED_BLOCKS)
        if SPLIT:
            first_part += split
            end_part = tl.minimum(end_part, first_part + 1)
            block = tl.where(first_part < end_part, block, end_block)
    elif SPLIT:
        share = tl.maximum(tl.cdiv(end_block - block, num_splits), min_split_blocks)
        block += split * share
        end_block = tl.minimum(end_block, block + share)

    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = first_token + row // GROUPS
    is_row = (row // GROUPS < BLOCK_Q) & (token < end)
    head = kv_head * GROUPS + row % GROUPS
    position = kv_len - end + token
    q_offsets = token.to(tl.int64)[:, None] * q_stride + (head * HEAD_DIM)[:, None] + dims[None, :]
    q_mask = (is_row & (block < end_block))[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    table_ptr += sequence.to(tl.int64) * table_stride

    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS and not (FIXED_BLOCKS and SPLIT):
        # As a key of the first split whose value is 0.
        row_max = tl.where(split == 0, tl.load(sinks_ptr + head) * 1.4426950408889634, row_max)
        row_sum = tl.where(split == 0, 1.0, row_sum)
    if FIXED_BLOCKS:
        for part in tl.range(first_part, end_part, num_stages=1):
            part_mixed, part_max, part_sum = _attend_blocks(
                q, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32), tl.maximum(block, part * FIXED_BLOCKS),
                tl.minimum(end_block, (part + 1) * FIXED_BLOCKS), k_ptr, v_ptr, table_ptr, position, first_position,
                first_key, end_key, window, scale, cap, dims, ROW_STRIDE, BLOCK_SIZE, BLOCK_N, EVEN_D, HEAD_DIM, STAGES,
                HAS_WINDOW, HAS_CAP, PRECISION, True)  # fmt: skip
            if SPLIT:
                mixed, row_max, row_sum = part_mixed, part_max, part_sum
            else:
                mixed, row_max, row_sum = _add_part(mixed, row_max, row_sum, part_mixed, part_max, part_sum)
    else:
        mixed, row_max, row_sum = _attend_blocks(
            q, mixed, row_max, row_sum, block, end_block, k_ptr, v_ptr, table_ptr, position, first_position, first_key,
            end_key, window, scale, cap, dims, ROW_STRIDE, BLOCK_SIZE, BLOCK_N, EVEN_D, HEAD_DIM, STAGES, HAS_WINDOW,
            HAS_CAP, PRECISION, False)  # fmt: skip

    has_keys = row_sum != 0.0
    if not (FIXED_BLOCKS and SPLIT):
        mixed = mixed / tl.where(has_keys, row_sum, 1.0)[:, None]
    out_row = token.to(tl.int64) * (KV_HEADS * GROUPS) + head
    out_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    if SPLIT:
        split_rows = tl.cast(num_tokens, tl.int64) * (KV_HEADS * GROUPS)
        unused = out_row + used_splits * split_rows
        out_row += split * split_rows
        if FIXED_BLOCKS:
            tl.store(lse_ptr + out_row, row_max, mask=is_row)
            sums_ptr = lse_ptr + num_splits * split_rows
            tl.store(sums_ptr + out_row, row_sum, mask=is_row)
        else:
            lse = tl.where(has_keys, row_max + tl.log2(tl.where(has_keys, row_sum, 1.0)), float("-inf"))
            tl.store(lse_ptr + out_row, lse, mask=is_row)
        out_mask = out_mask & has_keys[:, None]
        if split == 0:
            for _ in range(used_splits, num_splits):
                tl.store(lse_ptr + unused, float("-inf"), mask=is_row)
                if FIXED_BLOCKS:
                    tl.store(sums_ptr + unused, 0.0, mask=is_row)
                unused += split_rows
    out_offsets = out_row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, mixed.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=_STEP_ARGUMENTS)
def paged_attention_kernel(
    q_ptr,  # [num_tokens, KV_HEADS * GROUPS, HEAD_DIM], rows of q_stride
    k_ptr,  # [blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM], v likewise
    v_ptr,
    out_ptr,  # [num_tokens, KV_HEADS * GROUPS, HEAD_DIM]; SPLIT: float32, one such per split
    lse_ptr,  # SPLIT: float32 [splits, num_tokens, KV_HEADS * GROUPS]: log2 of the sum of the weights; FIXED_BLOCKS:
    #           largest scores, then the sums of the weights, by which out is not divided yet
    starts_ptr,  # [num_sequences + 1]
    kv_lens_ptr,  # [num_sequences]
    table_ptr,  # [num_sequences, table_stride]
    num_tokens,
    num_sequences,
    num_splits,
    min_split_blocks,
    window,
    table_stride,
    q_stride,
    scale,  # times log2(e); HAS_CAP: times 2 * log2(e) / the cap
    cap,  # of the scores, times log2(e)
    sinks_ptr,  # HAS_SINKS: float32 [KV_HEADS * GROUPS]
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    FIXED_BLOCKS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    LOOPS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (programs * KV_HEADS). With LOOPS, each program takes one item after the other, so that a launch needs fewer
    programs than there could be items; else it takes one. Rows that see no key, and those of padding, become zero.

    ONE_TOKEN  no sequence has more: a token's number is its sequence's, and nothing is searched
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUPS
    kv_head = tl.program_id(0) % KV_HEADS
    first = tl.program_id(0) // KV_HEADS
    if SPLIT and DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    num_items = 0
    if ONE_TOKEN:
        num_items = num_tokens * num_splits
    else:
        for base in range(0, num_sequences + 1, SEARCH_BLOCK):
            _, _, _, tiles, splits = _tiles_and_splits(
                starts_ptr, kv_lens_ptr, base + tl.arange(0, SEARCH_BLOCK), num_tokens, num_sequences, num_splits,
                min_split_blocks, window, BLOCK_Q, BLOCK_N, HAS_WINDOW, FIXED_BLOCKS)  # fmt: skip
            num_items += tl.sum(tiles * splits, 0)
    if LOOPS:
        for item in tl.range(first, num_items, tl.num_programs(0) // KV_HEADS, num_stages=1, disable_licm=True):
            _attend_item(
                item, kv_head, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, starts_ptr, kv_lens_ptr, table_ptr, num_tokens,
                num_sequences, num_splits, min_split_blocks, window, table_stride, q_stride, scale, cap, sinks_ptr,
                KV_HEADS, GROUPS, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, STAGES, HAS_WINDOW, HAS_CAP,
                HAS_SINKS, SPLIT, PRECISION, FIXED_BLOCKS, ONE_TOKEN)  # fmt: skip
    elif first < num_items:
        _attend_item(
            first, kv_head, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, starts_ptr, kv_lens_ptr, table_ptr, num_tokens,
            num_sequences, num_splits, min_split_blocks, window, table_stride, q_stride, scale, cap, sinks_ptr,
            KV_HEADS, GROUPS, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, STAGES, HAS_WINDOW, HAS_CAP, HAS_SINKS,
            SPLIT, PRECISION, FIXED_BLOCKS, ONE_TOKEN)  # fmt: skip


@triton.jit(do_not_specialize=["num_splits"])
def sum_splits_kernel(
    partial_ptr,  # float32 [num_splits, num_tokens, num_heads, HEAD_DIM]
    lse_ptr,  # float32 [num_splits, num_tokens, num_heads]
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out = the splits' results, weighted by their shares of the softmax, always summed in one order.

    Grid (num_tokens, num_heads). A split that saw no key has written nothing but its -inf. AHEAD results are loaded at
    a time.
    """
    num_rows = tl.num_programs(0) * tl.num_programs(1)
    row = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1) + tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = (dims < HEAD_DIM)[None, :]
    splits = tl.arange(0, MAX_SPLITS)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    lse = tl.load(lse_ptr + splits * num_rows + row, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - shift), 0)
    mixed = tl.zeros([1, BLOCK_D], tl.float32)
    for first in range(0, num_splits, AHEAD):
        parts = ()
        for ahead in tl.static_range(AHEAD):
            place = (first + ahead) * num_rows + row
            part_lse = tl.load(lse_ptr + place, mask=first + ahead < num_splits, other=float("-inf"))
            offsets = place.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            partial = tl.load(partial_ptr + offsets, mask=(part_lse != float("-inf"))[:, None] & is_dim, other=0.0)
            parts = parts + ((partial, tl.exp2(part_lse - shift)),)
        for ahead in tl.static_range(AHEAD):
            partial, weight = parts[ahead]
            mixed += partial * weight[:, None]
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    out_offsets = row.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, mixed.to(out_ptr.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize=["num_splits"])
def add_parts_kernel(
    partial_ptr,  # float32 [num_splits, num_tokens, num_heads, HEAD_DIM]
    maxima_ptr,  # float32 [num_splits, num_tokens, num_heads], then sums likewise
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    sinks_ptr,  # HAS_SINKS: float32 [num_heads]
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """out = the parts added up as one program does. Grid (num_tokens, num_heads). Parts without keys have written
    nothing but their -inf and 0. AHEAD parts are loaded at a time."""
    num_rows = tl.num_programs(0) * tl.num_programs(1)
    row = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1) + tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = (dims < HEAD_DIM)[None, :]
    mixed = tl.zeros([1, BLOCK_D], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        row_max = tl.load(sinks_ptr + tl.program_id(1) + tl.arange(0, 1)) * 1.4426950408889634
        row_sum += 1.0
    sums_ptr = maxima_ptr + num_splits * num_rows
    for first in range(0, num_splits, AHEAD):
        parts = ()
        for ahead in tl.static_range(AHEAD):
            place = (first + ahead) * num_rows + row
            is_part = first + ahead < num_splits
            part_max = tl.load(maxima_ptr + place, mask=is_part, other=float("-inf"))
            part_sum = tl.load(sums_ptr + place, mask=is_part, other=0.0)
            offsets = place[:, None] * HEAD_DIM + dims[None, :]
            partial = tl.load(partial_ptr + offsets, mask=is_part & is_dim, other=0.0)
            parts = parts + ((partial, part_max, part_sum),)
        for ahead in tl.static_range(AHEAD):
            partial, part_max, part_sum = parts[ahead]
            partial = tl.where((part_max == float("-inf"))[:, None], 0.0, partial)
            mixed, row_max, row_sum = _add_part(mixed, row_max, row_sum, partial, part_max, part_sum)
    mixed = mixed / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_offsets = row.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, mixed.to(out_ptr.dtype.element_ty), mask=is_dim)
