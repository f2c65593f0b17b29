"""Triton kernels for NVIDIA GPUs that write h: the shrink of a linear projection and the gather of an embedding.

How work is shared out, the order of events and the shape letters: `triton_cuda_tiles`.
"""

# Triton makes a parameter a constant of the compilation by annotation; their names are upper case, as is its custom.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.lora.cuda.tiles import ceil_div, multiply, pick, prefetch_rows, rows_of, token_rows


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
        return multiply(x.to(a.dtype), tl.trans(a), accumulator)
    else:
        return multiply(x.to(a.dtype), tl.permute(a, (0, 2, 1)), accumulator)


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
    sixteens = ceil_div(rank, 16)
    blocks = sixteens // (BLOCK_R // 16)
    for i in tl.static_range(4, 7):
        if (1 << i) < BLOCK_R:
            blocks += (sixteens >> (i - 4)) & 1
    return blocks


@triton.jit
def _rank_block(index, rank, BLOCK_R: tl.constexpr):
    """(first rank, ranks that are there) of a block: as many of BLOCK_R as fit, then at most one of each half of it,
    down to 16. So nothing is computed beyond the rank rounded up to 16.
    """
    tl.static_assert(BLOCK_R <= 128)
    sixteens = ceil_div(rank, 16)
    whole = sixteens // (BLOCK_R // 16)
    first = index * BLOCK_R
    height = BLOCK_R
    next_first = whole * BLOCK_R
    next_index = whole
    for i in tl.static_range(6, 3, -1):
        if (1 << i) < BLOCK_R:
            is_there = (sixteens >> (i - 4)) & 1
            is_this = (is_there == 1) & (index == next_index)
            first = tl.where(is_this, next_first, first)
            height = tl.where(is_this, 1 << i, height)
            next_first += is_there * (1 << i)
            next_index += is_there
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
    a_stride,
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
    a_rows = a_ptr + ranks.to(tl.int64) * a_stride
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
    a_stride,
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
        a_ptr = pick(a_ptrs, slice_id, NUM_SLICES) + (first_row + first_rank) * a_stride
        if DEPENDENT_LAUNCH:
            near = tl.minimum(tl.arange(0, 16), num_ranks - 1).to(tl.int64)
            prefetch_rows(a_ptr + near * a_stride + first_split * (BLOCKS_PER_SPLIT * BLOCK_K), BLOCK_K)
            gdc_wait()
            gdc_launch_dependents()
        scaling = tl.load(scalings_ptr + slice_id * num_places + place)
        tokens = start + tl.arange(0, BLOCK_M)
        token_mask = tokens < end
        x_rows = x_ptr + token_rows(tokens, token_mask, row_index_ptr, HAS_INDEX) * x_stride
        h_rows = h_ptr + slice_id * h_slice_stride + tokens.to(tl.int64) * h_token_stride + first_rank
        for i in tl.static_range(4, 8):
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
                        a_stride,
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
    a_stride,
    h_token_stride,
    BLOCK_R: tl.constexpr,
    HAS_INDEX: tl.constexpr,
):
    """h[t, :n] = scaling * A[r : r + n, token_ids[row(t)]]; one program per token."""
    token = tl.program_id(0)
    segment = tl.load(token_segment_ptr + token)
    if segment >= 0:
        place, first_row, rank = rows_of(segment, 0, places_ptr, first_rows_ptr, ranks_ptr, 0)
        scaling = tl.load(scalings_ptr + place)
        row = token
        if HAS_INDEX:
            row = tl.load(row_index_ptr + token)
        token_id = tl.load(token_ids_ptr + row)
        for first_rank in tl.range(0, rank, BLOCK_R):
            ranks = first_rank + tl.arange(0, BLOCK_R)
            mask = ranks < rank
            values = tl.load(a_ptr + (first_row + ranks) * a_stride + token_id, mask=mask, other=0.0)
            h = (values.to(tl.float32) * scaling).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + token.to(tl.int64) * h_token_stride + ranks, h, mask=mask)
