"""Triton kernels of the LoRA ops for NVIDIA GPUs: one shrink, one expand, one embedding gather.

A tile is BLOCK_M tokens of one segment. Programs count tiles from the segment starts on the device and share the work
out evenly, each taking consecutive items, so that one launch shape serves every mix of adapters of one padded size,
loads stay in flight from item to item, and programs without an item leave at once.

Order of events under programmatic dependent launch (DEPENDENT_LAUNCH): a kernel may begin while the kernel before it
still runs. Before `gdc_wait` it reads only maps and rows, which no kernel of a step writes. Shrink lets its dependents
start after its own wait, so when expand starts, whatever ran before shrink (the base product into `out`) is complete,
and expand may also read `out` before it waits for h. Every program waits before it ends, one without items too, so
that whoever waits for this kernel has waited for all before it.

Shape comments: M tokens of a tile, R ranks, K inputs, N columns.
"""

# Triton makes a parameter a constant of the compilation by annotation; their names are upper case, as is its custom.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _ceil_div(number, divisor: tl.constexpr):
    return (number + divisor - 1) // divisor


@triton.jit
def _pick(values, index, NUM: tl.constexpr):
    """values[index] of a tuple of scalars or pointers, for an index known at run time only."""
    picked = values[0]
    for i in tl.static_range(1, NUM):
        picked = tl.where(index == i, values[i], picked)
    return picked


@triton.jit
def _count_tiles(starts_ptr, num_segments, BLOCK_M: tl.constexpr, MAX_SEGMENTS: tl.constexpr):
    """Running count of tiles over the segments: int32 [MAX_SEGMENTS], constant after the last active one."""
    index = tl.arange(0, MAX_SEGMENTS)
    active = index < num_segments
    start = tl.load(starts_ptr + index, mask=active, other=0)
    end = tl.load(starts_ptr + index + 1, mask=active, other=0)
    return tl.cumsum((end - start + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def _find_tile(running, tile, starts_ptr, BLOCK_M: tl.constexpr, MAX_SEGMENTS: tl.constexpr):
    """(segment, first token, end of the segment) of a tile."""
    if MAX_SEGMENTS == 1:
        segment = 0
        tiles_before = 0
    else:
        segment = tl.sum((running <= tile).to(tl.int32), 0)
        tiles_before = tl.max(tl.where(running <= tile, running, 0), 0)
    start = tl.load(starts_ptr + segment) + (tile - tiles_before) * BLOCK_M
    return segment, start, tl.load(starts_ptr + segment + 1)


@triton.jit
def _rows_of(segment, slice_id, places_ptr, first_rows_ptr, ranks_ptr, num_places):
    """(place, first row, rank) of a segment in a slice; rank 0 where the adapter leaves group or slice alone."""
    place = tl.load(places_ptr + segment)
    first_row = tl.load(first_rows_ptr + segment)
    rank = tl.load(ranks_ptr + slice_id * num_places + place)
    rank = tl.where(first_row < 0, 0, rank)
    return place, tl.maximum(first_row, 0).to(tl.int64), rank


@triton.jit
def _token_rows(tokens, token_mask, row_index_ptr, HAS_INDEX: tl.constexpr):
    """int64 rows of x and out that hold the tokens."""
    if HAS_INDEX:
        return tl.load(row_index_ptr + tokens, mask=token_mask, other=0).to(tl.int64)
    else:
        return tokens.to(tl.int64)


@triton.jit
def _multiply(left, right, accumulator):
    """left @ right + accumulator in float32; float32 operands are not rounded to tf32."""
    return tl.dot(left, right, accumulator, input_precision="ieee")


@triton.jit
def _load_block(row_ptrs, row_mask, block, end_k, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, EVEN_K: tl.constexpr):
    """Inputs [block, block + BLOCK_K) of rows: [rows, K], or [GROUPS, rows, K / GROUPS] to spread K over the warps."""
    if GROUPS == 1:
        k = block + tl.arange(0, BLOCK_K)
        pointers = row_ptrs[:, None] + k[None, :]
        mask = row_mask[:, None]
        if not EVEN_K:
            mask = mask & (k < end_k)[None, :]
    else:
        part: tl.constexpr = BLOCK_K // GROUPS
        k = block + tl.arange(0, GROUPS)[:, None] * part + tl.arange(0, part)[None, :]
        pointers = row_ptrs[None, :, None] + k[:, None, :]
        mask = row_mask[None, :, None]
        if not EVEN_K:
            mask = mask & (k < end_k)[:, None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _multiply_block(x, a, accumulator, GROUPS: tl.constexpr):
    """x @ a.T + accumulator for blocks of `_load_block`: [M, R], or [GROUPS, M, R] partial products."""
    if GROUPS == 1:
        return _multiply(x.to(a.dtype), tl.trans(a), accumulator)
    else:
        return _multiply(x.to(a.dtype), tl.permute(a, (0, 2, 1)), accumulator)


@triton.jit
def _zero_products(BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr):
    if GROUPS == 1:
        return tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    else:
        return tl.zeros([GROUPS, BLOCK_M, BLOCK_R], dtype=tl.float32)


@triton.jit
def _store_h(h_rows, ranks, rank, token_mask, products, scaling, GROUPS: tl.constexpr):
    if GROUPS > 1:
        products = tl.sum(products, 0)
    tl.store(
        h_rows[:, None] + ranks[None, :],
        (products * scaling).to(h_rows.dtype.element_ty),
        mask=token_mask[:, None] & (ranks < rank)[None, :],
    )


@triton.jit
def _rank_blocks(rank, BLOCK_R: tl.constexpr):
    """Number of blocks of ranks that a slice of an adapter is computed in: see `_rank_block`."""
    tl.static_assert(BLOCK_R <= 64)
    rest = _ceil_div(rank, 16) % (BLOCK_R // 16)
    return _ceil_div(rank, 16) // (BLOCK_R // 16) + (rest >> 1) + (rest & 1)


@triton.jit
def _rank_block(index, rank, BLOCK_R: tl.constexpr):
    """(first rank, ranks that are there) of a block: as many of BLOCK_R as fit, then one of 32, then one of 16.

    So nothing is computed beyond the rank rounded up to 16.
    """
    whole = _ceil_div(rank, 16) // (BLOCK_R // 16)
    rest = _ceil_div(rank, 16) % (BLOCK_R // 16)
    is_whole = index < whole
    is_half = (index == whole) & (rest >= 2)
    first = tl.where(is_whole, index * BLOCK_R, tl.where(is_half, whole * BLOCK_R, (_ceil_div(rank, 16) - 1) * 16))
    height = tl.where(is_whole, BLOCK_R, tl.where(is_half, 32, 16))
    return first, tl.minimum(rank - first, height)


@triton.jit
def _count_rank_blocks(
    starts_ptr,
    places_ptr,
    first_rows_ptr,
    ranks_ptr,
    num_segments,
    num_places,
    NUM_SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
):
    """Running count of (tile, slice, rank block) over the segments: int32 [MAX_SEGMENTS]."""
    index = tl.arange(0, MAX_SEGMENTS)
    active = index < num_segments
    start = tl.load(starts_ptr + index, mask=active, other=0)
    end = tl.load(starts_ptr + index + 1, mask=active, other=0)
    place = tl.load(places_ptr + index, mask=active, other=0)
    first_row = tl.load(first_rows_ptr + index, mask=active, other=-1)
    blocks = tl.zeros([MAX_SEGMENTS], dtype=tl.int32)
    for i in tl.static_range(NUM_SLICES):
        rank = tl.load(ranks_ptr + i * num_places + place, mask=active, other=0)
        blocks += _rank_blocks(rank, BLOCK_R)
    blocks = tl.where(first_row < 0, 0, blocks)
    return tl.cumsum((end - start + BLOCK_M - 1) // BLOCK_M * blocks, 0)


@triton.jit
def _prefetch_rows(row_ptrs, COLUMNS: tl.constexpr):
    """Ask for the first COLUMNS two-byte columns of the rows to be brought into the L2 cache."""
    lines = row_ptrs[:, None] + tl.arange(0, (COLUMNS + 63) // 64)[None, :] * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _shrink_run(
    x_rows,
    a_ptr,
    h_rows,
    num_ranks,
    token_mask,
    scaling,
    first_split,
    num_splits,
    in_features,
    h_split_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS_PER_SPLIT: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Partial products of one block of ranks for consecutive splits, each stored when its last block is added."""
    ranks = tl.arange(0, BLOCK_R)
    a_rows = a_ptr + ranks.to(tl.int64) * in_features
    products = _zero_products(BLOCK_M, BLOCK_R, GROUPS)
    for step in tl.range(0, num_splits * BLOCKS_PER_SPLIT, num_stages=STAGES):
        first_k = (first_split * BLOCKS_PER_SPLIT + step) * BLOCK_K
        a = _load_block(a_rows, ranks < num_ranks, first_k, in_features, BLOCK_K, GROUPS, EVEN_K)
        x = _load_block(x_rows, token_mask, first_k, in_features, BLOCK_K, GROUPS, EVEN_K)
        products = _multiply_block(x, a, products, GROUPS)
        if step % BLOCKS_PER_SPLIT == BLOCKS_PER_SPLIT - 1:
            split = first_split + step // BLOCKS_PER_SPLIT
            _store_h(h_rows + split * h_split_stride, ranks, num_ranks, token_mask, products, scaling, GROUPS)
            products = _zero_products(BLOCK_M, BLOCK_R, GROUPS)


@triton.jit
def lora_shrink_kernel(
    x_ptr,
    a_ptrs,
    h_ptr,
    starts_ptr,
    places_ptr,
    first_rows_ptr,
    num_segments_ptr,
    ranks_ptr,
    scalings_ptr,
    row_index_ptr,
    in_features,
    x_stride,
    h_split_stride,
    h_slice_stride,
    h_token_stride,
    num_places,
    NUM_SLICES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS_PER_SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """h[split, slice, t, :n] = scaling * x[row(t), part of the split] @ A[r : r + n, part of the split].T

    An item is one split of one rank block of one slice of one tile. EVEN_K: the blocks of all splits cover the inputs
    exactly.
    """
    num_segments = tl.load(num_segments_ptr)
    running = _count_rank_blocks(
        starts_ptr,
        places_ptr,
        first_rows_ptr,
        ranks_ptr,
        num_segments,
        num_places,
        NUM_SLICES,
        BLOCK_M,
        BLOCK_R,
        MAX_SEGMENTS,
    )
    num_items = tl.max(running, 0) * NUM_SPLITS
    share = tl.cdiv(num_items, tl.num_programs(0))
    item = tl.program_id(0) * share
    last = tl.minimum(item + share, num_items)
    while item < last:
        unit = item // NUM_SPLITS
        first_split = item % NUM_SPLITS
        num_splits = tl.minimum(NUM_SPLITS - first_split, last - item)
        item += num_splits
        segment = tl.sum((running <= unit).to(tl.int32), 0)
        unit -= tl.max(tl.where(running <= unit, running, 0), 0)
        place = tl.load(places_ptr + segment)
        first_row = tl.load(first_rows_ptr + segment).to(tl.int64)
        blocks_of_tile = 0
        for i in tl.static_range(NUM_SLICES):
            blocks_of_tile += _rank_blocks(tl.load(ranks_ptr + i * num_places + place), BLOCK_R)
        start = tl.load(starts_ptr + segment) + unit // blocks_of_tile * BLOCK_M
        end = tl.load(starts_ptr + segment + 1)
        rank_block = unit % blocks_of_tile
        slice_id = 0
        rank = tl.load(ranks_ptr + place)
        next_first = _rank_blocks(rank, BLOCK_R)
        first_block = 0
        for i in tl.static_range(1, NUM_SLICES):
            behind = rank_block >= next_first
            rank_here = tl.load(ranks_ptr + i * num_places + place)
            slice_id = tl.where(behind, i, slice_id)
            rank = tl.where(behind, rank_here, rank)
            first_block = tl.where(behind, next_first, first_block)
            next_first += _rank_blocks(rank_here, BLOCK_R)
        first_rank, num_ranks = _rank_block(rank_block - first_block, rank, BLOCK_R)
        a_ptr = _pick(a_ptrs, slice_id, NUM_SLICES) + (first_row + first_rank) * in_features
        if DEPENDENT_LAUNCH:
            near = tl.minimum(tl.arange(0, 16), num_ranks - 1).to(tl.int64)
            _prefetch_rows(a_ptr + near * in_features + first_split * (BLOCKS_PER_SPLIT * BLOCK_K), BLOCK_K)
            gdc_wait()
            gdc_launch_dependents()
        scaling = tl.load(scalings_ptr + slice_id * num_places + place)
        tokens = start + tl.arange(0, BLOCK_M)
        token_mask = tokens < end
        x_rows = x_ptr + _token_rows(tokens, token_mask, row_index_ptr, HAS_INDEX) * x_stride
        h_rows = h_ptr + slice_id * h_slice_stride + tokens.to(tl.int64) * h_token_stride + first_rank
        for i in tl.static_range(4, 7):
            if (1 << i) <= BLOCK_R:
                is_of_this_height = (num_ranks <= 1 << i) & ((num_ranks > 1 << (i - 1)) | (i == 4))
                if is_of_this_height:
                    _shrink_run(
                        x_rows,
                        a_ptr,
                        h_rows,
                        num_ranks,
                        token_mask,
                        scaling,
                        first_split,
                        num_splits,
                        in_features,
                        h_split_stride,
                        BLOCK_M,
                        1 << i,
                        BLOCK_K,
                        BLOCKS_PER_SPLIT,
                        GROUPS,
                        STAGES,
                        EVEN_K,
                    )
    if DEPENDENT_LAUNCH:
        gdc_wait()


@triton.jit
def _load_h(h_rows, ranks, rank, token_mask, h_split_stride, NUM_SPLITS: tl.constexpr):
    """Sum of the splits' partial products, [M, R], always in the same order."""
    pointers = h_rows[:, None] + ranks[None, :]
    mask = token_mask[:, None] & (ranks < rank)[None, :]
    h = tl.load(pointers, mask=mask, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        h += tl.load(pointers + split * h_split_stride, mask=mask, other=0.0)
    return h


@triton.jit
def _load_out(out_rows, column, token_mask, width, has_block, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr):
    """out of one block of columns, [M, N]."""
    columns = column + tl.arange(0, BLOCK_N)
    mask = (token_mask & has_block)[:, None]
    if not EVEN_N:
        mask = mask & (columns < width)[None, :]
    return tl.load(out_rows[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _load_b(b_ptr, ranks, rank, column, width, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr):
    """B of one block of ranks and columns, [R, N]."""
    columns = column + tl.arange(0, BLOCK_N)
    mask = (ranks < rank)[:, None]
    if not EVEN_N:
        mask = mask & (columns < width)[None, :]
    return tl.load(b_ptr + ranks.to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_out(out_rows, column, token_mask, width, values, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr):
    columns = column + tl.arange(0, BLOCK_N)
    mask = token_mask[:, None]
    if not EVEN_N:
        mask = mask & (columns < width)[None, :]
    tl.store(out_rows[:, None] + columns[None, :], values.to(out_rows.dtype.element_ty), mask=mask)


@triton.jit
def _narrower(num_blocks, columns_left, BLOCK_N: tl.constexpr, NARROW: tl.constexpr):
    """Number of blocks of NARROW columns in num_blocks blocks of BLOCK_N, of which the last may be cut off."""
    return tl.minimum(num_blocks * (BLOCK_N // NARROW), tl.cdiv(columns_left, NARROW))


@triton.jit
def _expand_run(
    h_rows,
    b_ptr,
    out_rows,
    rank,
    token_mask,
    first_column,
    num_blocks,
    width,
    h_split_stride,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDE: tl.constexpr,
    TALL: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERWRITE: tl.constexpr,
):
    """num_blocks blocks of WIDE columns, all ranks in one block: h stays on the chip. Larger BLOCK_R, fewer columns."""
    BLOCK_N: tl.constexpr = WIDE if BLOCK_R == 16 else TALL if BLOCK_R <= 64 else TALL // 2
    num_blocks = _narrower(num_blocks, width - first_column, WIDE, BLOCK_N)
    ranks = tl.arange(0, BLOCK_R)
    h = _load_h(h_rows, ranks, rank, token_mask, h_split_stride, NUM_SPLITS)
    base = tl.zeros([BLOCK_M, BLOCK_N], dtype=out_rows.dtype.element_ty)
    if not OVERWRITE:
        base = _load_out(out_rows, first_column, token_mask, width, num_blocks > 0, BLOCK_N, EVEN_N)
    for step in tl.range(0, num_blocks, num_stages=STAGES):
        column = first_column + step * BLOCK_N
        b = _load_b(b_ptr, ranks, rank, column, width, BLOCK_N, EVEN_N)
        delta = _multiply(h.to(b.dtype), b, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32))
        if not OVERWRITE:
            # The next block of `out` is asked for before this one is finished.
            following = _load_out(out_rows, column + BLOCK_N, token_mask, width, step + 1 < num_blocks, BLOCK_N, EVEN_N)
            delta += base.to(tl.float32)
            base = following
        _store_out(out_rows, column, token_mask, width, delta, BLOCK_N, EVEN_N)


@triton.jit
def _expand_any_rank(
    h_rows,
    b_ptr,
    out_rows,
    rank,
    token_mask,
    first_column,
    num_blocks,
    width,
    h_split_stride,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERWRITE: tl.constexpr,
):
    """Consecutive blocks of columns for any rank: sixteen ranks at a time, of h too, for each block."""
    rank_blocks = _ceil_div(rank, 16)
    delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in tl.range(0, num_blocks * rank_blocks, num_stages=STAGES):
        column = first_column + step // rank_blocks * BLOCK_N
        ranks = step % rank_blocks * 16 + tl.arange(0, 16)
        b = _load_b(b_ptr, ranks, rank, column, width, BLOCK_N, EVEN_N)
        h = _load_h(h_rows, ranks, rank, token_mask, h_split_stride, NUM_SPLITS)
        delta = _multiply(h.to(b.dtype), b, delta)
        if step % rank_blocks == rank_blocks - 1:
            if not OVERWRITE:
                delta += _load_out(out_rows, column, token_mask, width, True, BLOCK_N, EVEN_N).to(tl.float32)
            _store_out(out_rows, column, token_mask, width, delta, BLOCK_N, EVEN_N)
            delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)


@triton.jit
def lora_expand_kernel(
    h_ptr,
    b_ptrs,
    out_ptr,
    starts_ptr,
    places_ptr,
    first_rows_ptr,
    num_segments_ptr,
    ranks_ptr,
    row_index_ptr,
    widths,
    slice_starts,
    out_stride,
    h_split_stride,
    h_slice_stride,
    h_token_stride,
    num_places,
    NUM_SLICES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_N_TALL: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERWRITE: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[row(t), columns of slice] (+)= sum over splits of h[split, slice, t, :n] @ B[r : r + n]

    An item is one block of columns of one tile. EVEN_N: every slice's width is a multiple of BLOCK_N.
    Nothing is computed beyond a rank rounded up to 16. Where that is 16, 32, 64 or 128, h stays on the chip for a run
    of blocks: of BLOCK_N columns for 16 ranks, of BLOCK_N_TALL, a divisor of it, for 32 and 64, of half that for 128.
    Otherwise sixteen ranks at a time are multiplied, and h is read again for each block of columns.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    num_segments = tl.load(num_segments_ptr)
    running = _count_tiles(starts_ptr, num_segments, BLOCK_M, MAX_SEGMENTS)
    blocks_of_tile = tl.cdiv(widths[0], BLOCK_N)
    for i in tl.static_range(1, NUM_SLICES):
        blocks_of_tile += tl.cdiv(widths[i], BLOCK_N)
    num_items = tl.max(running, 0) * blocks_of_tile
    share = tl.cdiv(num_items, tl.num_programs(0))
    item = tl.program_id(0) * share
    last = tl.minimum(item + share, num_items)
    while item < last:
        tile = item // blocks_of_tile
        block = item % blocks_of_tile
        slice_id = 0
        first_block = 0
        next_first = tl.cdiv(widths[0], BLOCK_N)
        end_block = next_first
        for i in tl.static_range(1, NUM_SLICES):
            behind = block >= next_first
            slice_id = tl.where(behind, i, slice_id)
            first_block = tl.where(behind, next_first, first_block)
            next_first += tl.cdiv(widths[i], BLOCK_N)
            end_block = tl.where(behind, next_first, end_block)
        num_blocks = tl.minimum(end_block - block, last - item)
        item += num_blocks
        segment, start, end = _find_tile(running, tile, starts_ptr, BLOCK_M, MAX_SEGMENTS)
        _place, first_row, rank = _rows_of(segment, slice_id, places_ptr, first_rows_ptr, ranks_ptr, num_places)
        if OVERWRITE or rank > 0:
            width = _pick(widths, slice_id, NUM_SLICES)
            tokens = start + tl.arange(0, BLOCK_M)
            token_mask = tokens < end
            rows = _token_rows(tokens, token_mask, row_index_ptr, HAS_INDEX)
            out_rows = out_ptr + rows * out_stride + _pick(slice_starts, slice_id, NUM_SLICES)
            column = (block - first_block) * BLOCK_N
            b_ptr = _pick(b_ptrs, slice_id, NUM_SLICES) + first_row * width
            h_rows = h_ptr + slice_id * h_slice_stride + tokens.to(tl.int64) * h_token_stride
            if DEPENDENT_LAUNCH:
                near = tl.minimum(tl.arange(0, 16), tl.maximum(rank - 1, 0)).to(tl.int64)
                _prefetch_rows(b_ptr + near * width + column, BLOCK_N)
                gdc_wait()
            # Rank 0 comes here to overwrite by zeros.
            blocks = tl.maximum(_ceil_div(rank, 16), 1)
            if blocks == 1:
                _expand_run(
                    h_rows,
                    b_ptr,
                    out_rows,
                    rank,
                    token_mask,
                    column,
                    num_blocks,
                    width,
                    h_split_stride,
                    NUM_SPLITS,
                    BLOCK_M,
                    16,
                    BLOCK_N,
                    BLOCK_N_TALL,
                    STAGES,
                    EVEN_N,
                    OVERWRITE,
                )
            elif blocks == 2:
                _expand_run(
                    h_rows,
                    b_ptr,
                    out_rows,
                    rank,
                    token_mask,
                    column,
                    num_blocks,
                    width,
                    h_split_stride,
                    NUM_SPLITS,
                    BLOCK_M,
                    32,
                    BLOCK_N,
                    BLOCK_N_TALL,
                    STAGES,
                    EVEN_N,
                    OVERWRITE,
                )
            elif blocks == 4:
                _expand_run(
                    h_rows,
                    b_ptr,
                    out_rows,
                    rank,
                    token_mask,
                    column,
                    num_blocks,
                    width,
                    h_split_stride,
                    NUM_SPLITS,
                    BLOCK_M,
                    64,
                    BLOCK_N,
                    BLOCK_N_TALL,
                    STAGES,
                    EVEN_N,
                    OVERWRITE,
                )
            elif blocks == 8:
                _expand_run(
                    h_rows,
                    b_ptr,
                    out_rows,
                    rank,
                    token_mask,
                    column,
                    num_blocks,
                    width,
                    h_split_stride,
                    NUM_SPLITS,
                    BLOCK_M,
                    128,
                    BLOCK_N,
                    BLOCK_N_TALL,
                    STAGES,
                    EVEN_N,
                    OVERWRITE,
                )
            else:
                _expand_any_rank(
                    h_rows,
                    b_ptr,
                    out_rows,
                    rank,
                    token_mask,
                    column,
                    _narrower(num_blocks, width - column, BLOCK_N, BLOCK_N_TALL),
                    width,
                    h_split_stride,
                    NUM_SPLITS,
                    BLOCK_M,
                    BLOCK_N_TALL,
                    STAGES,
                    EVEN_N,
                    OVERWRITE,
                )
    if DEPENDENT_LAUNCH:
        gdc_wait()


@triton.jit
def lora_embedding_kernel(
    token_ids_ptr,
    a_ptr,
    h_ptr,
    token_segment_ptr,
    places_ptr,
    first_rows_ptr,
    ranks_ptr,
    scalings_ptr,
    row_index_ptr,
    vocabulary,
    h_token_stride,
    BLOCK_R: tl.constexpr,
    HAS_INDEX: tl.constexpr,
):
    """h[t, :n] = scaling * A[r : r + n, token_ids[row(t)]]; one program per token."""
    token = tl.program_id(0)
    segment = tl.load(token_segment_ptr + token)
    if segment >= 0:
        place, first_row, rank = _rows_of(segment, 0, places_ptr, first_rows_ptr, ranks_ptr, 0)
        scaling = tl.load(scalings_ptr + place)
        row = token
        if HAS_INDEX:
            row = tl.load(row_index_ptr + token)
        token_id = tl.load(token_ids_ptr + row)
        for first_rank in tl.range(0, rank, BLOCK_R):
            ranks = first_rank + tl.arange(0, BLOCK_R)
            mask = ranks < rank
            values = tl.load(a_ptr + (first_row + ranks) * vocabulary + token_id, mask=mask, other=0.0)
            h = (values.to(tl.float32) * scaling).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + token.to(tl.int64) * h_token_stride + ranks, h, mask=mask)
