"""`kernels.expert_lora.ops` on NVIDIA GPUs: one launch for x @ A.T of all pairs and slices, one for the product with B.

A program has one pair in decode steps, where the tokens of an adapter seldom share an expert, and a block of pairs in
steps with prompts. All that a launch depends on is
the number of pairs; which rows a pair has is read on the device, so a captured call does what a new one would.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.lora import MAX_KERNEL_RANK
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.skip import idle_maps
from kernels.platform import in_use
from kernels.triton_launch import count_compiled

_RANKS = 16  # at a time
_INPUTS = 256  # of a step of the shrink
_OUTPUTS = 1024  # of a program of the expand
# Above so many pairs of each expert, on average, programs have blocks of pairs.
_FEW_PAIRS = 16
_TILE_PAIRS, _TILE_OUTPUTS = 64, 128
_NOBODY = tl.constexpr(2**31 - 1)
_SIZES = ("num_places", "num_pairs", "num_segments")
# Single numbers are read from them, which lie anywhere in the step's inputs.
_MAPS = ("experts_ptr", "tokens_ptr", "segment_ptr", "first_rows_ptr", "places_ptr", "ranks_ptr", "scalings_ptr")


@triton.jit
def _rows_of(
    segment, expert, s, first_rows_ptr, places_ptr, ranks_ptr, scalings_ptr, num_places, NUM_EXPERTS: tl.constexpr
):
    """(first row, rank, scaling) of an expert in slice s of a segment's adapter; rank 0 where it has none of it, and
    for segment -1."""
    has_adapter = segment >= 0
    segment = tl.maximum(segment, 0)
    first = tl.load(first_rows_ptr + segment)
    place = tl.load(places_ptr + segment)
    has_rows = has_adapter & (first >= 0) & (place >= 0)
    place = s * num_places + tl.maximum(place, 0)
    rank = tl.where(has_rows, tl.load(ranks_ptr + place) // NUM_EXPERTS, 0)
    return first.to(tl.int64) + expert * rank, rank, tl.load(scalings_ptr + place)


@triton.jit(do_not_specialize=_SIZES[:2], do_not_specialize_on_alignment=_MAPS)
def expert_shrink_kernel(
    x_ptr,  # [pairs, INPUTS]
    h_ptr,  # float32 [slices, pairs, WIDTH]
    a0_ptr,  # [rows, INPUTS] of each slice
    a1_ptr,
    experts_ptr,
    tokens_ptr,
    segment_ptr,
    first_rows_ptr,
    places_ptr,
    ranks_ptr,
    scalings_ptr,
    num_places,
    num_pairs,
    INPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (pairs, slices)."""
    pair = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    segment = tl.load(segment_ptr + tl.load(tokens_ptr + pair))
    expert = tl.load(experts_ptr + pair)
    first, rank, scaling = _rows_of(
        segment, expert, s, first_rows_ptr, places_ptr, ranks_ptr, scalings_ptr, num_places, NUM_EXPERTS
    )
    a_ptr = a0_ptr
    if s == 1:
        a_ptr = a1_ptr
    for start in range(0, rank, RANKS):
        ranks = start + tl.arange(0, RANKS)
        h = tl.zeros((RANKS,), tl.float32)
        for column in range(0, INPUTS, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + pair * INPUTS + columns, mask=columns < INPUTS, other=0.0)
            mask = (ranks < rank)[:, None] & (columns < INPUTS)[None, :]
            a = tl.load(a_ptr + (first + ranks)[:, None] * INPUTS + columns[None, :], mask=mask, other=0.0)
            h += tl.sum(a.to(tl.float32) * x.to(a_ptr.dtype.element_ty).to(tl.float32)[None, :], axis=1)
        tl.store(h_ptr + (s * num_pairs + pair) * WIDTH + ranks, h * scaling, mask=ranks < rank)


@triton.jit(do_not_specialize=_SIZES[:2], do_not_specialize_on_alignment=_MAPS)
def expert_expand_kernel(
    h_ptr,  # float32 [slices, pairs, WIDTH]
    out_ptr,  # [pairs, NUM_SLICES * OUTPUTS]
    b0_ptr,  # [rows, OUTPUTS] of each slice
    b1_ptr,
    experts_ptr,
    tokens_ptr,
    segment_ptr,
    first_rows_ptr,
    places_ptr,
    ranks_ptr,
    scalings_ptr,
    num_places,
    num_pairs,
    OUTPUTS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (pairs, slices, blocks of outputs)."""
    pair = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    segment = tl.load(segment_ptr + tl.load(tokens_ptr + pair))
    expert = tl.load(experts_ptr + pair)
    first, rank, _ = _rows_of(
        segment, expert, s, first_rows_ptr, places_ptr, ranks_ptr, scalings_ptr, num_places, NUM_EXPERTS
    )
    if rank > 0:
        b_ptr = b0_ptr
        if s == 1:
            b_ptr = b1_ptr
        columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        delta = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, rank, RANKS):
            ranks = start + tl.arange(0, RANKS)
            h = tl.load(h_ptr + (s * num_pairs + pair) * WIDTH + ranks, mask=ranks < rank, other=0.0)
            mask = (ranks < rank)[:, None] & (columns < OUTPUTS)[None, :]
            b = tl.load(b_ptr + (first + ranks)[:, None] * OUTPUTS + columns[None, :], mask=mask, other=0.0)
            delta += tl.sum(b.to(tl.float32) * h[:, None], axis=0)
        places = out_ptr + pair * (NUM_SLICES * OUTPUTS) + s * OUTPUTS + columns
        out = tl.load(places, mask=columns < OUTPUTS, other=0.0).to(tl.float32)
        tl.store(places, (out + delta).to(out_ptr.dtype.element_ty), mask=columns < OUTPUTS)


@triton.jit
def _tile(experts_ptr, tokens_ptr, segment_ptr, num_pairs, num_segments, PAIRS: tl.constexpr):
    """(the program's pairs, a number for the expert and segment of each, which no pair has whose token has none)."""
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pairs < num_pairs
    expert = tl.load(experts_ptr + pairs, mask=is_pair, other=0).to(tl.int32)
    token = tl.load(tokens_ptr + pairs, mask=is_pair, other=0)
    segment = tl.load(segment_ptr + token, mask=is_pair, other=-1)
    return pairs, tl.where(segment >= 0, expert * num_segments + segment, _NOBODY)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MAPS)
def expert_shrink_tile_kernel(
    x_ptr,  # [pairs, INPUTS]
    h_ptr,  # float32 [slices, pairs, WIDTH]
    a0_ptr,  # [rows, INPUTS] of each slice
    a1_ptr,
    experts_ptr,
    tokens_ptr,
    segment_ptr,
    first_rows_ptr,
    places_ptr,
    ranks_ptr,
    scalings_ptr,
    num_places,
    num_pairs,
    num_segments,
    INPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of pairs, slices). The pairs of a block that share expert and adapter are multiplied together."""
    s = tl.program_id(1)
    pairs, met = _tile(experts_ptr, tokens_ptr, segment_ptr, num_pairs, num_segments, PAIRS)
    a_ptr = a0_ptr
    if s == 1:
        a_ptr = a1_ptr
    rows = x_ptr + pairs.to(tl.int64)[:, None] * INPUTS
    places = h_ptr + (s * num_pairs + pairs).to(tl.int64)[:, None] * WIDTH
    one = tl.min(met)
    while one < _NOBODY:
        has_it = (met == one)[:, None]
        segment, expert = one % num_segments, one // num_segments
        first, rank, scaling = _rows_of(
            segment, expert, s, first_rows_ptr, places_ptr, ranks_ptr, scalings_ptr, num_places, NUM_EXPERTS
        )
        for start in range(0, rank, RANKS):
            ranks = start + tl.arange(0, RANKS)
            h = tl.zeros((PAIRS, RANKS), tl.float32)
            for column in range(0, INPUTS, BLOCK):
                columns = column + tl.arange(0, BLOCK)
                x = tl.load(rows + columns[None, :], mask=has_it & (columns < INPUTS)[None, :], other=0.0)
                mask = (ranks < rank)[None, :] & (columns < INPUTS)[:, None]
                a = tl.load(a_ptr + (first + ranks)[None, :] * INPUTS + columns[:, None], mask=mask, other=0.0)
                h = tl.dot(x.to(a.dtype), a, h, input_precision="ieee")
            tl.store(places + ranks[None, :], h * scaling, mask=has_it & (ranks < rank)[None, :])
        one = tl.min(tl.where(met > one, met, _NOBODY))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MAPS)
def expert_expand_tile_kernel(
    h_ptr,  # float32 [slices, pairs, WIDTH]
    out_ptr,  # [pairs, NUM_SLICES * OUTPUTS]
    b0_ptr,  # [rows, OUTPUTS] of each slice
    b1_ptr,
    experts_ptr,
    tokens_ptr,
    segment_ptr,
    first_rows_ptr,
    places_ptr,
    ranks_ptr,
    scalings_ptr,
    num_places,
    num_pairs,
    num_segments,
    OUTPUTS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of pairs, slices, blocks of outputs), as the shrink."""
    s = tl.program_id(1)
    pairs, met = _tile(experts_ptr, tokens_ptr, segment_ptr, num_pairs, num_segments, PAIRS)
    b_ptr = b0_ptr
    if s == 1:
        b_ptr = b1_ptr
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_column = (columns < OUTPUTS)[None, :]
    rows = h_ptr + (s * num_pairs + pairs).to(tl.int64)[:, None] * WIDTH
    places = out_ptr + pairs.to(tl.int64)[:, None] * (NUM_SLICES * OUTPUTS) + s * OUTPUTS + columns[None, :]
    one = tl.min(met)
    while one < _NOBODY:
        has_it = (met == one)[:, None]
        segment, expert = one % num_segments, one // num_segments
        first, rank, _ = _rows_of(
            segment, expert, s, first_rows_ptr, places_ptr, ranks_ptr, scalings_ptr, num_places, NUM_EXPERTS
        )
        if rank > 0:
            delta = tl.zeros((PAIRS, BLOCK), tl.float32)
            for start in range(0, rank, RANKS):
                ranks = start + tl.arange(0, RANKS)
                h = tl.load(rows + ranks[None, :], mask=has_it & (ranks < rank)[None, :], other=0.0)
                mask = (ranks < rank)[:, None] & is_column
                b = tl.load(b_ptr + (first + ranks)[:, None] * OUTPUTS + columns[None, :], mask=mask, other=0.0)
                delta = tl.dot(h.to(b.dtype), b, delta, input_precision="ieee")
            out = tl.load(places, mask=has_it & is_column, other=0.0).to(tl.float32)
            tl.store(places, (out + delta).to(out_ptr.dtype.element_ty), mask=has_it & is_column)
        one = tl.min(tl.where(met > one, met, _NOBODY))


def expert_lora(x: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, pairs: Pairs) -> None:
    """See `ops.expert_lora`."""
    num_slices, num_pairs = len(stack.a), len(pairs.experts)
    inputs, outputs = stack.a[0].shape[1], stack.b[0].shape[1]
    assert num_slices <= 2 and all(b.shape[1] == outputs for b in stack.b), "one slice, or two of one width"
    h = torch.empty(num_slices, num_pairs, MAX_KERNEL_RANK, dtype=torch.float32, device=x.device)
    first_rows = maps.first_rows[stack.group]
    of_pairs = (pairs.experts, pairs.tokens, maps.token_segment, first_rows, maps.places, stack.ranks, stack.scalings)
    sizes: tuple[int, ...] = stack.ranks.stride(0), num_pairs
    constants = {"NUM_EXPERTS": pairs.num_experts, "WIDTH": MAX_KERNEL_RANK, "RANKS": _RANKS, "num_warps": 4}
    shrink, expand, num_programs, columns_of = expert_shrink_kernel, expert_expand_kernel, num_pairs, _OUTPUTS
    if num_pairs > _FEW_PAIRS * pairs.num_experts and not in_use(x.device).batch_invariant:
        shrink, expand, columns_of = expert_shrink_tile_kernel, expert_expand_tile_kernel, _TILE_OUTPUTS
        sizes += (len(maps.places),)
        constants["PAIRS"] = _TILE_PAIRS
        num_programs = triton.cdiv(num_pairs, _TILE_PAIRS)
    shrink[num_programs, num_slices](
        *(x, h, stack.a[0], stack.a[-1], *of_pairs, *sizes),
        INPUTS=inputs,
        BLOCK=min(_INPUTS, triton.next_power_of_2(inputs)),
        **constants,
    )
    block = min(columns_of, triton.next_power_of_2(outputs))
    expand[num_programs, num_slices, triton.cdiv(outputs, block)](
        *(h, out, stack.b[0], stack.b[-1], *of_pairs, *sizes),
        OUTPUTS=outputs,
        NUM_SLICES=num_slices,
        BLOCK=block,
        **constants,
    )


def warm_up(stacks: Sequence[LoraStack], dtype: torch.dtype, num_experts: int) -> None:
    """See `ops.warm_up`. The number of pairs is no constant of the kernels, but chooses between two."""
    for stack in stacks:
        device = stack.a[0].device
        maps = idle_maps(1, 1, stack)
        for num_pairs in (1, _FEW_PAIRS * num_experts + 1):
            zeros = torch.zeros(num_pairs, dtype=torch.int64, device=device)
            x = torch.zeros(num_pairs, stack.a[0].shape[1], dtype=dtype, device=device)
            out = torch.zeros(num_pairs, stack.output_width, dtype=dtype, device=device)
            expert_lora(x, out, stack, maps, Pairs(zeros, zeros, num_experts))


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return count_compiled(
        expert_shrink_kernel, expert_expand_kernel, expert_shrink_tile_kernel, expert_expand_tile_kernel
    )


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)
