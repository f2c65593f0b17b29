"""The truth of `kernels.linear.ops`: one torch call, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from kernels.contract import Contract
from kernels.linear.ops import PackedWeight, RowsBehind

CONTRACT = Contract(replayable=True)


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """Keep the weight as it is."""
    data, bias = weight.clone(), None if bias is None else bias.clone()
    nbytes = data.nbytes + (0 if bias is None else bias.nbytes)
    return PackedWeight(data, bias, weight.dtype, weight.shape[0], weight.shape[1], "reference", nbytes)


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """out = x @ weight.T + bias"""
    return functional.linear(x, weight.data, weight.bias)


def append_rows(weight: PackedWeight, num_rows: int, num_slices: int) -> tuple[PackedWeight, torch.Tensor]:
    """See `ops.append_rows`."""
    out_features, num_behind = weight.out_features, num_rows * num_slices
    buffer = weight.data.new_empty(out_features + num_behind, weight.in_features)
    data, rows = buffer[:out_features].copy_(weight.data), buffer[out_features:]
    bias = None if weight.bias is None else functional.pad(weight.bias, (0, num_behind))
    behind = RowsBehind(buffer, bias, num_rows, num_slices)
    return replace(weight, data=data, bias=None if bias is None else bias[:out_features], behind=behind), rows


def linear_window(x: torch.Tensor, behind: RowsBehind, num_columns: int) -> torch.Tensor:
    """x times the first num_columns rows of the buffer, plus bias."""
    return functional.linear(x, behind.data[:num_columns], None if behind.bias is None else behind.bias[:num_columns])
