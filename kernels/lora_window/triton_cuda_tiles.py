"""Triton kernels for NVIDIA GPUs that add the expand to a product whose last columns are h, for tiles of tokens.

A tile is BLOCK_M consecutive tokens of the step, whatever their adapters. The tokens of an adapter stand together, so
those of a tile belong to a few consecutive segments. The first axis of the grid is (tile, turn): the programs of a tile
take its segments in turn, and each handles the tokens of its segments only. The second axis is blocks of columns.

What such a kernel takes is latency: of loads that wait for one another, since one program has little to do. So h and B
are asked for as soon as the first row is known, without a look at the rank, which stands in a table of the layer's own,
and what is past the rank is dropped later. (The sixteen rows from an adapter's first one on are its own.)

Order of events under programmatic dependent launch: as in `kernels.lora.cuda.tiles`. Before `gdc_wait` only maps
and rows are read.

Shape comments: M tokens of a tile, R ranks, N columns.
"""

# Triton makes a parameter a constant of the compilation by annotation; their names are upper case, as is its custom.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.lora.cuda.tiles import multiply, pick


@triton.jit
def _segments_of_tile(token_segment_ptr, first_token, num_tokens, BLOCK_M: tl.constexpr):
    """(segment of each token, -1 for base, -2 past the last one [M]; first segment of the tile; how many it has)."""
    tokens = first_token + tl.arange(0, BLOCK_M)
    segments = tl.load(token_segment_ptr + tokens, mask=tokens < num_tokens, other=-2)
    # Base tokens come last: a tile whose first token is one has no segment.
    first = tl.load(token_segment_ptr + first_token)
    return segments, first, tl.where(first < 0, 0, tl.max(segments, 0) + 1 - first)


@triton.jit
def find_columns(widths, block, NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """(slice, its columns [N]) of a block."""
    slice_id = 0
    first_block = 0
    next_first = tl.cdiv(widths[0], BLOCK_N)
    for i in tl.static_range(1, NUM_SLICES):
        slice_id = tl.where(block >= next_first, i, slice_id)
        first_block = tl.where(block >= next_first, next_first, first_block)
        next_first += tl.cdiv(widths[i], BLOCK_N)
    return slice_id, (block - first_block) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def load_first_ranks(b_ptr, first_row, columns, width, EVEN_N: tl.constexpr):
    """Sixteen rows of B, [R, N], whatever the rank; nothing is read for a first row of -1."""
    rows = tl.maximum(first_row, 0).to(tl.int64) + tl.arange(0, 16)
    mask = first_row >= 0
    if not EVEN_N:
        mask = mask & (columns < width)[None, :]
    return tl.load(b_ptr + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _load_first_h(h_rows, first_row, token_mask, NUM_SLICES: tl.constexpr):
    """h of sixteen ranks, [M, R], whatever the rank; h_rows [M] points at the slice's column of row 0."""
    columns = (tl.maximum(first_row, 0) + tl.arange(0, 16)) * NUM_SLICES
    return tl.load(h_rows[:, None] + columns[None, :], mask=(token_mask & (first_row >= 0))[:, None], other=0.0)


@triton.jit
def _expand(
    h_rows,
    b_ptr,
    h,
    b,
    first_row,
    rank,
    scaling,
    token_mask,
    columns,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """scaling * h @ B of one segment: float32 [M, N].

    h_rows as for `_load_first_h`; h [M, R] and b [R, N] of the first sixteen ranks; columns [N] of the slice.
    """
    ranks = tl.arange(0, 16)
    h = tl.where((ranks < rank)[None, :], h, 0.0)
    b = tl.where((ranks < rank)[:, None], b, 0.0)
    delta = multiply(h, b, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32))
    for first_rank in tl.range(16, rank, 16, num_stages=STAGES):
        ranks = first_rank + tl.arange(0, 16)
        mask = (ranks < rank)[:, None]
        if not EVEN_N:
            mask = mask & (columns < width)[None, :]
        rows = (first_row + ranks).to(tl.int64)
        b = tl.load(b_ptr + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
        h_mask = token_mask[:, None] & (ranks < rank)[None, :]
        h = tl.load(h_rows[:, None] + ((first_row + ranks) * NUM_SLICES)[None, :], mask=h_mask, other=0.0)
        delta = multiply(h, b, delta)
    return delta * scaling


@triton.jit(do_not_specialize=["num_tokens", "num_turns"])
def lora_expand_tile_kernel(
    product_ptr,
    b_ptrs,
    token_segment_ptr,
    places_ptr,
    first_rows_ptr,
    ranks_ptr,
    scalings_ptr,
    widths,
    slice_starts,
    out_features,
    product_stride,
    num_tokens,
    num_turns,
    num_places,
    NUM_SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """product[t, slice s] += scaling * h[t, s] @ b[s]; a block of columns belongs to one slice.

    EVEN_N: every slice's width is a multiple of BLOCK_N.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    first_token = tl.program_id(0) // num_turns * BLOCK_M
    segments, first, num_segments = _segments_of_tile(token_segment_ptr, first_token, num_tokens, BLOCK_M)
    slice_id, columns = find_columns(widths, tl.program_id(1), NUM_SLICES, BLOCK_N)
    width = pick(widths, slice_id, NUM_SLICES)
    b_ptr = pick(b_ptrs, slice_id, NUM_SLICES)
    rows = product_ptr + (first_token + tl.arange(0, BLOCK_M)).to(tl.int64) * product_stride
    out = rows[:, None] + (pick(slice_starts, slice_id, NUM_SLICES) + columns)[None, :]
    for turn in tl.range(tl.program_id(0) % num_turns, num_segments, num_turns, num_stages=1):
        first_row = tl.load(first_rows_ptr + first + turn)
        place = tl.load(places_ptr + first + turn)
        b = load_first_ranks(b_ptr, first_row, columns, width, EVEN_N)
        rank = tl.load(ranks_ptr + slice_id * num_places + place, mask=first_row >= 0, other=0)
        scaling = tl.load(scalings_ptr + slice_id * num_places + place, mask=first_row >= 0, other=0.0)
        token_mask = segments == first + turn
        mask = token_mask[:, None]
        if not EVEN_N:
            mask = mask & (columns < width)[None, :]
        if DEPENDENT_LAUNCH:
            gdc_wait()
        base = tl.load(out, mask=mask, other=0.0)
        h = _load_first_h(rows + out_features + slice_id, first_row, token_mask, NUM_SLICES)
        if rank > 0:
            delta = _expand(
                rows + out_features + slice_id,
                b_ptr,
                h,
                b,
                first_row,
                rank,
                scaling,
                token_mask,
                columns,
                width,
                BLOCK_M,
                BLOCK_N,
                NUM_SLICES,
                STAGES,
                EVEN_N,
            )
            tl.store(out, (base.to(tl.float32) + delta).to(product_ptr.dtype.element_ty), mask=mask)
    if DEPENDENT_LAUNCH:
        gdc_wait()


@triton.jit(do_not_specialize=["num_tokens", "num_turns"])
def swiglu_tile_kernel(
    product_ptr,
    gate_b_ptr,
    up_b_ptr,
    out_ptr,
    token_segment_ptr,
    places_ptr,
    first_rows_ptr,
    ranks_ptr,
    scalings_ptr,
    size,
    product_stride,
    num_tokens,
    num_turns,
    num_places,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[t] = silu(gate) * up of product + delta. The base tokens of a tile count as one more segment, without rows.

    EVEN_N: size is a multiple of BLOCK_N.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    first_token = tl.program_id(0) // num_turns * BLOCK_M
    segments, first, num_segments = _segments_of_tile(token_segment_ptr, first_token, num_tokens, BLOCK_M)
    num_parts = num_segments + tl.max((segments == -1).to(tl.int32), 0)
    tokens = first_token + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = product_ptr + tokens.to(tl.int64) * product_stride
    for turn in tl.range(tl.program_id(0) % num_turns, num_parts, num_turns, num_stages=1):
        has_rows = turn < num_segments
        first_row = tl.load(first_rows_ptr + first + turn, mask=has_rows, other=-1)
        place = tl.load(places_ptr + first + turn, mask=has_rows, other=0)
        gate_b = load_first_ranks(gate_b_ptr, first_row, columns, size, EVEN_N)
        up_b = load_first_ranks(up_b_ptr, first_row, columns, size, EVEN_N)
        gate_rank = tl.load(ranks_ptr + place, mask=first_row >= 0, other=0)
        up_rank = tl.load(ranks_ptr + num_places + place, mask=first_row >= 0, other=0)
        gate_scaling = tl.load(scalings_ptr + place, mask=first_row >= 0, other=0.0)
        up_scaling = tl.load(scalings_ptr + num_places + place, mask=first_row >= 0, other=0.0)
        token_mask = segments == tl.where(has_rows, first + turn, -1)
        mask = token_mask[:, None]
        if not EVEN_N:
            mask = mask & (columns < size)[None, :]
        if DEPENDENT_LAUNCH:
            gdc_wait()
        gate = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(rows[:, None] + (size + columns)[None, :], mask=mask, other=0.0).to(tl.float32)
        gate_h = _load_first_h(rows + 2 * size, first_row, token_mask, 2)
        up_h = _load_first_h(rows + 2 * size + 1, first_row, token_mask, 2)
        if gate_rank + up_rank > 0:
            gate += _expand(
                rows + 2 * size,
                gate_b_ptr,
                gate_h,
                gate_b,
                first_row,
                gate_rank,
                gate_scaling,
                token_mask,
                columns,
                size,
                BLOCK_M,
                BLOCK_N,
                2,
                STAGES,
                EVEN_N,
            )
            up += _expand(
                rows + 2 * size + 1,
                up_b_ptr,
                up_h,
                up_b,
                first_row,
                up_rank,
                up_scaling,
                token_mask,
                columns,
                size,
                BLOCK_M,
                BLOCK_N,
                2,
                STAGES,
                EVEN_N,
            )
        out = out_ptr + tokens.to(tl.int64)[:, None] * size + columns[None, :]
        tl.store(out, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=mask)
    if DEPENDENT_LAUNCH:
        gdc_wait()
