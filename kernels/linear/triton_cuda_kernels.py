"""Kernels of quantised weights on NVIDIA GPUs: products of decode steps, and dequantisation for products of prompts."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# From nibble to float without a conversion, which is slow: beside the exponent of 2^23, or of 2^19 for the high one.
_LOW_BITS, _LOW = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)
_HIGH_BITS, _HIGH = tl.constexpr(0x49000000), tl.constexpr(524288.0)


@triton.jit
def _nibbles(codes, table_ptr, HAS_TABLE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """float32 values of the low and of the high codes in bytes."""
    codes = codes.to(tl.int32)
    if HAS_TABLE:
        low = _looked_up(codes & 15, table_ptr, IS_INTERPRETED)
        high = _looked_up(codes >> 4, table_ptr, IS_INTERPRETED)
    else:
        low = ((codes & 15) | _LOW_BITS).to(tl.float32, bitcast=True) - _LOW
        high = ((codes & 240) | _HIGH_BITS).to(tl.float32, bitcast=True) - _HIGH
    return low, high


@triton.jit
def _looked_up(codes, table_ptr, IS_INTERPRETED: tl.constexpr):
    """Values from the table; `tl.load` would take them through shared memory, as parts of the pipeline."""
    if IS_INTERPRETED:
        return tl.load(table_ptr + codes)
    return tl.inline_asm_elementwise(
        "{ .reg .u64 p; mad.wide.u32 p, $1, 4, $2; ld.global.nc.f32 $0, [p]; }",
        "=f,r,l",
        [codes, table_ptr.to(tl.int64, bitcast=True)],
        tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _scaled(
    values,
    scales_ptr,
    offsets_ptr,
    first,
    num_groups,
    out_features,
    column,
    HAS_OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """values [columns, inputs] of one group of inputs, from input `first` on, with its scale and offset."""
    mask = column < out_features
    place = column
    if GROUP > 0:
        group = first // GROUP
        mask = mask & (group < num_groups)
        place += group * out_features
    values *= tl.load(scales_ptr + place, mask=mask, other=0.0)[:, None]
    if HAS_OFFSETS:
        values += tl.load(offsets_ptr + place, mask=mask, other=0.0)[:, None]
    return values


@triton.jit
def _inputs(x_ptr, token, stride, first, in_features, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr):
    """[tokens, BLOCK] of x from input `first` on; zero past the last one."""
    position = first + tl.arange(0, BLOCK)
    places = x_ptr + token[:, None].to(tl.int64) * stride + position[None, :]
    if IS_EVEN:
        return tl.load(places)
    return tl.load(places, mask=position[None, :] < in_features, other=0.0)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_code_tiles",
        "num_blocks",
        "num_groups",
        "blocks_per_split",
        "row_blocks_per_split",
    ]
)
def quantised_linear_kernel(
    x_ptr,  # [tokens, in_features], rows of x_stride
    ordered_ptr,  # the same with the inputs in the order of the codes
    codes_ptr,  # [blocks, out_features, BLOCK]
    scales_ptr,  # float32 [groups, out_features]
    offsets_ptr,  # as scales
    table_ptr,  # float32 [16]
    bias_ptr,  # [out_features]
    rows_ptr,  # [num_columns - out_features, in_features] of x's dtype
    out_ptr,  # [tokens, num_columns]
    partials_ptr,  # float32, a tile of products for each program
    counters_ptr,  # int32, one for each tile: programs that are done; zero before and after
    num_tokens,
    in_features,
    out_features,
    num_columns,
    x_stride,
    ordered_stride,
    num_code_tiles,
    num_blocks,
    num_groups,
    blocks_per_split,
    row_blocks_per_split,
    num_splits,
    IS_NIBBLES: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a group; 0: there is one
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tiles of columns, tiles of tokens, splits of the inputs). Tiles of columns past the codes' are of rows."""
    tile = tl.program_id(0)
    split = tl.program_id(2)
    # Tokens past the last one read the first, and are not stored.
    token = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_read = tl.where(token < num_tokens, token, 0)
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_OUT, BLOCK_TOKENS), tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    if tile < num_code_tiles:
        column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        column_end = out_features
        column_read = tl.where(column < out_features, column, 0)
        code_places = codes_ptr + column_read[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        block_size = out_features.to(tl.int64) * BLOCK
        scale = tl.load(scales_ptr + column_read)[:, None]
        first_block = split * blocks_per_split
        last_block = tl.minimum(first_block + blocks_per_split, num_blocks)
        for block in tl.range(first_block, last_block, num_stages=STAGES):
            codes = tl.load(code_places + block * block_size)
            if IS_NIBBLES:
                first = block * 2 * BLOCK
                low, high = _nibbles(codes, table_ptr, HAS_TABLE, IS_INTERPRETED)
                if GROUP == 0 and not HAS_OFFSETS:
                    low *= scale
                    high *= scale
                else:
                    low = _scaled(
                        low, scales_ptr, offsets_ptr, first, num_groups, out_features, column, HAS_OFFSETS, GROUP
                    )
                    second = first + BLOCK
                    high = _scaled(
                        high, scales_ptr, offsets_ptr, second, num_groups, out_features, column, HAS_OFFSETS, GROUP
                    )
                x = _inputs(ordered_ptr, token_read, ordered_stride, first, in_features, BLOCK, IS_EVEN)
                total = tl.dot(low.to(dtype), tl.trans(x), total)
                x = _inputs(ordered_ptr, token_read, ordered_stride, first + BLOCK, in_features, BLOCK, IS_EVEN)
                total = tl.dot(high.to(dtype), tl.trans(x), total)
            else:
                first = block * BLOCK
                values = codes.to(tl.float32)
                if GROUP == 0 and not HAS_OFFSETS:
                    values *= scale
                else:
                    values = _scaled(
                        values, scales_ptr, offsets_ptr, first, num_groups, out_features, column, HAS_OFFSETS, GROUP
                    )
                x = _inputs(ordered_ptr, token_read, ordered_stride, first, in_features, BLOCK, IS_EVEN)
                total = tl.dot(values.to(dtype), tl.trans(x), total)
    else:
        column = out_features + (tile - num_code_tiles) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        column_end = num_columns
        row_read = tl.where(column < num_columns, column - out_features, 0)
        row_places = rows_ptr + row_read[:, None].to(tl.int64) * in_features
        first_block = split * row_blocks_per_split
        last_block = tl.minimum(first_block + row_blocks_per_split, tl.cdiv(in_features, BLOCK_ROWS))
        for block in tl.range(first_block, last_block, num_stages=STAGES):
            position = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            if IS_EVEN:
                rows = tl.load(row_places + position[None, :])
            else:
                rows = tl.load(row_places + position[None, :], mask=position[None, :] < in_features, other=0.0)
            x = _inputs(x_ptr, token_read, x_stride, block * BLOCK_ROWS, in_features, BLOCK_ROWS, IS_EVEN)
            total = tl.dot(rows, tl.trans(x), total)
    is_last = True
    if num_splits > 1:
        # The last program of a tile to be done adds all parts up, in the order of the inputs.
        place = tile * tl.num_programs(1) + tl.program_id(1)
        within = tl.arange(0, BLOCK_OUT)[:, None] * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
        tile_ptr = partials_ptr + place.to(tl.int64) * num_splits * BLOCK_OUT * BLOCK_TOKENS + within
        tl.store(tile_ptr + split * BLOCK_OUT * BLOCK_TOKENS, total)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters_ptr + place, 1, sem="acq_rel") == num_splits - 1
        if is_last:
            total = tl.zeros((BLOCK_OUT, BLOCK_TOKENS), tl.float32)
            for part in tl.range(num_splits, num_stages=1):
                total += tl.load(tile_ptr + part * BLOCK_OUT * BLOCK_TOKENS, cache_modifier=".cg")
            tl.store(counters_ptr + place, 0)
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[:, None]
        places = out_ptr + token[None, :].to(tl.int64) * num_columns + column[:, None]
        tl.store(places, total.to(dtype), mask=(column[:, None] < column_end) & (token[None, :] < num_tokens))


@triton.jit
def _store(out_ptr, order_ptr, row, first, in_features, values, mask, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """Write values [rows, BLOCK], those of the codes' positions from `first` on."""
    position = first + tl.arange(0, BLOCK)
    is_input = position < in_features
    if HAS_ORDER:
        position = tl.load(order_ptr + position, mask=is_input, other=0)
    places = out_ptr + row[:, None].to(tl.int64) * in_features + position[None, :]
    tl.store(places, values.to(out_ptr.dtype.element_ty), mask=mask[:, None] & is_input[None, :])


@triton.jit(do_not_specialize=["first_row", "last_row", "num_groups"])
def dequantise_kernel(
    out_ptr,  # [last_row - first_row, in_features]
    codes_ptr,  # as above, and so on
    scales_ptr,
    offsets_ptr,
    table_ptr,
    order_ptr,  # int32 [in_features]
    first_row,
    last_row,
    in_features,
    out_features,
    num_groups,
    IS_NIBBLES: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a group; 0: there is one
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tiles of rows, blocks of the inputs)."""
    row = first_row + tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    mask = row < last_row
    block = tl.program_id(1)
    places = (block.to(tl.int64) * out_features + tl.where(mask, row, 0))[:, None] * BLOCK + tl.arange(0, BLOCK)[None]
    if DEPENDENT_LAUNCH:
        gdc_wait()
    codes = tl.load(codes_ptr + places)
    if IS_NIBBLES:
        first = block * 2 * BLOCK
        low, high = _nibbles(codes, table_ptr, HAS_TABLE, IS_INTERPRETED)
        low = _scaled(low, scales_ptr, offsets_ptr, first, num_groups, out_features, row, HAS_OFFSETS, GROUP)
        _store(out_ptr, order_ptr, row - first_row, first, in_features, low, mask, HAS_ORDER, BLOCK)
        first += BLOCK
        high = _scaled(high, scales_ptr, offsets_ptr, first, num_groups, out_features, row, HAS_OFFSETS, GROUP)
        _store(out_ptr, order_ptr, row - first_row, first, in_features, high, mask, HAS_ORDER, BLOCK)
    else:
        first = block * BLOCK
        values = codes.to(tl.float32)
        values = _scaled(values, scales_ptr, offsets_ptr, first, num_groups, out_features, row, HAS_OFFSETS, GROUP)
        _store(out_ptr, order_ptr, row - first_row, first, in_features, values, mask, HAS_ORDER, BLOCK)
