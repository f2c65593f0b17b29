"""Triton kernels of the LoRA ops on NVIDIA GPUs for steps of one token, and their launches.

One token has the rows of one adapter to read, a few hundred kilobytes: what counts is that they are asked for at once,
by many cores, and before the wait for the kernel before. So cores share parts of the input and blocks of columns, and
products are sums of elementwise products in float32; tensor cores would multiply a tile of sixteen tokens.

Order of events under programmatic dependent launch, row selection and h are those of `triton_cuda_tiles`.

Shape comments: R ranks, K inputs, N columns, S splits.
"""

# Triton makes a parameter a constant of the compilation by annotation; their names are upper case, as is its custom.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.lora import MAX_KERNEL_RANK
from kernels.lora.cuda.configs import OneTokenExpand, OneTokenShrink
from kernels.lora.cuda.tiles import ceil_div, pick, prefetch_rows
from kernels.lora.maps import LoraMaps, LoraStack


@triton.jit
def _only_row(row_index_ptr, HAS_INDEX: tl.constexpr):
    """int64 row of x and out that holds the token."""
    row = tl.full([], 0, tl.int64)
    if HAS_INDEX:
        row = tl.load(row_index_ptr).to(tl.int64)
    return row


@triton.jit
def _active_rows(token_segment_ptr, places_ptr, first_rows_ptr):
    """(place, first row) of the token's adapter in the group; first row -1 where there is none."""
    segment = tl.load(token_segment_ptr)
    place = tl.load(places_ptr + segment, mask=segment >= 0, other=0)
    return place, tl.load(first_rows_ptr + segment, mask=segment >= 0, other=-1)


@triton.jit
def lora_shrink_one_token_kernel(
    x_ptr,
    a_ptrs,
    h_ptr,
    token_segment_ptr,
    places_ptr,
    first_rows_ptr,
    ranks_ptr,
    scalings_ptr,
    row_index_ptr,
    in_features,
    x_stride,
    a_stride,
    h_split_stride,
    h_slice_stride,
    num_places,
    NUM_SLICES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """h[split, slice, 0, :n] = scaling * x[row(0), part of the split] @ A[r : r + n, part of the split].T

    An item is one split of sixteen ranks of one slice. A split is PART inputs, the last what is left of them.
    """
    place, first_row = _active_rows(token_segment_ptr, places_ptr, first_rows_ptr)
    num_items = 0
    for i in tl.static_range(NUM_SLICES):
        # Without an adapter there may be no ranks to read: a pool too small for any has no places.
        rank = tl.load(ranks_ptr + i * num_places + place, mask=first_row >= 0, other=0)
        num_items += ceil_div(rank, 16) * NUM_SPLITS
    ranks = tl.arange(0, 16)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        block = item // NUM_SPLITS
        split = item % NUM_SPLITS
        slice_id = 0
        first_block = 0
        behind = ceil_div(tl.load(ranks_ptr + place), 16)
        for i in tl.static_range(1, NUM_SLICES):
            slice_id = tl.where(block >= behind, i, slice_id)
            first_block = tl.where(block >= behind, behind, first_block)
            behind += ceil_div(tl.load(ranks_ptr + i * num_places + place), 16)
        first_rank = (block - first_block) * 16
        is_there = first_rank + ranks < tl.load(ranks_ptr + slice_id * num_places + place)
        a_ptr = pick(a_ptrs, slice_id, NUM_SLICES) + (first_row + first_rank).to(tl.int64) * a_stride
        a_rows = a_ptr + ranks.to(tl.int64) * a_stride
        first_k = split * PART
        end_k = in_features
        if PART % BLOCK_K != 0:
            end_k = tl.minimum(first_k + PART, in_features)
        k = first_k + tl.arange(0, BLOCK_K)
        a = tl.load(a_rows[:, None] + k[None, :], mask=is_there[:, None] & (k < end_k)[None, :], other=0.0)
        if DEPENDENT_LAUNCH:
            gdc_wait()
            gdc_launch_dependents()
        x_row = x_ptr + _only_row(row_index_ptr, HAS_INDEX) * x_stride
        x = tl.load(x_row + k, mask=k < end_k, other=0.0).to(a.dtype)
        products = a.to(tl.float32) * x.to(tl.float32)[None, :]  # [R, K]
        for offset in tl.range(BLOCK_K, PART, BLOCK_K, num_stages=1):
            k = first_k + offset + tl.arange(0, BLOCK_K)
            a = tl.load(a_rows[:, None] + k[None, :], mask=is_there[:, None] & (k < end_k)[None, :], other=0.0)
            x = tl.load(x_row + k, mask=k < end_k, other=0.0).to(a.dtype)
            products += a.to(tl.float32) * x.to(tl.float32)[None, :]
        h = tl.sum(products, 1) * tl.load(scalings_ptr + slice_id * num_places + place)
        h_row = h_ptr + split * h_split_stride + slice_id * h_slice_stride + first_rank
        tl.store(h_row + ranks, h.to(h_ptr.dtype.element_ty), mask=is_there)
    if DEPENDENT_LAUNCH:
        gdc_wait()


@triton.jit
def _load_rows(b_ptr, rank, columns, width, first_rank):
    """Sixteen rows of B, [R, N]; zero where the adapter has fewer."""
    ranks = first_rank + tl.arange(0, 16)
    mask = (ranks < rank)[:, None] & (columns < width)[None, :]
    return tl.load(b_ptr + ranks.to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _sum_splits(h_ptr, rank, first_rank, h_split_stride, NUM_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Sum of the splits' partial products of sixteen ranks: float32 [R]."""
    ranks = first_rank + tl.arange(0, 16)
    splits = tl.arange(0, BLOCK_S)
    parts = h_ptr + splits[:, None] * h_split_stride + ranks[None, :]  # [S, R]
    mask = (splits < NUM_SPLITS)[:, None] & (ranks < rank)[None, :]
    return tl.sum(tl.load(parts, mask=mask, other=0.0).to(tl.float32), 0)


@triton.jit
def lora_expand_one_token_kernel(
    h_ptr,
    b_ptrs,
    out_ptr,
    token_segment_ptr,
    places_ptr,
    first_rows_ptr,
    ranks_ptr,
    row_index_ptr,
    widths,
    slice_starts,
    out_stride,
    h_split_stride,
    h_slice_stride,
    num_places,
    NUM_SLICES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERWRITE: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[row(0), columns of slice] (+)= sum over splits of h[split, slice, 0, :n] @ B[r : r + n]

    An item is one block of columns of one slice. BLOCK_S is the power of two that holds the splits.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    is_token = tl.load(token_segment_ptr) >= 0
    place, first_row = _active_rows(token_segment_ptr, places_ptr, first_rows_ptr)
    num_items = 0
    for i in tl.static_range(NUM_SLICES):
        num_items += tl.cdiv(widths[i], BLOCK_N)
    num_items = tl.where(is_token, num_items, 0)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        slice_id = 0
        first_block = 0
        behind = tl.cdiv(widths[0], BLOCK_N)
        for i in tl.static_range(1, NUM_SLICES):
            slice_id = tl.where(item >= behind, i, slice_id)
            first_block = tl.where(item >= behind, behind, first_block)
            behind += tl.cdiv(widths[i], BLOCK_N)
        rank = tl.load(ranks_ptr + slice_id * num_places + place, mask=first_row >= 0, other=0)
        if OVERWRITE or rank > 0:
            width = pick(widths, slice_id, NUM_SLICES)
            columns = (item - first_block) * BLOCK_N + tl.arange(0, BLOCK_N)
            b_ptr = pick(b_ptrs, slice_id, NUM_SLICES) + tl.maximum(first_row, 0).to(tl.int64) * width
            h_row = h_ptr + slice_id * h_slice_stride
            row = _only_row(row_index_ptr, HAS_INDEX)
            out_row = out_ptr + row * out_stride + pick(slice_starts, slice_id, NUM_SLICES)
            b = _load_rows(b_ptr, rank, columns, width, 0)
            delta = tl.zeros([BLOCK_N], dtype=tl.float32)
            if not OVERWRITE:
                delta = tl.load(out_row + columns, mask=columns < width, other=0.0).to(tl.float32)
            if DEPENDENT_LAUNCH:
                if rank > 16:
                    following = tl.minimum(16 + tl.arange(0, 64), rank - 1).to(tl.int64)
                    prefetch_rows(b_ptr + following * width + (item - first_block) * BLOCK_N, BLOCK_N)
                gdc_wait()
            h = _sum_splits(h_row, rank, 0, h_split_stride, NUM_SPLITS, BLOCK_S)
            delta += tl.sum(h[:, None] * b.to(tl.float32), 0)
            for first_rank in tl.range(16, rank, 16, num_stages=1):
                b = _load_rows(b_ptr, rank, columns, width, first_rank)
                h = _sum_splits(h_row, rank, first_rank, h_split_stride, NUM_SPLITS, BLOCK_S)
                delta += tl.sum(h[:, None] * b.to(tl.float32), 0)
            tl.store(out_row + columns, delta.to(out_ptr.dtype.element_ty), mask=columns < width)
    if DEPENDENT_LAUNCH:
        gdc_wait()


# More inputs at once would not fit the registers of a program.
_MAX_BLOCK_K = 512


def block_k(part: int) -> int:
    """Inputs of a block of the shrink, for parts of so many."""
    return min(_MAX_BLOCK_K, triton.next_power_of_2(part))


def launch_shrink(
    config: OneTokenShrink,
    num_cores: int,
    x: torch.Tensor,
    h: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    row_index: torch.Tensor | None,
    dependent: bool,
    options: dict[str, Any],
) -> None:
    """h: [splits, slices, 1, width]; options of the CUDA backend."""
    num_splits, num_slices, in_features = h.shape[0], len(stack.a), stack.a[0].shape[1]
    max_items = num_slices * num_splits * (MAX_KERNEL_RANK // 16)
    part = config.part(in_features, num_splits)
    lora_shrink_one_token_kernel[(min(max_items, config.programs_per_core * num_cores),)](
        x,
        stack.a,
        h,
        maps.token_segment,
        maps.places,
        maps.first_rows[stack.group],
        stack.ranks,
        stack.scalings,
        row_index,
        in_features,
        x.stride(0),
        stack.a[0].stride(0),
        h.stride(0),
        h.stride(1),
        stack.ranks.shape[1],
        NUM_SLICES=num_slices,
        NUM_SPLITS=num_splits,
        PART=part,
        BLOCK_K=block_k(part),
        HAS_INDEX=row_index is not None,
        DEPENDENT_LAUNCH=dependent,
        num_warps=config.num_warps,
        **options,
    )


def launch_expand(
    config: OneTokenExpand,
    num_cores: int,
    h: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    row_index: torch.Tensor | None,
    overwrite: bool,
    dependent: bool,
    options: dict[str, Any],
) -> None:
    """h: [splits, slices, 1, width]; options of the CUDA backend."""
    widths = tuple(b.shape[1] for b in stack.b)
    max_programs = config.programs_per_core * num_cores
    block_n, num_items = config.columns(widths, max_programs)
    lora_expand_one_token_kernel[(min(num_items, max_programs),)](
        h,
        stack.b,
        out,
        maps.token_segment,
        maps.places,
        maps.first_rows[stack.group],
        stack.ranks,
        row_index,
        widths,
        stack.slice_starts,
        out.stride(0),
        h.stride(0),
        h.stride(1),
        stack.ranks.shape[1],
        NUM_SLICES=len(widths),
        NUM_SPLITS=h.shape[0],
        BLOCK_S=triton.next_power_of_2(h.shape[0]),
        BLOCK_N=block_n,
        OVERWRITE=overwrite,
        HAS_INDEX=row_index is not None,
        DEPENDENT_LAUNCH=dependent,
        num_warps=config.num_warps,
        **options,
    )
