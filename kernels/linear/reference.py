"""The truth of `kernels.linear.ops`: one torch call, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from kernels.batch_invariant.mode import replacing
from kernels.contract import Contract
from kernels.linear.ops import PackedWeight, RowsBehind
from kernels.platform import in_use


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """Keep the weight as it is."""
    data, bias = weight.clone(), None if bias is None else bias.clone()
    nbytes = data.nbytes + (0 if bias is None else bias.nbytes)
    return PackedWeight(data, bias, weight.dtype, weight.shape[0], weight.shape[1], "reference", nbytes)


def linear(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """out = x @ weight.T + bias"""
    return _multiply(x, weight.data, weight.bias, out)


def append_rows(weight: PackedWeight, num_rows: int, num_slices: int) -> tuple[PackedWeight, torch.Tensor]:
    """See `ops.append_rows`."""
    out_features, num_behind = weight.out_features, num_rows * num_slices
    buffer = weight.data.new_empty(out_features + num_behind, weight.in_features)
    data, rows = buffer[:out_features].copy_(weight.data), buffer[out_features:]
    bias = None if weight.bias is None else functional.pad(weight.bias, (0, num_behind))
    behind = RowsBehind(buffer, bias, num_rows, num_slices)
    return replace(weight, data=data, bias=None if bias is None else bias[:out_features], behind=behind), rows


def linear_window(
    x: torch.Tensor, weight: PackedWeight, num_columns: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x times the first num_columns rows of the buffer, plus bias."""
    behind = weight.behind
    assert behind is not None
    bias = None if behind.bias is None else behind.bias[:num_columns]
    return _multiply(x, behind.data[:num_columns], bias, out)


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """`functional.linear`, which takes no `out`, or what it calls."""
    if out is None:
        return functional.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def warm_up(weights: Sequence[PackedWeight], max_tokens: int, _max_window_rows: int) -> None:
    """See `ops.warm_up`: nothing, but where steps must not matter and products are kernels."""
    device = weights[0].data.device
    if device.type == "cuda" and in_use(device).batch_invariant:
        replacing(device).warm_up_products([(weight.data, weight.bias) for weight in weights], max_tokens)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    device = torch.device("cuda")
    is_compiled = torch.cuda.is_available() and in_use(device).batch_invariant
    return replacing(device).compiled_count() if is_compiled else 0


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)
