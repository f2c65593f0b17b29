"""A quantised weight, whatever format it came in, and its values: what the kernels of quantised weights agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Values that are computed in float32 at a time.
_ELEMENTS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """A weight [out_features, in_features] in codes: w[o, i] = value(codes[o, i]) * scales[o, i // group] + offsets[o,
    i // group], in float32, rounded once.

    codes    int8 or float8_e4m3fn [out, in]; or uint8 [out, in / 2]: two 4-bit codes a byte, the even input in the low
             nibble
    scales   float32 [out, in / group]
    offsets  float32 as scales, or None. Zero points become offsets = -zero * scale, which is exact in float32
    table    float32 [16]: values of 4-bit codes (nf4, e2m1); None: the code itself, 0 to 15
    group    inputs that share a scale; in_features: one scale per row
    order    int32 [in] or None: position i of the codes multiplies input order[i] (GPTQ's desc_act, sorted by group)
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    table: torch.Tensor | None
    group: int
    order: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * (2 if self.codes.dtype == torch.uint8 else 1)

    def to(self, device: torch.device) -> Quantised:
        """The same weight there, its tensors contiguous; those that lie there so are not copied."""
        optional = (None if part is None else part.to(device) for part in (self.offsets, self.table, self.order))
        offsets, table, order = optional
        codes, scales = self.codes.to(device).contiguous(), self.scales.to(device).contiguous()
        return Quantised(codes, scales, offsets, table, self.group, order)


def dequantise(weight: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] in `dtype`, on the device of the codes."""
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.codes.device)
    num_rows = max(1, _ELEMENTS_AT_ONCE // weight.in_features)
    for first in range(0, weight.out_features, num_rows):
        rows = slice(first, first + num_rows)
        grouped = _code_values(weight, rows).view(-1, weight.in_features // weight.group, weight.group)
        values = grouped * weight.scales[rows, :, None]
        if weight.offsets is not None:
            values += weight.offsets[rows, :, None]
        flat = values.view(-1, weight.in_features)
        if weight.order is None:
            out[rows] = flat
        else:
            out[rows, weight.order.long()] = flat.to(dtype)
    return out


def _code_values(weight: Quantised, rows: slice) -> torch.Tensor:
    """float32 [rows, in]: values of the codes, by position."""
    codes = weight.codes[rows]
    if codes.dtype != torch.uint8:
        return codes.float()
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1)
    return nibbles.float() if weight.table is None else weight.table[nibbles.long()]


def joined(weights: Sequence[Quantised]) -> Quantised | None:
    """Weights of the same inputs, one below the other; None where their codes have not one form."""
    if not weights:
        return None
    first, group = weights[0], math.gcd(*(weight.group for weight in weights))
    for weight in weights[1:]:
        same = weight.codes.dtype == first.codes.dtype and weight.codes.shape[1] == first.codes.shape[1]
        if not same or not _equal(weight.table, first.table) or not _equal(weight.order, first.order):
            return None
    scales = [weight.scales.repeat_interleave(weight.group // group, 1) for weight in weights]
    offsets = None
    if any(weight.offsets is not None for weight in weights):
        each = (torch.zeros_like(w.scales) if w.offsets is None else w.offsets for w in weights)
        offsets = torch.cat([o.repeat_interleave(w.group // group, 1) for o, w in zip(each, weights, strict=True)])
    codes = torch.cat([weight.codes for weight in weights])
    return Quantised(codes, torch.cat(scales), offsets, first.table, group, first.order)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in] of 0 to 15 -> [out, in / 2], the even input in the low nibble."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def in_flat_blocks(codes: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, block: int) -> Quantised:
    """A weight of 4-bit codes uint8 [out, in / 2] whose blocks of inputs, with an absmax each, go on from one row to
    the next."""
    num_rows, inputs = codes.shape[0], codes.shape[1] * 2
    group = math.gcd(inputs, block)
    starts = torch.arange(num_rows * inputs // group, device=codes.device) * group // block
    return Quantised(codes, absmax.float()[starts].view(num_rows, -1), None, table.float(), group, None)
