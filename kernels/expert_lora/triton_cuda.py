"""`kernels.expert_lora.ops` on NVIDIA GPUs: one launch for x @ A.T of all pairs and slices, one for the product with B.

A program has one pair: in decode steps the tokens of an adapter seldom share an expert. All that a launch depends on is
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
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.max_rank import MAX_KERNEL_RANK
from kernels.triton_launch import count_compiled

_RANKS = 16  # at a time
_INPUTS = 256  # of a step of the shrink
_OUTPUTS = 128  # of a program of the expand
_SIZES = ("num_places", "num_pairs")
# Single numbers are read from them, which lie anywhere in the step's inputs.
_MAPS = ("experts_ptr", "tokens_ptr", "segment_ptr", "first_rows_ptr", "places_ptr", "ranks_ptr", "scalings_ptr")


@triton.jit
def _rows_of(
    pair,
    s,
    experts_ptr,
    tokens_ptr,
    segment_ptr,
    first_rows_ptr,
    places_ptr,
    ranks_ptr,
    num_places,
    NUM_EXPERTS: tl.constexpr,
):
    """(first row, rank, place) of the pair's expert in slice s; rank 0 for pairs without an adapter of it."""
    segment = tl.load(segment_ptr + tl.load(tokens_ptr + pair))
    has_adapter = segment >= 0
    segment = tl.maximum(segment, 0)
    first = tl.load(first_rows_ptr + segment)
    place = tl.load(places_ptr + segment)
    has_rows = has_adapter & (first >= 0) & (place >= 0)
    rows = tl.load(ranks_ptr + s * num_places + tl.maximum(place, 0))
    rank = tl.where(has_rows, rows // NUM_EXPERTS, 0)
    first = first.to(tl.int64) + tl.load(experts_ptr + pair) * rank
    return first, rank, tl.maximum(place, 0)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MAPS)
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
    first, rank, place = _rows_of(
        pair,
        s,
        experts_ptr,
        tokens_ptr,
        segment_ptr,
        first_rows_ptr,
        places_ptr,
        ranks_ptr,
        num_places,
        NUM_EXPERTS,
    )
    a_ptr = a0_ptr
    if s == 1:
        a_ptr = a1_ptr
    scaling = tl.load(scalings_ptr + s * num_places + place)
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


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_MAPS)
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
    first, rank, _ = _rows_of(
        pair,
        s,
        experts_ptr,
        tokens_ptr,
        segment_ptr,
        first_rows_ptr,
        places_ptr,
        ranks_ptr,
        num_places,
        NUM_EXPERTS,
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


def expert_lora(x: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, pairs: Pairs) -> None:
    """See `ops.expert_lora`."""
    num_slices, num_pairs = len(stack.a), len(pairs.experts)
    inputs, outputs = stack.a[0].shape[1], stack.b[0].shape[1]
    assert num_slices <= 2 and all(b.shape[1] == outputs for b in stack.b), "one slice, or two of one width"
    h = torch.empty(num_slices, num_pairs, MAX_KERNEL_RANK, dtype=torch.float32, device=x.device)
    first_rows = maps.first_rows[stack.group]
    of_pairs = (pairs.experts, pairs.tokens, maps.token_segment, first_rows, maps.places, stack.ranks)
    sizes = stack.ranks.stride(0), num_pairs
    constants = {"NUM_EXPERTS": pairs.num_experts, "WIDTH": MAX_KERNEL_RANK, "RANKS": _RANKS, "num_warps": 4}
    expert_shrink_kernel[num_pairs, num_slices](
        *(x, h, stack.a[0], stack.a[-1], *of_pairs, stack.scalings, *sizes),
        INPUTS=inputs,
        BLOCK=min(_INPUTS, triton.next_power_of_2(inputs)),
        **constants,
    )
    block = min(_OUTPUTS, triton.next_power_of_2(outputs))
    expert_expand_kernel[num_pairs, num_slices, triton.cdiv(outputs, block)](
        *(h, out, stack.b[0], stack.b[-1], *of_pairs, *sizes),
        OUTPUTS=outputs,
        NUM_SLICES=num_slices,
        BLOCK=block,
        **constants,
    )


def warm_up(stacks: Sequence[LoraStack], dtype: torch.dtype, num_experts: int) -> None:
    """See `ops.warm_up`. The number of pairs is no constant of the kernels."""
    for stack in stacks:
        device = stack.a[0].device
        none = torch.full((max(stack.group + 1, 1), 1), -1, dtype=torch.int32, device=device)
        maps = LoraMaps(
            segment_starts=torch.zeros(2, dtype=torch.int32, device=device),
            places=none[0],
            first_rows=none,
            token_segment=none[0],
            num_segments=torch.zeros(1, dtype=torch.int32, device=device),
            segments=(),
            num_tokens=1,
        )
        one = torch.zeros(1, dtype=torch.int64, device=device)
        x = torch.zeros(1, stack.a[0].shape[1], dtype=dtype, device=device)
        out = torch.zeros(1, stack.output_width, dtype=dtype, device=device)
        expert_lora(x, out, stack, maps, Pairs(one, one, num_experts))


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return count_compiled(expert_shrink_kernel, expert_expand_kernel)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)
