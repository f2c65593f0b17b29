"""Kernels of quantised weights on NVIDIA GPUs: products of decode steps, and what products of prompts need before
them."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-redef, assignment, var-annotated"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.triton_cuda_codes import codes_product, dequantised, inputs


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
    codes_ptr,  # int32 [blocks, out_features, WORDS]
    scales_ptr,  # float32 [groups, out_features]
    offsets_ptr,  # [groups, out_features] by OFFSETS: "values", float32; "zeros", int32; or None
    bias_ptr,  # [out_features]
    rows_ptr,  # [num_columns - out_features, in_features] of x's dtype
    out_ptr,  # [tokens, num_columns]
    partials_ptr,  # float32, a tile of products for each program, where there are several splits
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
    FORM: tl.constexpr,  # of the codes: "fp8", "i8", "i4", or "table", of 4 bits
    TABLE: tl.constexpr,  # of `TiledCodes`
    OFFSETS: tl.constexpr,
    SCALES_PRODUCTS: tl.constexpr,  # of values that x's dtype holds; else values are scaled, and rounded to it
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a group; 0: there is one
    WORDS: tl.constexpr,
    CODES: tl.constexpr,  # of a word, see `TiledCodes`
    CODES_OF_GROUP: tl.constexpr,  # of a word that are of one group
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
    token = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_OUT, BLOCK_TOKENS), tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    if tile < num_code_tiles:
        column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        column_end = out_features
        column_read = tl.where(column < out_features, column, 0)
        first_block = split * blocks_per_split
        total = codes_product(
            ordered_ptr,
            codes_ptr,
            scales_ptr,
            offsets_ptr,
            token,
            num_tokens,
            column_read,
            first_block,
            tl.minimum(first_block + blocks_per_split, num_blocks),
            ordered_stride,
            in_features,
            out_features,
            num_groups,
            dtype,
            FORM,
            TABLE,
            OFFSETS,
            SCALES_PRODUCTS,
            IS_EVEN,
            GROUP,
            WORDS,
            CODES,
            CODES_OF_GROUP,
            BLOCK_OUT,
            BLOCK_TOKENS,
            STAGES,
            IS_INTERPRETED,
        )
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
            x = inputs(x_ptr, token, num_tokens, x_stride, block * BLOCK_ROWS, in_features, BLOCK_ROWS, IS_EVEN)
            total = tl.dot(rows, tl.trans(x), total)
    if num_splits > 1:
        place = (tile * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * num_splits + split
        row = tl.arange(0, BLOCK_TOKENS)
        within = row[None, :] * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
        part_places = partials_ptr + place * BLOCK_OUT * BLOCK_TOKENS + within
        tl.store(part_places, total, mask=token[None, :] < num_tokens)
    else:
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[:, None]
        places = out_ptr + token[None, :].to(tl.int64) * num_columns + column[:, None]
        tl.store(places, total.to(dtype), mask=(column[:, None] < column_end) & (token[None, :] < num_tokens))


@triton.jit(do_not_specialize=["num_tokens", "num_code_tiles", "num_token_tiles", "num_splits"])
def sum_splits_kernel(
    partials_ptr,  # as above, and so on
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    num_columns,
    num_code_tiles,
    num_token_tiles,
    num_splits,
    HAS_BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tiles of columns, rows of tokens). Adds the splits' products up in the order of the inputs, AHEAD of them
    loaded at a time."""
    tile = tl.program_id(0)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column_end = out_features
    if tile >= num_code_tiles:
        column += out_features - num_code_tiles * BLOCK_OUT
        column_end = num_columns
    is_token = (token < num_tokens)[:, None]
    place = (tile * num_token_tiles + token // BLOCK_TOKENS).to(tl.int64) * num_splits
    place = place * BLOCK_TOKENS + token % BLOCK_TOKENS
    places = partials_ptr + place[:, None] * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[None, :]
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    for first in range(0, num_splits, AHEAD):
        parts = ()
        for ahead in tl.static_range(AHEAD):
            is_part = is_token & (first + ahead < num_splits)
            part = tl.load(places + (first + ahead) * (BLOCK_TOKENS * BLOCK_OUT), mask=is_part, other=0.0)
            parts = parts + (part,)
        for ahead in tl.static_range(AHEAD):
            total += parts[ahead]
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
    out_places = out_ptr + token[:, None].to(tl.int64) * num_columns + column[None, :]
    tl.store(out_places, total.to(out_ptr.dtype.element_ty), mask=is_token & (column < column_end)[None, :])


@triton.jit(do_not_specialize=["first_row", "last_row", "num_groups"])
def dequantise_kernel(
    out_ptr,  # [last_row - first_row, in_features]
    codes_ptr,  # as above, and so on
    scales_ptr,
    offsets_ptr,
    table_ptr,  # float32 [16]
    order_ptr,  # int32 [in_features]
    first_row,
    last_row,
    in_features,
    out_features,
    num_groups,
    FORM: tl.constexpr,
    OFFSETS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tiles of rows, blocks of the inputs)."""
    dtype = out_ptr.dtype.element_ty
    row = first_row + tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    mask = row < last_row
    block = tl.program_id(1)
    places = (block.to(tl.int64) * out_features + tl.where(mask, row, 0))[:, None] * WORDS + tl.arange(0, WORDS)[None]
    if DEPENDENT_LAUNCH:
        gdc_wait()
    words = tl.load(codes_ptr + places)
    for index in tl.static_range(CODES):
        first, stride = (block * CODES + index) * WORDS, 1
        if FORM == "table":
            first, stride = (block * CODES + index // 2 * 2) * WORDS + index % 2, 2
        values = dequantised(
            words,
            scales_ptr,
            offsets_ptr,
            table_ptr,
            first,
            num_groups,
            out_features,
            row,
            dtype,
            index,
            FORM,
            OFFSETS,
            GROUP,
            FORM == "table",
        )
        position = first + stride * tl.arange(0, WORDS)
        is_input = position < in_features
        if HAS_ORDER:
            position = tl.load(order_ptr + position, mask=is_input, other=0)
        out_places = out_ptr + (row - first_row)[:, None].to(tl.int64) * in_features + position[None, :]
        tl.store(out_places, values.to(dtype), mask=mask[:, None] & is_input[None, :])


@triton.jit(do_not_specialize=["first_row", "last_row"])
def gather_kernel(
    out_ptr,  # int32 [last_row - first_row, blocks * WORDS]
    codes_ptr,  # int32 [blocks, out_features, WORDS]
    first_row,
    last_row,
    out_features,
    num_blocks,
    WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tiles of rows, blocks of the inputs)."""
    row = first_row + tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    mask = (row < last_row)[:, None]
    block, word = tl.program_id(1).to(tl.int64), tl.arange(0, WORDS)[None, :]
    if DEPENDENT_LAUNCH:
        gdc_wait()
    words = tl.load(codes_ptr + (block * out_features + row[:, None]) * WORDS + word, mask=mask, other=0)
    places = ((row - first_row)[:, None].to(tl.int64) * num_blocks + block) * WORDS + word
    tl.store(out_ptr + places, words, mask=mask)


@triton.jit
def round_kernel(
    x_ptr,  # [num_tokens, in_features]
    codes_ptr,  # float8 [num_tokens, blocks * 4 * WORDS], each block in the order of a weight's bytes
    scales_ptr,  # float32 [num_tokens]
    in_features,
    x_stride,
    num_blocks,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tokens,). A scale for each token, by which its largest input becomes 448."""
    SIZE: tl.constexpr = 4 * WORDS
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCKS * SIZE)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    most = tl.zeros((BLOCKS * SIZE,), tl.float32)
    for first in range(0, num_blocks * SIZE, BLOCKS * SIZE):
        x = tl.load(x_ptr + token * x_stride + first + place, mask=first + place < in_features, other=0.0)
        most = tl.maximum(most, tl.abs(x.to(tl.float32)))
    largest = tl.max(most, axis=0)
    scale = tl.where(largest > 0, largest / 448, 1.0)
    tl.store(scales_ptr + token, scale)
    for first in range(0, num_blocks * SIZE, BLOCKS * SIZE):
        x = tl.load(x_ptr + token * x_stride + first + place, mask=first + place < in_features, other=0.0)
        codes = (x.to(tl.float32) / scale).to(codes_ptr.dtype.element_ty)
        codes = codes.reshape(BLOCKS, 4, WORDS).permute(0, 2, 1).reshape(BLOCKS * SIZE)
        places = codes_ptr + token * num_blocks * SIZE + first + place
        tl.store(places, codes, mask=first + place < num_blocks * SIZE)
