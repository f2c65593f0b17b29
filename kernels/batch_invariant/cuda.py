"""Torch operators on NVIDIA GPUs whose results for a token do not depend on its step.

Products sum their inputs in an order that follows from the weight alone: in parts of fixed length, each from its first
input to its last by one kind of instruction, the parts in turn. So tiles may be as large as a step wants, and the parts
of a tile computed by one program or by several. Functions of rows are computed by a program for each row.

The file is long because each replaced operator is a few lines around one of these two kernels.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import triton_launch

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Tile:
    """A program's share of a product: outputs, rows, inputs at a time; and blocks of inputs in flight."""

    outputs: int
    rows: int
    inputs: int
    stages: int
    num_warps: int


# By the rows of a product, for up to so many, those of few as measured on an H200; outputs are 64 at least, so that all
# go by one instruction (wgmma).
_TILES = {
    16: _Tile(64, 16, 128, 5, 4),
    32: _Tile(64, 32, 128, 4, 4),
    64: _Tile(64, 64, 128, 3, 4),
    math.inf: _Tile(128, 128, 64, 4, 8),
}
# No tensor core multiplies float32 without rounding it.
_FLOAT32_TILE = _Tile(32, 32, 32, 2, 4)
# Programs that narrow weights are split for, outputs of a program by which these are counted, fewest inputs of a part
# and what parts are multiples of, and most parts.
_PROGRAMS, _PROGRAM_OUTPUTS, _PART_INPUTS, _PART_UNIT, _MAX_PARTS = 256, 128, 1024, 128, 8
# Rows of a product whose parts are computed by programs of their own, and memory for their results.
_MAX_PARALLEL_ROWS = 256
_PARTIAL_BYTES = 4 * _PROGRAMS * _PROGRAM_OUTPUTS * _MAX_PARALLEL_ROWS
_NUM_COUNTERS = 1 << 14
# Tiles of rows that read the same weights one after the other.
_BLOCK_TILES = 8
# Columns of a row at a time.
_ROW_BLOCK = 4096

_partials = triton_launch.Workspace()


@triton.jit
def _part(
    x_rows, weight_rows, first, last, num_inputs, x_input_stride, weight_input_stride, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, IS_EVEN: tl.constexpr
):  # fmt: skip
    """float32 [OUTPUTS, ROWS]: the product over inputs first to last."""
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(first, last, INPUTS, num_stages=STAGES):
        inputs = start + tl.arange(0, INPUTS)
        x_places = x_rows[:, None] + (inputs * x_input_stride)[None, :]
        weight_places = weight_rows[:, None] + (inputs * weight_input_stride)[None, :]
        if IS_EVEN:
            weight = tl.load(weight_places)
            x = tl.load(x_places)
        else:
            is_input = (inputs < num_inputs)[None, :]
            weight = tl.load(weight_places, mask=is_input, other=0.0)
            x = tl.load(x_places, mask=is_input, other=0.0)
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x_ptr,  # [num_rows, num_inputs]
    weight_ptr,  # [num_columns, num_inputs]; NUM_GROUPS of them, one behind the other
    ends_ptr,  # NUM_GROUPS: int32 [NUM_GROUPS]: rows up to the last of each weight's
    bias_ptr,  # [num_columns] or None
    out_ptr,  # [num_rows, num_columns], unit stride along the columns
    partials_ptr,  # IS_PARALLEL: float32, a tile of each program
    counters_ptr,  # IS_PARALLEL: int32, one for each tile: programs that are done; zero before and after
    num_rows,
    num_columns,
    num_inputs,
    part_inputs,
    x_stride,
    x_input_stride,
    weight_stride,
    weight_input_stride,
    out_stride,
    NUM_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_PARALLEL: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tiles, parts if IS_PARALLEL). Rows and columns past the last read the first, and are not stored. Each group
    of rows is multiplied with a weight of its own."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0)
    column_tiles = tl.cdiv(num_columns, OUTPUTS)
    row_tiles = num_rows // ROWS + NUM_GROUPS if NUM_GROUPS else tl.cdiv(num_rows, ROWS)
    block = tile // (BLOCK_TILES * column_tiles)
    block_rows = tl.minimum(row_tiles - block * BLOCK_TILES, BLOCK_TILES)
    place = tile % (BLOCK_TILES * column_tiles)
    row_tile = block * BLOCK_TILES + place % block_rows
    first_row = row_tile * ROWS
    end_row = num_rows
    if NUM_GROUPS:
        # A group begins with tile start // ROWS and its number, which leaves all enough tiles, and some without rows.
        each = tl.arange(0, GROUPS_BLOCK)
        starts = tl.load(ends_ptr + each - 1, mask=(each > 0) & (each < NUM_GROUPS), other=0)
        group = tl.sum(((each < NUM_GROUPS) & (starts // ROWS + each <= row_tile)).to(tl.int32), 0) - 1
        start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
        end_row = tl.load(ends_ptr + group)
        first_row = start + (row_tile - start // ROWS - group) * ROWS
        if first_row >= end_row:
            return
        weight_ptr += group.to(tl.int64) * num_columns * weight_stride
    row = first_row + tl.arange(0, ROWS)
    column = place // block_rows * OUTPUTS + tl.arange(0, OUTPUTS)
    x_rows = x_ptr + tl.where(row < end_row, row, first_row).to(tl.int64) * x_stride
    weight_rows = weight_ptr + tl.where(column < num_columns, column, 0).to(tl.int64) * weight_stride
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    is_last = True
    if IS_PARALLEL:
        part = tl.program_id(1)
        first = part * part_inputs
        product = _part(
            x_rows, weight_rows, first, tl.minimum(first + part_inputs, num_inputs), num_inputs, x_input_stride,
            weight_input_stride, OUTPUTS, ROWS, INPUTS, STAGES, IS_EVEN
        )  # fmt: skip
        # The last program of a tile to be done adds all parts up.
        within = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tile_ptr = partials_ptr + tile.to(tl.int64) * NUM_PARTS * OUTPUTS * ROWS + within
        tl.store(tile_ptr + part * OUTPUTS * ROWS, product)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == NUM_PARTS - 1
        if is_last:
            for index in tl.range(NUM_PARTS, num_stages=1):
                total += tl.load(tile_ptr + index * OUTPUTS * ROWS, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
    else:
        for index in tl.range(NUM_PARTS, num_stages=1):
            first = index * part_inputs
            total += _part(
                x_rows, weight_rows, first, tl.minimum(first + part_inputs, num_inputs), num_inputs, x_input_stride,
                weight_input_stride, OUTPUTS, ROWS, INPUTS, STAGES, IS_EVEN
            )  # fmt: skip
    if is_last:
        if bias_ptr is not None:
            total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[:, None]
        places = out_ptr + row[None, :].to(tl.int64) * out_stride + column[:, None]
        is_there = (column < num_columns)[:, None] & (row < end_row)[None, :]
        tl.store(places, total.to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def rows_kernel(
    x_ptr,  # [rows, num_columns], rows of x_stride
    out_ptr,  # [rows, num_columns], or [rows] of "sum"
    x_stride,
    num_columns,
    eps,
    KIND: tl.constexpr,  # "sum", "cumsum", "softmax", "log_softmax" or "rms_norm"
    BLOCK: tl.constexpr,
):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x_ptr += row * x_stride
    largest = 0.0
    if KIND == "softmax" or KIND == "log_softmax":
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        for first in tl.range(0, num_columns, BLOCK):
            x = tl.load(x_ptr + first + column, mask=first + column < num_columns, other=float("-inf"))
            most = tl.maximum(most, x.to(tl.float32))
        largest = tl.max(most, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    before = tl.full((), 0.0, tl.float32)
    for first in tl.range(0, num_columns, BLOCK):
        mask = first + column < num_columns
        x = tl.load(x_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        if KIND == "cumsum":
            sums = before + tl.cumsum(x, 0)
            before += tl.sum(x, 0)
            tl.store(out_ptr + row * num_columns + first + column, sums.to(out_ptr.dtype.element_ty), mask=mask)
        elif KIND == "sum":
            total += x
        elif KIND == "rms_norm":
            total += x * x
        else:
            total += tl.where(mask, tl.exp(x - largest), 0.0)
    if KIND == "sum":
        tl.store(out_ptr + row, tl.sum(total, 0).to(out_ptr.dtype.element_ty))
    elif KIND != "cumsum":
        factor = 1.0 / tl.sum(total, 0)
        shift = largest
        if KIND == "rms_norm":
            factor = tl.rsqrt(tl.sum(total, 0) / num_columns + eps)
        if KIND == "log_softmax":
            shift = largest + tl.log(tl.sum(total, 0))
        for first in tl.range(0, num_columns, BLOCK):
            mask = first + column < num_columns
            x = tl.load(x_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
            if KIND == "rms_norm":
                out = x * factor
            elif KIND == "log_softmax":
                out = x - shift
            else:
                out = tl.exp(x - shift) * factor
            tl.store(out_ptr + row * num_columns + first + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, inputs] @ weight.T + bias, accumulated in float32 and rounded once.

    weight  [outputs, inputs], of x's dtype and any strides
    bias    [outputs] or None
    out     [rows, outputs] of unit stride along the outputs; made when None
    ends    int32 [groups]: groups of rows, of which these are the ends, are multiplied with weights of their own,
            weight [groups, outputs, inputs], contiguous

    Returns out.
    """
    num_rows, num_inputs = x.shape
    num_columns, num_groups = weight.shape[-2], 0 if ends is None else len(weight)
    assert x.dtype == weight.dtype and weight.shape[-1] == num_inputs, "x does not fit the weight"
    assert ends is None or (weight.is_contiguous() and ends.shape == (num_groups,)), "each group has an end"
    if out is None:
        out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, num_columns) and (out.stride(1) == 1 or num_columns == 1), "out has whole rows"
    if not num_rows or not num_columns:
        return out
    tile = _tile_of(num_rows // max(1, num_groups), x.dtype)
    num_parts, part_inputs = parts_of(num_columns, num_inputs)
    is_parallel = num_parts > 1 and num_rows <= _MAX_PARALLEL_ROWS and not num_groups
    row_tiles = num_rows // tile.rows + num_groups if num_groups else triton.cdiv(num_rows, tile.rows)
    num_tiles = row_tiles * triton.cdiv(num_columns, tile.outputs)
    partials = counters = None
    if is_parallel:
        partials = _partials.take(x.device, _PARTIAL_BYTES).view(torch.float32)
        counters = _counters(x.device)
    product_kernel[(num_tiles, num_parts) if is_parallel else (num_tiles,)](
        *(x, weight, ends, bias, out, partials, counters),
        *(num_rows, num_columns, num_inputs, part_inputs),
        *(x.stride(0), x.stride(1), weight.stride(-2), weight.stride(-1), out.stride(0)),
        NUM_GROUPS=num_groups,
        GROUPS_BLOCK=triton.next_power_of_2(max(1, num_groups)),
        NUM_PARTS=num_parts,
        IS_PARALLEL=is_parallel,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        INPUTS=tile.inputs,
        STAGES=tile.stages,
        IS_EVEN=num_inputs % tile.inputs == 0,
        BLOCK_TILES=_BLOCK_TILES,
        DEPENDENT_LAUNCH=triton_launch.launches_dependently(x.device),
        num_warps=tile.num_warps,
        **triton_launch.launch_options(x.device),
    )
    return out


def parts_of(num_columns: int, num_inputs: int) -> tuple[int, int]:
    """(parts, inputs of each but the last) of products with a weight [num_columns, num_inputs]."""
    wanted = _PROGRAMS // triton.cdiv(num_columns, _PROGRAM_OUTPUTS)
    num_parts = max(1, min(wanted, num_inputs // _PART_INPUTS, _MAX_PARTS))
    part_inputs = triton.cdiv(num_inputs, num_parts * _PART_UNIT) * _PART_UNIT
    return triton.cdiv(num_inputs, part_inputs), part_inputs


def _tile_of(num_rows: int, dtype: torch.dtype) -> _Tile:
    if dtype == torch.float32:
        return _FLOAT32_TILE
    return next(tile for most, tile in _TILES.items() if num_rows <= most)


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)


def warm_up_products(weights: Sequence[tuple[torch.Tensor, torch.Tensor | None]], max_rows: int) -> None:
    """Compile what products with these weights and biases need for up to max_rows rows, and reserve memory."""
    sizes = (*(most for most in _TILES if most < _MAX_PARALLEL_ROWS), _MAX_PARALLEL_ROWS, _MAX_PARALLEL_ROWS + 1)
    forms = {(weight.shape, weight.stride(), weight.dtype, bias is None): (weight, bias) for weight, bias in weights}
    for weight, bias in forms.values():
        for size in sizes:
            product(weight.new_zeros(int(min(size, max_rows)), weight.shape[1]), weight, bias)


def warm_up_groups(weight: torch.Tensor) -> None:
    """Compile what products of groups of rows with weight [groups, outputs, inputs] need."""
    for size in (16, 32, 64, 65):
        x = weight.new_zeros(size * len(weight), weight.shape[2])
        ends = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
        product(x, weight, ends=ends)


def warm_up_rows(num_columns: int, device: torch.device) -> None:
    """Compile what is asked of rows of float32 logits."""
    x = torch.zeros(1, num_columns, device=device)
    for width in (num_columns, 128, triton.cdiv(num_columns, 128)):
        for kind in ("sum", "cumsum"):
            of_rows(kind, x[:, :width].contiguous())
    of_rows("log_softmax", x)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(product_kernel, rows_kernel)


def of_rows(kind: str, x: torch.Tensor, dtype: torch.dtype | None = None, eps: float = 0.0) -> torch.Tensor:
    """A function of `rows_kernel`, in float32, of the last dimension of x; fresh, of dtype (None: of x's)."""
    num_columns = x.shape[-1]
    rows = x.reshape(-1, num_columns).contiguous()
    shape = x.shape[:-1] if kind == "sum" else x.shape
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    if out.numel():
        # Running sums of rows that begin alike are the same as far as they do, whatever follows.
        block = _ROW_BLOCK if kind == "cumsum" else min(_ROW_BLOCK, triton.next_power_of_2(num_columns))
        rows_kernel[(rows.shape[0],)](
            *(rows, out, num_columns, num_columns, eps), KIND=kind, BLOCK=block, num_warps=max(1, min(8, block // 256))
        )
    return out


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _mm(x: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return product(x, other.t(), out=out)


def _matmul(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Of more dimensions: an implementation's own, which calls it with one shape.
    return _mm(x, other) if x.dim() == other.dim() == 2 else _aten.matmul.default(x, other)


def _addmm(
    bias: torch.Tensor,
    x: torch.Tensor,
    other: torch.Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    assert bias.dim() == 1 and beta == alpha == 1.0, "a bias is the same for all rows"
    return product(x, other.t(), bias, out)


def _along(kind: str, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return of_rows(kind, x.movedim(dim, -1), dtype).movedim(-1, dim)


def _softmax(kind: str) -> Callable[..., torch.Tensor]:
    return lambda x, dim, dtype=None: _along(kind, x, dim, dtype)


def _inner_softmax(kind: str) -> Callable[..., torch.Tensor]:
    return lambda x, dim, half_to_float: _along(kind, x, dim, torch.float32 if half_to_float else None)


def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    if not x.is_floating_point():
        return _aten.cumsum.default(x, dim, dtype=dtype)
    return _along("cumsum", x, dim, dtype)


def _sum(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if not x.is_floating_point() or dim is None or len(dim) != 1:
        return _aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)
    total = of_rows("sum", x.movedim(dim[0], -1), dtype)
    return total.unsqueeze(dim[0]) if keepdim else total


def _mean(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    assert dim is not None and len(dim) == 1, "a mean is taken along one dimension"
    return (_sum(x, dim, keepdim, dtype=torch.float32) / x.shape[dim[0]]).to(dtype or x.dtype)


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    assert len(shape) == 1, "a norm is taken along the last dimension"
    unit = of_rows("rms_norm", x, torch.float32, torch.finfo(x.dtype).eps if eps is None else eps)
    return (unit if weight is None else unit * weight).to(x.dtype)


REPLACEMENTS: dict[object, Callable[..., Any]] = {
    _aten.linear.default: _linear,
    _aten.mm.default: _mm,
    _aten.mm.out: _mm,
    _aten.matmul.default: _matmul,
    _aten.addmm.default: _addmm,
    _aten.addmm.out: _addmm,
    _aten.log_softmax.int: _softmax("log_softmax"),
    _aten.softmax.int: _softmax("softmax"),
    _aten._log_softmax.default: _inner_softmax("log_softmax"),
    _aten._softmax.default: _inner_softmax("softmax"),
    _aten.cumsum.default: _cumsum,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.dim: _mean,
    _aten.rms_norm.default: _rms_norm,
}
