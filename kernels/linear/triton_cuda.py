"""Base projections on NVIDIA GPUs: plain weights by cuBLAS; quantised ones by a kernel that dequantises in registers.

Codes that the compute dtype holds less their zero points, or their values of a table in that dtype, are multiplied as
they are, and products scaled; of others the kernel rounds each dequantised weight to the compute dtype. Steps of many
tokens dequantise some rows at a time into scratch memory, rounded so, and leave the product to cuBLAS; or, of weights
that round prompts, they round their inputs to float8, and torch multiplies codes by codes.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from kernels import triton_launch
from kernels.contract import Contract
from kernels.linear import reference
from kernels.linear.ops import PackedWeight, RowsBehind
from kernels.linear.quantised import Quantised
from kernels.linear.triton_cuda_configs import (
    MAX_TOKENS,
    TABLE,
    TileConfig,
    TiledCodes,
    config_for,
    configs_for,
    num_splits,
    tiled_codes,
)
from kernels.linear.triton_cuda_kernels import (
    dequantise_kernel,
    gather_kernel,
    quantised_linear_kernel,
    round_kernel,
    sum_splits_kernel,
)
from kernels.platform import in_use

log = logging.getLogger(__name__)

# Inputs of a block of rows of A.
_ROWS_BLOCK = 64
# Bytes of the scratch memory, fewest rows in it, and rows of a tile that are dequantised.
_SCRATCH_BYTES, _MIN_ROWS, _DEQUANTISED_ROWS = 128 << 20, 256, 32
# Tokens of a program that sums splits, and splits whose products it loads at a time.
_SUMMED_TOKENS, _SUMMED_AHEAD = 8, 8
_FLOAT8 = (8, 9)
# Of products of codes by codes: torch's multiple of outputs, blocks of inputs rounded at a time, and rows of a tile.
_ROUNDED_OUT, _ROUNDED_BLOCKS, _GATHERED_ROWS = 16, 32, 64

_scratch, _partials = triton_launch.Workspace(), triton_launch.Workspace()


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """Keep the weight as it is, for cuBLAS."""
    return reference.pack_weight(weight, bias)


def pack_quantised(weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedWeight | None:
    """The codes laid out anew; None where no kernel serves them so, or the GPU does not convert their dtype."""
    device = weight.codes.device
    tiled = tiled_codes(weight, dtype) if _converts(device, weight.codes.dtype) else None
    if tiled is None:
        return None
    held = tiled.weight
    bias = None if bias is None else bias.clone()
    parts = (held.codes, held.scales, tiled.offsets, weight.table, weight.order, bias)
    nbytes = sum(part.nbytes for part in parts if part is not None)
    _scratch.take(device, _scratch_rows(weight.in_features, dtype) * weight.in_features * dtype.itemsize)
    out_features, in_features = weight.out_features, weight.in_features
    return PackedWeight(held.codes, bias, dtype, out_features, in_features, "triton_cuda", nbytes, tiled=tiled)


def append_rows(weight: PackedWeight, num_rows: int, num_slices: int) -> tuple[PackedWeight, torch.Tensor]:
    """See `ops.append_rows`: rows in memory of their own, which the launch that reads the codes reads too."""
    rows = torch.empty(num_rows * num_slices, weight.in_features, dtype=weight.dtype, device=weight.data.device)
    return replace(weight, behind=RowsBehind(rows, None, num_rows, num_slices)), rows


def linear(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """out = x @ weight.T + bias"""
    return linear_window(x, weight, weight.out_features, out)


def linear_window(
    x: torch.Tensor,
    weight: PackedWeight,
    num_columns: int,
    out: torch.Tensor | None = None,
    *,
    config: TileConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """x times the weight, plus bias, and times so many rows behind it that there are num_columns columns.

    config, splits  for tuning
    """
    if x.shape[0] > MAX_TOKENS and weight.rounds_prompts:
        return _multiply_rounded(x, weight, num_columns, out)
    if out is None:
        out = torch.empty(x.shape[0], num_columns, dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    if x.shape[0] > MAX_TOKENS:
        if not in_use(x.device).batch_invariant:
            return _multiply_dequantised(x, weight, out)
        for first in range(0, x.shape[0], MAX_TOKENS):
            part = slice(first, first + MAX_TOKENS)
            linear_window(x[part], weight, num_columns, out[part])
        return out
    tiled: TiledCodes = weight.tiled
    codes = tiled.weight
    rows = x if weight.behind is None else weight.behind.data
    ordered = x if codes.order is None else x.index_select(1, codes.order)
    splits = splits or splits_of(weight)
    chosen = config or config_for(x.shape[0], num_columns, splits, in_use(x.device).num_cores)
    code_tiles = -(-weight.out_features // chosen.block_out)
    grid = _grid(weight, num_columns, x.shape[0], chosen)
    partials = out
    if splits > 1:
        num_bytes = 4 * grid[0] * grid[1] * splits * chosen.block_out * chosen.block_tokens
        partials = _partials.take(x.device, num_bytes).view(torch.float32)
    quantised_linear_kernel[(*grid, splits)](
        x,
        ordered,
        codes.codes,
        codes.scales,
        tiled.offsets,
        weight.bias,
        rows,
        out,
        partials,
        x.shape[0],
        weight.in_features,
        weight.out_features,
        num_columns,
        x.stride(0),
        ordered.stride(0),
        code_tiles,
        codes.codes.shape[0],
        tiled.num_groups,
        -(-codes.codes.shape[0] // splits),
        -(-weight.in_features // (_ROWS_BLOCK * splits)),
        splits,
        CODES_OF_GROUP=tiled.codes_of_group,
        IS_INTERPRETED=os.environ.get("TRITON_INTERPRET") == "1",
        TABLE=tiled.table,
        SCALES_PRODUCTS=tiled.scales_products,
        HAS_BIAS=weight.bias is not None,
        IS_EVEN=weight.in_features % max(tiled.inputs_of_block, _ROWS_BLOCK) == 0,
        BLOCK_ROWS=_ROWS_BLOCK,
        BLOCK_OUT=chosen.block_out,
        BLOCK_TOKENS=chosen.block_tokens,
        STAGES=chosen.stages,
        num_warps=chosen.num_warps,
        **tiled.constants(),
        **launch_options_of(x.device),
    )
    if splits > 1:
        sum_splits_kernel[(grid[0], -(-x.shape[0] // _SUMMED_TOKENS))](
            partials,
            weight.bias,
            out,
            x.shape[0],
            weight.out_features,
            num_columns,
            code_tiles,
            grid[1],
            splits,
            HAS_BIAS=weight.bias is not None,
            BLOCK_OUT=chosen.block_out,
            BLOCK_TOKENS=chosen.block_tokens,
            ROWS=_SUMMED_TOKENS,
            AHEAD=_SUMMED_AHEAD,
            num_warps=4,
            **launch_options_of(x.device),
        )
    return out


def dequantised(weight: PackedWeight, first: int, last: int) -> torch.Tensor:
    """Rows first to last of the weight [last - first, in] in the scratch memory, until the next call."""
    tiled: TiledCodes = weight.tiled
    codes, device = tiled.weight, weight.data.device
    num_bytes = (last - first) * weight.in_features * weight.dtype.itemsize
    out = _scratch.take(device, num_bytes).view(weight.dtype).view(last - first, weight.in_features)
    dequantise_kernel[(-(-(last - first) // _DEQUANTISED_ROWS), codes.codes.shape[0])](
        out,
        codes.codes,
        codes.scales,
        tiled.offsets,
        codes.table,
        codes.order,
        first,
        last,
        weight.in_features,
        weight.out_features,
        tiled.num_groups,
        HAS_ORDER=codes.order is not None,
        BLOCK_OUT=_DEQUANTISED_ROWS,
        num_warps=4,
        **tiled.constants(),
        **launch_options_of(device),
    )
    return out


def warm_up(weights: Sequence[PackedWeight], max_tokens: int, max_window_rows: int) -> None:
    """See `ops.warm_up`. Weights of one form and shape need the same."""
    forms = {}
    for weight in weights:
        behind = weight.behind
        num_columns = weight.out_features
        if behind is not None:
            num_columns += min(max_window_rows, behind.num_rows) * behind.num_slices
        form = (*weight.tiled.constants().values(), weight.data.shape, weight.tiled.num_groups, num_columns)
        forms[(*form, weight.data.dtype, weight.bias is None, weight.tiled.weight.order is None)] = weight, num_columns
    for weight, num_columns in forms.values():
        for most in TABLE:
            num_tokens = min(most, max_tokens)
            x = torch.zeros(num_tokens, weight.in_features, dtype=weight.dtype, device=weight.data.device)
            for config in configs_for(most, splits_of(weight)):
                linear_window(x, weight, num_columns, config=config)
        dequantised(weight, 0, min(weight.out_features, _scratch_rows(weight.in_features, weight.dtype)))
        if weight.rounds_prompts and max_tokens > MAX_TOKENS:
            linear(x.new_zeros(MAX_TOKENS + 1, weight.in_features), weight)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(
        quantised_linear_kernel, sum_splits_kernel, dequantise_kernel, gather_kernel, round_kernel
    )


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)


def _multiply_dequantised(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> torch.Tensor:
    """The product by cuBLAS, some rows of the weight at a time."""
    num_rows = _scratch_rows(weight.in_features, weight.dtype)
    for first in range(0, weight.out_features, num_rows):
        last = min(first + num_rows, weight.out_features)
        part = dequantised(weight, first, last)
        if weight.bias is None:
            torch.mm(x, part.t(), out=out[:, first:last])
        else:
            torch.addmm(weight.bias[first:last], x, part.t(), out=out[:, first:last])
    return _multiply_rows(x, weight, out)


def _multiply_rows(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> torch.Tensor:
    """The columns behind the weight's own, if there are any."""
    if out.shape[1] > weight.out_features:
        assert weight.behind is not None
        rows = weight.behind.data[: out.shape[1] - weight.out_features]
        torch.mm(x, rows.t(), out=out[:, weight.out_features :])
    return out


def can_round(weight: PackedWeight) -> bool:
    """See `ops.round_prompts`: float8 with a scale for each output, in bfloat16, the only result of torch's product.

    Of groups of 128 inputs torch's takes numbers of tokens that 4 divides alone, and is little faster than bfloat16's.
    """
    tiled: TiledCodes | None = weight.tiled
    if tiled is None or tiled.form != "fp8" or weight.dtype != torch.bfloat16:
        return False
    return tiled.num_groups == 1 and weight.out_features % _ROUNDED_OUT == 0


def _multiply_rounded(
    x: torch.Tensor, weight: PackedWeight, num_columns: int, out: torch.Tensor | None
) -> torch.Tensor:
    """The product of inputs in codes with the weight's, some rows of it at a time."""
    codes, scales = weight.tiled.weight.codes, weight.tiled.weight.scales
    num_blocks, out_features, words = codes.shape
    rounded, token_scales = _round_inputs(x, codes)
    num_rows, parts = _scratch_rows(4 * words * num_blocks, torch.uint8), []
    for first in range(0, out_features, num_rows):
        last = min(first + num_rows, out_features)
        product = functional.scaled_mm(
            rounded,
            _gathered(codes, first, last).t(),
            token_scales,
            ScalingType.RowWise,
            scales[:, first:last].contiguous(),
            ScalingType.RowWise,
            bias=None if weight.bias is None else weight.bias[first:last],
            output_dtype=x.dtype,
        )
        parts.append(product)
    if len(parts) == 1 and out is None and num_columns == out_features:
        return parts[0]
    if out is None:
        out = torch.empty(x.shape[0], num_columns, dtype=x.dtype, device=x.device)
    torch.cat(parts, dim=1, out=out[:, :out_features])
    return _multiply_rows(x, weight, out)


def _gathered(codes: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """float8 [last - first, inputs of the blocks] in the scratch memory: the bytes of a block keep their order."""
    num_blocks, out_features, words = codes.shape
    out = _scratch.take(codes.device, 4 * (last - first) * num_blocks * words)
    gather_kernel[(-(-(last - first) // _GATHERED_ROWS), num_blocks)](
        out.view(torch.int32),
        codes,
        first,
        last,
        out_features,
        num_blocks,
        WORDS=words,
        BLOCK_OUT=_GATHERED_ROWS,
        num_warps=4,
        **launch_options_of(codes.device),
    )
    return out.view(torch.float8_e4m3fn).view(last - first, -1)


def _round_inputs(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 [tokens, inputs of the blocks] in the order of the codes' bytes, zeros behind the inputs; float32 scales
    [tokens, 1])."""
    num_tokens, (num_blocks, _, words) = x.shape[0], codes.shape
    rounded = torch.empty(num_tokens, num_blocks * 4 * words, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device)
    round_kernel[(num_tokens,)](
        x,
        rounded,
        scales,
        x.shape[1],
        x.stride(0),
        num_blocks,
        WORDS=words,
        BLOCKS=min(_ROUNDED_BLOCKS, 1 << (num_blocks - 1).bit_length()),
        num_warps=8,
        **launch_options_of(x.device),
    )
    return rounded, scales


def _converts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the GPU's instructions read the codes; those for float8 came with capability 8.9."""
    if dtype != torch.float8_e4m3fn or device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FLOAT8:
        return True
    _say_dequantised(torch.cuda.get_device_name(device))
    return False


@functools.cache
def _say_dequantised(name: str) -> None:
    log.warning("%s has no float8 instructions: float8 weights are held dequantised", name)


def _scratch_rows(in_features: int, dtype: torch.dtype) -> int:
    """Rows of a weight that are dequantised at a time: cuBLAS is slow where their number is odd."""
    num_rows = _SCRATCH_BYTES // (in_features * dtype.itemsize)
    return max(_MIN_ROWS, num_rows - num_rows % _MIN_ROWS)


def splits_of(weight: PackedWeight) -> int:
    """Programs that share the inputs of a tile."""
    device = weight.data.device
    return num_splits(weight.out_features, weight.data.shape[0], in_use(device).num_cores)


def _grid(weight: PackedWeight, num_columns: int, num_tokens: int, chosen: TileConfig) -> tuple[int, int]:
    """Tiles of columns, which have codes or rows but not both, and of tokens."""
    num_tiles = -(-weight.out_features // chosen.block_out)
    num_tiles += -(-(num_columns - weight.out_features) // chosen.block_out)
    return num_tiles, -(-num_tokens // chosen.block_tokens)


@functools.cache
def launch_options_of(device: torch.device) -> dict[str, Any]:
    """Without fusion of a product and a sum, which would round an offset's sum differently."""
    dependent = triton_launch.launches_dependently(device)
    return {"DEPENDENT_LAUNCH": dependent, "enable_fp_fusion": False} | triton_launch.launch_options(device)
