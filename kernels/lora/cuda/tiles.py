"""Shared parts of the Triton LoRA kernels for NVIDIA GPUs: rows of a segment, rows of tokens, products, prefetching.

A tile is BLOCK_M tokens of one segment. Programs count tiles from the segment starts on the device and share the work
out evenly, each taking consecutive items, so that one launch shape serves every mix of adapters of one padded size,
loads stay in flight from item to item, and programs without an item leave at once.

Order of events under programmatic dependent launch (DEPENDENT_LAUNCH): a kernel may begin while the kernel before it
still runs. Before `gdc_wait` it reads only maps and rows, which no kernel of a step writes. Shrink lets its dependents
start after its own wait, so when expand starts, all work before shrink (the base product into `out`) is complete,
and expand may also read `out` before it waits for h. Every program waits before it ends, one without items too, so
that a kernel that waits for this one has waited for all before it.

Shape comments: M tokens of a tile, R ranks, K inputs, N columns.
"""

# Triton makes a parameter a constant of the compilation by annotation; their names are upper case, as is its custom.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ceil_div(number, divisor: tl.constexpr):
    return (number + divisor - 1) // divisor


@triton.jit
def pick(values, index, NUM: tl.constexpr):
    """values[index] of a tuple of scalars or pointers, for an index known at run time only."""
    picked = values[0]
    for i in tl.static_range(1, NUM):
        picked = tl.where(index == i, values[i], picked)
    return picked


@triton.jit
def rows_of(segment, slice_id, places_ptr, first_rows_ptr, ranks_ptr, num_places):
    """(place, first row, rank) of a segment in a slice; rank 0 where the adapter leaves group or slice alone."""
    place = tl.load(places_ptr + segment)
    first_row = tl.load(first_rows_ptr + segment)
    rank = tl.load(ranks_ptr + slice_id * num_places + place)
    rank = tl.where(first_row < 0, 0, rank)
    return place, tl.maximum(first_row, 0).to(tl.int64), rank


@triton.jit
def token_rows(tokens, token_mask, row_index_ptr, HAS_INDEX: tl.constexpr):
    """int64 rows of x and out that hold the tokens."""
    if HAS_INDEX:
        return tl.load(row_index_ptr + tokens, mask=token_mask, other=0).to(tl.int64)
    else:
        return tokens.to(tl.int64)


@triton.jit
def multiply(left, right, accumulator):
    """left @ right + accumulator in float32; float32 operands are not rounded to tf32."""
    return tl.dot(left, right, accumulator, input_precision="ieee")


@triton.jit
def prefetch_rows(row_ptrs, COLUMNS: tl.constexpr):
    """Ask for the first COLUMNS two-byte columns of the rows to be brought into the L2 cache."""
    lines = row_ptrs[:, None] + tl.arange(0, (COLUMNS + 63) // 64)[None, :] * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )
