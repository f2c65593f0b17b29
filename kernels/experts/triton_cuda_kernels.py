"""Kernels of experts on NVIDIA GPUs: the order of pairs, products of plain weights and of codes, and the sum."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.triton_cuda_codes import codes_product

# Of one tensor, so that they begin anywhere.
_OF_PAIRS = ("experts_ptr", "tokens_ptr", "positions_ptr")


@triton.jit(do_not_specialize=("num_pairs", "num_chosen"), do_not_specialize_on_alignment=_OF_PAIRS)
def order_kernel(
    chosen_ptr,  # int64 [pairs]
    experts_ptr,  # int64 [pairs], by expert and then by token
    tokens_ptr,  # int64 [pairs], in that order
    positions_ptr,  # int64 [pairs], of each pair in that order
    ends_ptr,  # int32 [NUM_EXPERTS], where each expert's pairs end
    num_pairs,
    num_chosen,
    NUM_EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of pairs, then blocks of experts). A pair's position is the number of those that come before it."""
    num_blocks = tl.cdiv(num_pairs, PAIRS)
    block = tl.program_id(0)
    is_of_pairs = block < num_blocks
    mine = tl.where(is_of_pairs, block, block - num_blocks) * PAIRS + tl.arange(0, PAIRS)
    # An expert comes behind all pairs of it: as the pair behind the last one would.
    expert = tl.load(chosen_ptr + mine, mask=is_of_pairs & (mine < num_pairs), other=NUM_EXPERTS).to(tl.int32)
    expert = tl.where(is_of_pairs, expert, mine)
    place = tl.where(is_of_pairs, mine, num_pairs)
    count = tl.zeros((PAIRS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        others = start + tl.arange(0, BLOCK)
        other = tl.load(chosen_ptr + others, mask=others < num_pairs, other=NUM_EXPERTS + 1).to(tl.int32)
        is_earlier = (other[None, :] == expert[:, None]) & (others[None, :] < place[:, None])
        count += tl.sum(((other[None, :] < expert[:, None]) | is_earlier).to(tl.int32), axis=1)
    has_pair = is_of_pairs & (mine < num_pairs)
    tl.store(experts_ptr + count, expert.to(tl.int64), mask=has_pair)
    tl.store(tokens_ptr + count, (mine // num_chosen).to(tl.int64), mask=has_pair)
    tl.store(positions_ptr + mine, count.to(tl.int64), mask=has_pair)
    tl.store(ends_ptr + mine, count, mask=(block >= num_blocks) & (mine < NUM_EXPERTS))


@triton.jit
def product_kernel(
    rows_ptr,  # [pairs, INPUTS], by expert
    weight_ptr,  # [experts, OUTPUTS, INPUTS]
    out_ptr,  # [pairs, OUTPUTS]
    ends_ptr,  # int32 [experts]
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of columns, experts). Weights are the left operand, whose rows may fill a tensor core's."""
    expert = tl.program_id(1)
    end = tl.load(ends_ptr + expert)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inputs = tl.arange(0, BLOCK)
    # A block of columns that ends behind the last reads that one several times.
    held = tl.minimum(columns, OUTPUTS - 1)
    weights = weight_ptr + (expert.to(tl.int64) * OUTPUTS + held)[:, None] * INPUTS + inputs[None, :]
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        taken = tl.minimum(row, end - 1).to(tl.int64)
        rows = rows_ptr + taken[None, :] * INPUTS + inputs[:, None]
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for start in range(0, INPUTS, BLOCK):
            if INPUTS % BLOCK:
                is_input = start + inputs < INPUTS
                weight = tl.load(weights + start, mask=is_input[None, :], other=0.0)
                values = tl.load(rows + start, mask=is_input[:, None], other=0.0)
            else:
                weight = tl.load(weights + start)
                values = tl.load(rows + start)
            total = tl.dot(weight, values, total, input_precision="ieee")
        places = out_ptr + row.to(tl.int64)[None, :] * OUTPUTS + columns[:, None]
        mask = (row < end)[None, :] & (columns < OUTPUTS)[:, None]
        tl.store(places, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("num_chosen",), do_not_specialize_on_alignment=("positions_ptr",))
def sum_kernel(
    rows_ptr,  # [pairs, SIZE], by expert
    positions_ptr,  # int64 [tokens, chosen]
    weights_ptr,  # [tokens, chosen]
    out_ptr,  # [tokens, SIZE]
    num_chosen,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, blocks of columns): the weighted sum of a token's pairs, in float32 and in one order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(num_chosen):
        pair = token * num_chosen + index
        row = tl.load(rows_ptr + tl.load(positions_ptr + pair) * SIZE + columns, mask=mask, other=0.0)
        total += tl.load(weights_ptr + pair).to(tl.float32) * row.to(tl.float32)
    tl.store(out_ptr + token * SIZE + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_blocks", "num_groups"])
def expert_codes_kernel(
    x_ptr,  # [pairs, in_features], in the order of the experts
    ends_ptr,  # int32 [NUM_EXPERTS]: pairs up to each expert's last
    codes_ptr,  # as in `quantised_linear_kernel`, of all experts
    scales_ptr,  # also uint8: exponents of powers of two
    offsets_ptr,
    out_ptr,  # [pairs, out_features]
    in_features,
    out_features,  # of one expert
    all_features,
    num_blocks,
    num_groups,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two
    FORM: tl.constexpr,
    TABLE: tl.constexpr,
    OFFSETS: tl.constexpr,
    SCALES_PRODUCTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    CODES: tl.constexpr,
    CODES_OF_GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tiles of an expert's columns, tiles of pairs: as many as there can be)."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    each = tl.arange(0, EXPERTS)
    last = tl.load(ends_ptr + each, mask=each < NUM_EXPERTS, other=0)
    first = tl.load(ends_ptr + each - 1, mask=(each > 0) & (each < NUM_EXPERTS), other=0)
    num_tiles = (last - first + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    tiles_before = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tiles_before <= tl.program_id(1)).to(tl.int32))
    if expert < NUM_EXPERTS:
        is_own = each == expert
        own_tile = tl.program_id(1) - tl.sum(tl.where(is_own, tiles_before - num_tiles, 0))
        pair = tl.sum(tl.where(is_own, first, 0)) + own_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        pair_end = tl.sum(tl.where(is_own, last, 0))
        column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        total = codes_product(
            x_ptr,
            codes_ptr,
            scales_ptr,
            offsets_ptr,
            pair,
            pair_end,
            expert * out_features + tl.where(column < out_features, column, 0),
            0,
            num_blocks,
            in_features,
            in_features,
            all_features,
            num_groups,
            out_ptr.dtype.element_ty,
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
        places = out_ptr + pair[None, :].to(tl.int64) * out_features + column[:, None]
        mask = (column[:, None] < out_features) & (pair[None, :] < pair_end)
        tl.store(places, total.to(out_ptr.dtype.element_ty), mask=mask)
