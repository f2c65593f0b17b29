"""Base projections on an NPU: weights of W8A8 checkpoints by torch_npu's product of integers, whose inputs are rounded
for each token; all others by torch's. Not verified on an NPU.

LoRA reads inputs before they are rounded: rows of A behind a weight are a product of their own beside it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch_npu

from kernels.contract import Contract
from kernels.linear import reference
from kernels.linear.ops import PackedWeight, RowsBehind
from kernels.linear.quantised import Quantised
from kernels.platform import in_use

CONTRACT = Contract(replayable=True)

# Both sides of a weight are below this.
_SIDE_LIMIT = 65_536
# In which products of integers read weights fastest: blocks of 16 x 32 one after the other.
_FRACTAL_NZ = 29


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """Keep the weight as it is."""
    return reference.pack_weight(weight, bias)


def pack_quantised(weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedWeight | None:
    """The codes transposed and in blocks; None for a weight that was not made for rounded inputs, or that the product
    does not take."""
    is_plain = weight.offsets is None and weight.order is None and weight.scales.shape[1] == 1
    fits = max(weight.codes.shape) < _SIDE_LIMIT and dtype in (torch.bfloat16, torch.float16)
    # Chips without bfloat16 take no scales of tokens.
    fits = fits and in_use(weight.codes.device).native_bfloat16
    if not (weight.rounds_inputs and weight.codes.dtype == torch.int8 and is_plain and fits):
        return None
    codes = torch_npu.npu_format_cast(weight.codes.t().contiguous(), _FRACTAL_NZ)
    scales, bias = weight.scales.flatten(), None if bias is None else bias.clone()
    nbytes = sum(part.nbytes for part in (codes, scales, bias) if part is not None)
    out_features, in_features = weight.out_features, weight.in_features
    return PackedWeight(codes, bias, dtype, out_features, in_features, "npu", nbytes, tiled=scales, rounds_inputs=True)


def append_rows(weight: PackedWeight, num_rows: int, num_slices: int) -> tuple[PackedWeight, torch.Tensor]:
    """See `ops.append_rows`: rows in memory of their own."""
    rows = torch.empty(num_rows * num_slices, weight.in_features, dtype=weight.dtype, device=weight.data.device)
    return replace(weight, behind=RowsBehind(rows, None, num_rows, num_slices)), rows


def linear(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """out = x @ weight.T + bias"""
    product = _multiply(x, weight)
    return product if out is None else out.copy_(product)


def linear_window(
    x: torch.Tensor, weight: PackedWeight, num_columns: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x times the weight, plus bias, and times so many rows behind it that there are num_columns columns."""
    behind = weight.behind
    assert behind is not None
    rows = behind.data[: num_columns - weight.out_features]
    return torch.cat((_multiply(x, weight), x @ rows.t()), dim=1, out=out)


def _multiply(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    if not x.shape[0]:
        return x.new_empty(0, weight.out_features)
    codes, token_scales = torch_npu.npu_dynamic_quant(x.contiguous())
    product: torch.Tensor = torch_npu.npu_quant_matmul(
        codes, weight.data, weight.tiled, pertoken_scale=token_scales, bias=weight.bias, output_dtype=x.dtype
    )
    return product
