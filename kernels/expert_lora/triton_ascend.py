"""`kernels.expert_lora.ops` on Ascend NPUs: one launch for x @ A.T of all pairs and slices, one for the product with B.
Not verified on an NPU: compiled, and its lowered code executed, without one.

As many programs as the chip has vector cores loop over pairs, each of them times a slice (shrink) or a chunk of the
output columns (expand). Each pair reads its rows for itself, in prompts too; neighbouring programs have neighbouring
pairs, which often read the same ones. All that a launch depends on is the number of pairs; which rows a pair has is
read on the device, so a captured call does what a new one would.

Rows of an expert begin and end anywhere: a block of R ranks is masked from the adapter's rank on.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.ascend_relaunch import AscendLaunch
from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.lora import MAX_KERNEL_RANK
from kernels.lora.ascend.kernels import chunk_at, rows_of, store_delta
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.skip import idle_maps
from kernels.lora.triton_ascend import column_chunks, row_addresses
from kernels.platform import in_use
from kernels.triton_launch import count_compiled

_RANKS = 16  # at a time
# Of each row that a step of the shrink, or the expand, reads.
_BLOCK_BYTES = 1024
# Everything but the constexprs: a kernel is not compiled anew for another size, or for a map that begins elsewhere.
_MAPS = ["experts", "tokens", "token_segment", "places", "first_rows", "ranks"]
_SIZES = ["num_pairs", "num_experts", "width", "num_places"]
_STRIDES = ["in_features", "x_stride", "a_stride"]
_SHRINK = ["x_ptr", "a_table", "h_ptr", *_MAPS, "scalings", *_SIZES, *_STRIDES, "num_slices"]
_EXPAND = ["h_ptr", "chunks", "b_ptr", "out_ptr", *_MAPS, *_SIZES, "out_stride", "num_chunks"]


@triton.jit(do_not_specialize=_SHRINK)
def expert_shrink(
    x_ptr,  # [pairs, in_features] with rows of x_stride, of the rows' type
    a_table,  # int64 [slices]: where A of each begins
    h_ptr,  # float32 [slices, pairs, width]; written up to the end of the rank's last block
    experts,
    tokens,
    token_segment,
    places,
    first_rows,
    ranks,
    scalings,
    num_pairs,
    num_experts,
    width,
    num_places,
    in_features,
    x_stride,
    a_stride,
    num_slices,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """h[s, p, :n] = scaling * x[p] @ A[r : r + n].T"""
    rows = tl.arange(0, R)
    inputs = tl.arange(0, K)
    for item in range(tl.program_id(0), num_pairs * num_slices, tl.num_programs(0)):
        pair, slice_index = item // num_slices, item % num_slices
        segment = tl.load(token_segment + tl.load(tokens + pair))
        if segment >= 0:
            place, first_row, num_rows = rows_of(segment, slice_index, places, first_rows, ranks, num_places)
            rank = num_rows // num_experts
            first = first_row + tl.load(experts + pair) * rank
            scaling = tl.load(scalings + slice_index * num_places + place)
            a_rows = tl.load(a_table + slice_index).to(tl.pointer_type(x_ptr.dtype.element_ty)) + first * a_stride
            x_row = x_ptr + tl.cast(pair, tl.int64) * x_stride
            h_row = h_ptr + tl.cast(slice_index * num_pairs + pair, tl.int64) * width
            for r in range(0, rank, R):
                h = tl.zeros((R,), dtype=tl.float32)
                for k in range(0, in_features, K):
                    inside = inputs < in_features - k
                    x = tl.load(x_row + k + inputs, mask=inside, other=0.0).to(tl.float32)
                    a = tl.load(
                        a_rows + r * a_stride + k + (rows[:, None] * a_stride + inputs[None, :]),
                        mask=(rows < rank - r)[:, None] & inside[None, :],
                        other=0.0,
                    ).to(tl.float32)  # [R, K]
                    h += tl.sum(a * x[None, :], axis=1)
                tl.store(h_row + r + rows, h * scaling)


@triton.jit(do_not_specialize=_EXPAND)
def expert_expand(
    h_ptr,
    chunks,  # `chunk_at`
    b_ptr,  # the first slice's, which only tells the type of the rows
    out_ptr,  # [pairs, out_stride]
    experts,
    tokens,
    token_segment,
    places,
    first_rows,
    ranks,
    num_pairs,
    num_experts,
    width,
    num_places,
    out_stride,
    num_chunks,
    R: tl.constexpr,
    N: tl.constexpr,
):
    """out[p, columns of slice s] += h[s, p, :n] @ B[r : r + n, columns]"""
    rows = tl.arange(0, R)
    columns = tl.arange(0, N)
    for item in range(tl.program_id(0), num_pairs * num_chunks, tl.num_programs(0)):
        pair = item // num_chunks
        segment = tl.load(token_segment + tl.load(tokens + pair))
        if segment >= 0:
            address, first_column, slice_index, num_columns, slice_width = chunk_at(chunks, item % num_chunks)
            _, first_row, num_rows = rows_of(segment, slice_index, places, first_rows, ranks, num_places)
            rank = num_rows // num_experts
            if rank > 0:
                first = first_row + tl.load(experts + pair) * rank
                b_rows = address.to(tl.pointer_type(b_ptr.dtype.element_ty)) + first * slice_width
                h_row = h_ptr + tl.cast(slice_index * num_pairs + pair, tl.int64) * width
                inside = columns < num_columns
                delta = tl.zeros((N,), dtype=tl.float32)
                for r in range(0, rank, R):
                    b = tl.load(
                        b_rows + r * slice_width + (rows[:, None] * slice_width + columns[None, :]),
                        mask=(rows < rank - r)[:, None] & inside[None, :],
                        other=0.0,
                    ).to(tl.float32)  # [R, N]
                    delta += tl.sum(b * tl.load(h_row + r + rows)[:, None], axis=0)
                here = out_ptr + first_column + tl.cast(pair, tl.int64) * out_stride + columns
                store_delta(delta, here, inside, False)


def expert_lora(x: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, pairs: Pairs) -> None:
    """See `ops.expert_lora`."""
    h = torch.empty(len(stack.a), len(x), MAX_KERNEL_RANK, dtype=torch.float32, device=x.device)
    plan_shrink(x.to(stack.a[0].dtype), h, stack, maps, pairs).run()
    plan_expand(h, out, stack, maps, pairs).run()


def plan_shrink(x: torch.Tensor, h: torch.Tensor, stack: LoraStack, maps: LoraMaps, pairs: Pairs) -> AscendLaunch:
    """The launch of `expert_shrink`, with x in the rows' type; looks at sizes, never at values."""
    a = stack.a[0]
    arguments = {
        "x_ptr": x,
        "a_table": row_addresses(stack),
        "h_ptr": h,
        **_of_pairs(h, stack, maps, pairs),
        "scalings": stack.scalings,
        "in_features": a.shape[1],
        "x_stride": x.stride(0),
        "a_stride": a.stride(0),
        "num_slices": len(stack.a),
        "K": _block(a, a.shape[1]),
    }
    return AscendLaunch(expert_shrink, (in_use(x.device).num_cores,), arguments)


def plan_expand(h: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, pairs: Pairs) -> AscendLaunch:
    """The launch of `expert_expand`; looks at sizes, never at values."""
    block = _block(stack.b[0], max(b.shape[1] for b in stack.b))
    chunks = column_chunks(stack, block)
    arguments = {
        "h_ptr": h,
        "chunks": chunks,
        "b_ptr": stack.b[0],
        "out_ptr": out,
        **_of_pairs(h, stack, maps, pairs),
        "out_stride": out.stride(0),
        "num_chunks": len(chunks),
        "N": block,
    }
    return AscendLaunch(expert_expand, (in_use(out.device).num_cores,), arguments)


def _of_pairs(h: torch.Tensor, stack: LoraStack, maps: LoraMaps, pairs: Pairs) -> dict[str, object]:
    """Arguments of both kernels."""
    return {
        "experts": pairs.experts,
        "tokens": pairs.tokens,
        "token_segment": maps.token_segment,
        "places": maps.places,
        "first_rows": maps.first_rows[stack.group],
        "ranks": stack.ranks,
        "num_pairs": h.shape[1],
        "num_experts": pairs.num_experts,
        "width": h.shape[2],
        "num_places": stack.ranks.shape[1],
        "R": _RANKS,
    }


def _block(rows: torch.Tensor, num_columns: int) -> int:
    """Columns that are taken at once."""
    return min(_BLOCK_BYTES // rows.element_size(), triton.next_power_of_2(num_columns))


def warm_up(stacks: Sequence[LoraStack], dtype: torch.dtype, num_experts: int) -> None:
    """See `ops.warm_up`: one pair, of a base token. The number of pairs is no constant of the kernels."""
    for stack in stacks:
        a = stack.a[0]
        zero = torch.zeros(1, dtype=torch.int64, device=a.device)
        x, out = a.new_zeros(1, a.shape[1], dtype=dtype), a.new_zeros(1, stack.output_width, dtype=dtype)
        expert_lora(x, out, stack, idle_maps(1, 1, stack), Pairs(zero, zero, num_experts))


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return count_compiled(expert_shrink, expert_expand)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)
