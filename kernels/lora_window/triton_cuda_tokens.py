"""Triton kernels for NVIDIA GPUs that add the expand to a product token by token, for steps of about as many adapters.

A program has one token and a block of columns. All rows of B that it needs for sixteen ranks are asked for at once, and
products are sums of elementwise products: tensor cores would multiply a tile of sixteen tokens. Where tokens share an
adapter, each reads its B anew, which `triton_cuda_tiles` avoids.

Order of events and shape letters: `kernels.lora_window.triton_cuda_tiles`.
"""

# Triton makes a parameter a constant of the compilation by annotation; their names are upper case, as is its custom.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.lora.cuda.tiles import pick
from kernels.lora_window.triton_cuda_tiles import find_columns, load_first_ranks


@triton.jit
def _expand_token(
    h_ptr,
    b_ptr,
    h,
    b,
    first_row,
    rank,
    scaling,
    columns,
    width,
    NUM_SLICES: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """scaling * h @ B of one token: float32 [N]. h_ptr points at the slice's column of row 0."""
    ranks = tl.arange(0, 16)
    b = tl.where((ranks < rank)[:, None], b, 0.0)
    delta = tl.sum(tl.where(ranks < rank, h, 0.0).to(tl.float32)[:, None] * b.to(tl.float32), 0)
    for first_rank in tl.range(16, rank, 16, num_stages=1):
        rows = first_row + first_rank + tl.arange(0, 16)
        is_there = first_rank + tl.arange(0, 16) < rank
        mask = is_there[:, None]
        if not EVEN_N:
            mask = mask & (columns < width)[None, :]
        b = tl.load(b_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0)
        h = tl.load(h_ptr + rows * NUM_SLICES, mask=is_there, other=0.0)
        delta += tl.sum(h.to(tl.float32)[:, None] * b.to(tl.float32), 0)
    return delta * scaling


@triton.jit
def lora_expand_token_kernel(
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
    num_places,
    NUM_SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """`lora_expand_tile_kernel` for one token."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    token = tl.program_id(0)
    segment = tl.load(token_segment_ptr + token)
    if segment >= 0:
        first_row = tl.load(first_rows_ptr + segment)
        place = tl.load(places_ptr + segment)
        slice_id, columns = find_columns(widths, tl.program_id(1), NUM_SLICES, BLOCK_N)
        width = pick(widths, slice_id, NUM_SLICES)
        b_ptr = pick(b_ptrs, slice_id, NUM_SLICES)
        b = load_first_ranks(b_ptr, first_row, columns, width, EVEN_N)
        rank = tl.load(ranks_ptr + slice_id * num_places + place, mask=first_row >= 0, other=0)
        scaling = tl.load(scalings_ptr + slice_id * num_places + place, mask=first_row >= 0, other=0.0)
        row = product_ptr + token.to(tl.int64) * product_stride
        out = row + pick(slice_starts, slice_id, NUM_SLICES) + columns
        h_ptr = row + out_features + slice_id
        mask = columns < width
        if EVEN_N:
            mask = columns >= 0
        if DEPENDENT_LAUNCH:
            gdc_wait()
        base = tl.load(out, mask=mask, other=0.0)
        h = tl.load(h_ptr + (tl.maximum(first_row, 0) + tl.arange(0, 16)) * NUM_SLICES)
        if rank > 0:
            delta = _expand_token(h_ptr, b_ptr, h, b, first_row, rank, scaling, columns, width, NUM_SLICES, EVEN_N)
            tl.store(out, (base.to(tl.float32) + delta).to(product_ptr.dtype.element_ty), mask=mask)
    if DEPENDENT_LAUNCH:
        gdc_wait()


@triton.jit
def swiglu_token_kernel(
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
    num_places,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """`swiglu_tile_kernel` for one token."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    token = tl.program_id(0)
    segment = tl.load(token_segment_ptr + token)
    first_row = tl.load(first_rows_ptr + segment, mask=segment >= 0, other=-1)
    place = tl.load(places_ptr + segment, mask=segment >= 0, other=0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_b = load_first_ranks(gate_b_ptr, first_row, columns, size, EVEN_N)
    up_b = load_first_ranks(up_b_ptr, first_row, columns, size, EVEN_N)
    gate_rank = tl.load(ranks_ptr + place, mask=first_row >= 0, other=0)
    up_rank = tl.load(ranks_ptr + num_places + place, mask=first_row >= 0, other=0)
    gate_scaling = tl.load(scalings_ptr + place, mask=first_row >= 0, other=0.0)
    up_scaling = tl.load(scalings_ptr + num_places + place, mask=first_row >= 0, other=0.0)
    row = product_ptr + token.to(tl.int64) * product_stride
    mask = columns < size
    if EVEN_N:
        mask = columns >= 0
    if DEPENDENT_LAUNCH:
        gdc_wait()
    gate = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + size + columns, mask=mask, other=0.0).to(tl.float32)
    if gate_rank + up_rank > 0:
        h_ptr = row + 2 * size
        h_columns = (first_row + tl.arange(0, 16)) * 2
        gate_h, up_h = tl.load(h_ptr + h_columns), tl.load(h_ptr + 1 + h_columns)
        gate += _expand_token(
            h_ptr, gate_b_ptr, gate_h, gate_b, first_row, gate_rank, gate_scaling, columns, size, 2, EVEN_N
        )
        up += _expand_token(h_ptr + 1, up_b_ptr, up_h, up_b, first_row, up_rank, up_scaling, columns, size, 2, EVEN_N)
    out = out_ptr + token.to(tl.int64) * size + columns
    tl.store(out, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=mask)
