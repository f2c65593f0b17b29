"""Triton kernels of the LoRA ops for NVIDIA GPUs: one shrink, one expand, one embedding gather.

Work items are tiles: BLOCK_M tokens of one segment. Each program counts the tiles from the segment starts on the device,
so one launch shape serves every mix of adapters of one padded size, and programs without an item leave at once.

Order of events under programmatic dependent launch (DEPENDENT_LAUNCH): a kernel may begin while the kernel before it
still runs. Before `gdc_wait` it reads only maps and rows, which no kernel of a step writes. Shrink lets its dependents
start after its own wait, so when expand starts, whatever ran before shrink (the base product into `out`) is complete,
and expand may also read `out` before it waits for h.

Shape comments: M tokens of a tile, R ranks, K inputs, N columns.
"""

# Triton turns parameters into compile-time constants by annotation; names of constants are upper case, as is its custom.
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
    """(place, first row, rank) of a segment in a slice; rank 0 where the adapter leaves the group or the slice alone."""
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
    BLOCK_K_WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """h[split, slice, t, :n] = scaling * x[row(t), part of the split] @ A[r : r + n, part of the split].T

    EVEN_K: every split has the same number of inputs, a multiple of BLOCK_K and of BLOCK_K_WIDE.
    Ranks up to 16 load their first block of A ahead of the wait; larger ranks go in blocks of BLOCK_R.
    """
    num_segments = tl.load(num_segments_ptr)
    running = _count_tiles(starts_ptr, num_segments, BLOCK_M, MAX_SEGMENTS)
    num_items = tl.max(running, 0) * (NUM_SLICES * NUM_SPLITS)
    # A split is a whole number of the larger block, so that both blocks divide it where K allows.
    split_size = tl.cdiv(tl.cdiv(in_features, NUM_SPLITS), BLOCK_K) * BLOCK_K
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        tile = item // (NUM_SLICES * NUM_SPLITS)
        slice_id = (item // NUM_SPLITS) % NUM_SLICES
        split = item % NUM_SPLITS
        segment, start, end = _find_tile(running, tile, starts_ptr, BLOCK_M, MAX_SEGMENTS)
        place, first_row, rank = _rows_of(segment, slice_id, places_ptr, first_rows_ptr, ranks_ptr, num_places)
        if rank > 0:
            a_ptr = _pick(a_ptrs, slice_id, NUM_SLICES) + first_row * in_features
            scaling = tl.load(scalings_ptr + slice_id * num_places + place)
            tokens = start + tl.arange(0, BLOCK_M)
            token_mask = tokens < end
            rows = _token_rows(tokens, token_mask, row_index_ptr, HAS_INDEX)
            x_rows = x_ptr + rows * x_stride
            first_k = split * split_size
            end_k = tl.minimum(first_k + split_size, in_features)
            h_rows = h_ptr + split * h_split_stride + slice_id * h_slice_stride + tokens.to(tl.int64) * h_token_stride
            if rank <= 16:
                ranks = tl.arange(0, 16)
                a_rows = a_ptr + ranks.to(tl.int64) * in_features
                a = _load_block(a_rows, ranks < rank, first_k, end_k, BLOCK_K, GROUPS, EVEN_K)
                if DEPENDENT_LAUNCH:
                    gdc_wait()
                    gdc_launch_dependents()
                x = _load_block(x_rows, token_mask, first_k, end_k, BLOCK_K, GROUPS, EVEN_K)
                narrow = _multiply_block(x, a, _zero_products(BLOCK_M, 16, GROUPS), GROUPS)
                for block in tl.range(first_k + BLOCK_K, end_k, BLOCK_K, num_stages=STAGES):
                    a = _load_block(a_rows, ranks < rank, block, end_k, BLOCK_K, GROUPS, EVEN_K)
                    x = _load_block(x_rows, token_mask, block, end_k, BLOCK_K, GROUPS, EVEN_K)
                    narrow = _multiply_block(x, a, narrow, GROUPS)
                _store_h(h_rows, ranks, rank, token_mask, narrow, scaling, GROUPS)
            else:
                if DEPENDENT_LAUNCH:
                    gdc_wait()
                    gdc_launch_dependents()
                for first_rank in tl.range(0, rank, BLOCK_R, num_stages=1):
                    ranks = first_rank + tl.arange(0, BLOCK_R)
                    a_rows = a_ptr + ranks.to(tl.int64) * in_features
                    wide = _zero_products(BLOCK_M, BLOCK_R, GROUPS)
                    for block in tl.range(first_k, end_k, BLOCK_K_WIDE, num_stages=STAGES):
                        a = _load_block(a_rows, ranks < rank, block, end_k, BLOCK_K_WIDE, GROUPS, EVEN_K)
                        x = _load_block(x_rows, token_mask, block, end_k, BLOCK_K_WIDE, GROUPS, EVEN_K)
                        wide = _multiply_block(x, a, wide, GROUPS)
                    _store_h(h_rows, ranks, rank, token_mask, wide, scaling, GROUPS)


@triton.jit
def _load_h(
    h_ptr,
    tokens,
    ranks,
    mask,
    h_split_stride,
    h_token_stride,
    NUM_SPLITS: tl.constexpr,
):
    """Sum of the splits' partial products, [M, R], always in the same order."""
    pointers = h_ptr + tokens.to(tl.int64)[:, None] * h_token_stride + ranks[None, :]
    h = tl.load(pointers, mask=mask, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        h += tl.load(pointers + split * h_split_stride, mask=mask, other=0.0)
    return h


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
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    OVERWRITE: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[row(t), columns of slice] (+)= sum over splits of h[split, slice, t, :n] @ B[r : r + n]

    EVEN_N: every slice's width is a multiple of BLOCK_N.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    num_segments = tl.load(num_segments_ptr)
    running = _count_tiles(starts_ptr, num_segments, BLOCK_M, MAX_SEGMENTS)
    num_blocks = tl.cdiv(widths[0], BLOCK_N)
    for i in tl.static_range(1, NUM_SLICES):
        num_blocks += tl.cdiv(widths[i], BLOCK_N)
    num_items = tl.max(running, 0) * num_blocks
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        tile = item // num_blocks
        block = item % num_blocks
        slice_id = 0
        first_block = 0
        next_first = tl.cdiv(widths[0], BLOCK_N)
        for i in tl.static_range(1, NUM_SLICES):
            slice_id = tl.where(block >= next_first, i, slice_id)
            first_block = tl.where(block >= next_first, next_first, first_block)
            next_first += tl.cdiv(widths[i], BLOCK_N)
        segment, start, end = _find_tile(running, tile, starts_ptr, BLOCK_M, MAX_SEGMENTS)
        _place, first_row, rank = _rows_of(segment, slice_id, places_ptr, first_rows_ptr, ranks_ptr, num_places)
        if OVERWRITE or rank > 0:
            width = _pick(widths, slice_id, NUM_SLICES)
            tokens = start + tl.arange(0, BLOCK_M)
            token_mask = tokens < end
            rows = _token_rows(tokens, token_mask, row_index_ptr, HAS_INDEX)
            columns = (block - first_block) * BLOCK_N + tl.arange(0, BLOCK_N)
            column_mask = columns < width
            if EVEN_N:
                out_mask = token_mask[:, None]
            else:
                out_mask = token_mask[:, None] & column_mask[None, :]
            first_column = _pick(slice_starts, slice_id, NUM_SLICES)
            out_tile = out_ptr + rows[:, None] * out_stride + (first_column + columns)[None, :]
            b_tile = _pick(b_ptrs, slice_id, NUM_SLICES) + first_row * width + columns[None, :]
            h_slice = h_ptr + slice_id * h_slice_stride
            # `out` first: it is the longest way, and with few tokens B of rank 16 joins it before the wait.
            if not OVERWRITE:
                base = tl.load(out_tile, mask=out_mask, other=0.0)  # [M, N]
            if rank <= 16:
                ranks = tl.arange(0, 16)
                rank_mask = ranks < rank
                if EVEN_N:
                    b_mask = rank_mask[:, None]
                else:
                    b_mask = rank_mask[:, None] & column_mask[None, :]
                b = tl.load(b_tile + ranks[:, None] * width, mask=b_mask, other=0.0)  # [R, N]
                if DEPENDENT_LAUNCH:
                    gdc_wait()
                h = _load_h(
                    h_slice,
                    tokens,
                    ranks,
                    token_mask[:, None] & rank_mask[None, :],
                    h_split_stride,
                    h_token_stride,
                    NUM_SPLITS,
                )
                delta = _multiply(h.to(b.dtype), b, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32))
            else:
                if DEPENDENT_LAUNCH:
                    gdc_wait()
                delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                for first_rank in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
                    ranks = first_rank + tl.arange(0, BLOCK_R)
                    rank_mask = ranks < rank
                    if EVEN_N:
                        b_mask = rank_mask[:, None]
                    else:
                        b_mask = rank_mask[:, None] & column_mask[None, :]
                    b = tl.load(b_tile + ranks[:, None] * width, mask=b_mask, other=0.0)
                    h = _load_h(
                        h_slice,
                        tokens,
                        ranks,
                        token_mask[:, None] & rank_mask[None, :],
                        h_split_stride,
                        h_token_stride,
                        NUM_SPLITS,
                    )
                    delta = _multiply(h.to(b.dtype), b, delta)
            if not OVERWRITE:
                delta += base.to(tl.float32)
            tl.store(out_tile, delta.to(out_ptr.dtype.element_ty), mask=out_mask)


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
