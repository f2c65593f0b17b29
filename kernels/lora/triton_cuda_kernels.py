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
    """Blocks of ranks that a slice of an adapter is computed in: ranks up to 16 are one block of 16."""
    return tl.where(rank <= 16, (rank + 15) // 16, (rank + BLOCK_R - 1) // BLOCK_R)


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
    a_rows,
    h_rows,
    ranks,
    rank,
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
    products = _zero_products(BLOCK_M, BLOCK_R, GROUPS)
    for step in tl.range(0, num_splits * BLOCKS_PER_SPLIT, num_stages=STAGES):
        first_k = (first_split * BLOCKS_PER_SPLIT + step) * BLOCK_K
        a = _load_block(a_rows, ranks < rank, first_k, in_features, BLOCK_K, GROUPS, EVEN_K)
        x = _load_block(x_rows, token_mask, first_k, in_features, BLOCK_K, GROUPS, EVEN_K)
        products = _multiply_block(x, a, products, GROUPS)
        if step % BLOCKS_PER_SPLIT == BLOCKS_PER_SPLIT - 1:
            split = first_split + step // BLOCKS_PER_SPLIT
            _store_h(h_rows + split * h_split_stride, ranks, rank, token_mask, products, scaling, GROUPS)
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
        first_rank = (rank_block - first_block) * BLOCK_R
        a_ptr = _pick(a_ptrs, slice_id, NUM_SLICES) + (first_row + first_rank) * in_features
        num_ranks = tl.minimum(rank - first_rank, BLOCK_R)
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
        if rank <= 16:
            few_ranks = tl.arange(0, 16)
            _shrink_run(
                x_rows,
                a_ptr + few_ranks.to(tl.int64) * in_features,
                h_rows,
                few_ranks,
                num_ranks,
                token_mask,
                scaling,
                first_split,
                num_splits,
                in_features,
                h_split_stride,
                BLOCK_M,
                16,
                BLOCK_K,
                BLOCKS_PER_SPLIT,
                GROUPS,
                STAGES,
                EVEN_K,
            )
        else:
            many_ranks = tl.arange(0, BLOCK_R)
            _shrink_run(
                x_rows,
                a_ptr + many_ranks.to(tl.int64) * in_features,
                h_rows,
                many_ranks,
                num_ranks,
                token_mask,
                scaling,
                first_split,
                num_splits,
                in_features,
                h_split_stride,
                BLOCK_M,
                BLOCK_R,
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
def _expand_run(
    h,
    b_ptr,
    out_rows,
    ranks,
    rank,
    token_mask,
    first_column,
    num_blocks,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERWRITE: tl.constexpr,
):
    """Consecutive blocks of columns, all ranks in one block."""
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
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERWRITE: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[row(t), columns of slice] (+)= sum over splits of h[split, slice, t, :n] @ B[r : r + n]

    An item is one block of columns of one tile. EVEN_N: every slice's width is a multiple of BLOCK_N.
    Ranks up to 16 take blocks [16, BLOCK_N] of B, ranks up to BLOCK_R tall ones [BLOCK_R, BLOCK_N_TALL], ranks up to
    2 BLOCK_R ones twice as tall and half as wide; these keep h on the chip for a run of blocks. Larger ranks go through
    h again for each block. BLOCK_N_TALL divides BLOCK_N.
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
            if rank <= 16:
                ranks = tl.arange(0, 16)
                h = _load_h(h_rows, ranks, rank, token_mask, h_split_stride, NUM_SPLITS)
                _expand_run(
                    h,
                    b_ptr,
                    out_rows,
                    ranks,
                    rank,
                    token_mask,
                    column,
                    num_blocks,
                    width,
                    BLOCK_M,
                    BLOCK_N,
                    STAGES,
                    EVEN_N,
                    OVERWRITE,
                )
            elif rank <= BLOCK_R:
                ranks = tl.arange(0, BLOCK_R)
                h = _load_h(h_rows, ranks, rank, token_mask, h_split_stride, NUM_SPLITS)
                _expand_run(
                    h,
                    b_ptr,
                    out_rows,
                    ranks,
                    rank,
                    token_mask,
                    column,
                    tl.minimum(num_blocks * (BLOCK_N // BLOCK_N_TALL), tl.cdiv(width - column, BLOCK_N_TALL)),
                    width,
                    BLOCK_M,
                    BLOCK_N_TALL,
                    STAGES,
                    EVEN_N,
                    OVERWRITE,
                )
            elif rank <= 2 * BLOCK_R:
                ranks = tl.arange(0, 2 * BLOCK_R)
                h = _load_h(h_rows, ranks, rank, token_mask, h_split_stride, NUM_SPLITS)
                _expand_run(
                    h,
                    b_ptr,
                    out_rows,
                    ranks,
                    rank,
                    token_mask,
                    column,
                    tl.minimum(num_blocks * (2 * BLOCK_N // BLOCK_N_TALL), tl.cdiv(width - column, BLOCK_N_TALL // 2)),
                    width,
                    BLOCK_M,
                    BLOCK_N_TALL // 2,
                    STAGES,
                    EVEN_N,
                    OVERWRITE,
                )
            else:
                for step in tl.range(0, num_blocks * (BLOCK_N // BLOCK_N_TALL), num_stages=1):
                    here = column + step * BLOCK_N_TALL
                    delta = tl.zeros([BLOCK_M, BLOCK_N_TALL], dtype=tl.float32)
                    for first_rank in tl.range(0, rank, BLOCK_R, num_stages=1):
                        ranks = first_rank + tl.arange(0, BLOCK_R)
                        b = _load_b(b_ptr, ranks, rank, here, width, BLOCK_N_TALL, False)
                        h = _load_h(h_rows, ranks, rank, token_mask, h_split_stride, NUM_SPLITS)
                        delta = _multiply(h.to(b.dtype), b, delta)
                    if not OVERWRITE:
                        delta += _load_out(out_rows, here, token_mask, width, True, BLOCK_N_TALL, False).to(tl.float32)
                    _store_out(out_rows, here, token_mask, width, delta, BLOCK_N_TALL, False)
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
