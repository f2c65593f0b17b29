"""Triton kernel for NVIDIA GPUs that adds h times B to the output, or writes it.

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
    TALLEST: tl.constexpr,
    STAGES: tl.constexpr,
    TALLEST_STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERWRITE: tl.constexpr,
):
    """num_blocks blocks of WIDE columns, all ranks in one block: h stays on the chip. Larger BLOCK_R, fewer columns."""
    BLOCK_N: tl.constexpr = WIDE if BLOCK_R == 16 else TALL if BLOCK_R <= 64 else TALLEST
    num_blocks = _narrower(num_blocks, width - first_column, WIDE, BLOCK_N)
    ranks = tl.arange(0, BLOCK_R)
    h = _load_h(h_rows, ranks, rank, token_mask, h_split_stride, NUM_SPLITS)
    base = tl.zeros([BLOCK_M, BLOCK_N], dtype=out_rows.dtype.element_ty)
    if not OVERWRITE:
        base = _load_out(out_rows, first_column, token_mask, width, num_blocks > 0, BLOCK_N, EVEN_N)
    NUM_STAGES: tl.constexpr = STAGES if BLOCK_R <= 64 else TALLEST_STAGES
    for step in tl.range(0, num_blocks, num_stages=NUM_STAGES):
        column = first_column + step * BLOCK_N
        b = _load_b(b_ptr, ranks, rank, column, width, BLOCK_N, EVEN_N)
        delta = multiply(h.to(b.dtype), b, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32))
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
    rank_blocks = ceil_div(rank, 16)
    delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in tl.range(0, num_blocks * rank_blocks, num_stages=STAGES):
        column = first_column + step // rank_blocks * BLOCK_N
        ranks = step % rank_blocks * 16 + tl.arange(0, 16)
        b = _load_b(b_ptr, ranks, rank, column, width, BLOCK_N, EVEN_N)
        h = _load_h(h_rows, ranks, rank, token_mask, h_split_stride, NUM_SPLITS)
        delta = multiply(h.to(b.dtype), b, delta)
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
    BLOCK_N_TALLEST: tl.constexpr,
    STAGES: tl.constexpr,
    TALLEST_STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERWRITE: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[row(t), columns of slice] (+)= sum over splits of h[split, slice, t, :n] @ B[r : r + n]

    An item is one block of columns of one tile. EVEN_N: every slice's width is a multiple of BLOCK_N.
    Nothing is computed beyond a rank rounded up to 16. Where that is 16, 32, 64 or 128, h stays on the chip for a run
    of blocks: of BLOCK_N columns for 16 ranks, of BLOCK_N_TALL, a divisor of it, for 32 and 64, and of
    BLOCK_N_TALLEST for 128.
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
        _place, first_row, rank = rows_of(segment, slice_id, places_ptr, first_rows_ptr, ranks_ptr, num_places)
        if OVERWRITE or rank > 0:
            width = pick(widths, slice_id, NUM_SLICES)
            tokens = start + tl.arange(0, BLOCK_M)
            token_mask = tokens < end
            rows = token_rows(tokens, token_mask, row_index_ptr, HAS_INDEX)
            out_rows = out_ptr + rows * out_stride + pick(slice_starts, slice_id, NUM_SLICES)
            column = (block - first_block) * BLOCK_N
            b_ptr = pick(b_ptrs, slice_id, NUM_SLICES) + first_row * width
            h_rows = h_ptr + slice_id * h_slice_stride + tokens.to(tl.int64) * h_token_stride
            if DEPENDENT_LAUNCH:
                near = tl.minimum(tl.arange(0, 16), tl.maximum(rank - 1, 0)).to(tl.int64)
                prefetch_rows(b_ptr + near * width + column, BLOCK_N)
                gdc_wait()
            # Rank 0 comes here to overwrite by zeros.
            blocks = tl.maximum(ceil_div(rank, 16), 1)
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
                    BLOCK_N_TALLEST,
                    STAGES,
                    TALLEST_STAGES,
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
                    BLOCK_N_TALLEST,
                    STAGES,
                    TALLEST_STAGES,
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
                    BLOCK_N_TALLEST,
                    STAGES,
                    TALLEST_STAGES,
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
                    BLOCK_N_TALLEST,
                    STAGES,
                    TALLEST_STAGES,
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
