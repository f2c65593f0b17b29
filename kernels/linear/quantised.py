"""A quantised weight, whatever format it came in, and its values: what the kernels of quantised weights agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn import functional

# Values of NF4's codes, as bitsandbytes has them: quantiles of the normal distribution.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NF4_BLOCK = 64
# Values of 4-bit floats, e2m1, as MXFP4 has them.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The largest values of codes in 8 bits.
_MOST = {"fp8": 448.0, "int8": 127.0}
# Values that are computed in float32 at a time.
_ELEMENTS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """A weight [out_features, in_features] in codes: w[o, i] = value(codes[o, i]) * scales[o, i // group] + offsets[o,
    i // group], in float32, rounded once.

    codes    int8 or float8_e4m3fn [out, in]; or uint8 [out, in / 2]: two 4-bit codes a byte, the even input in the low
             nibble
    scales   float32 [out, in / group], or float8_e8m0fnu: powers of two (MXFP4)
    offsets  float32 as scales, or None. Zero points become offsets = -zero * scale, which is exact in float32
    table    float32 [16]: values of 4-bit codes (nf4, e2m1); None: the code itself, 0 to 15
    group    inputs that share a scale; in_features: one scale per row
    order    int32 [in] or None: position i of the codes multiplies input order[i] (GPTQ's desc_act, sorted by group)
    rounds_inputs
             it was made for inputs that are rounded to 8 bits for each token (W8A8): a device with such products may
             round them
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    table: torch.Tensor | None
    group: int
    order: torch.Tensor | None
    rounds_inputs: bool = False

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * (2 if self.codes.dtype == torch.uint8 else 1)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.offsets, self.table, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, chosen: torch.Tensor | slice) -> Quantised:
        """The weight of these outputs: views of a slice, else copies of the places int64 [rows]."""
        offsets = None if self.offsets is None else self.offsets[chosen]
        return replace(self, codes=self.codes[chosen], scales=self.scales[chosen], offsets=offsets)

    def to(self, device: torch.device, *, copy: bool = False) -> Quantised:
        """The same weight there, its tensors contiguous; those that lie there so are copied with `copy` alone."""
        optional = (None if part is None else part.to(device) for part in (self.offsets, self.table, self.order))
        offsets, table, order = optional
        # Devices beside these two may not know exponents.
        held = self.scales if device.type in ("cpu", "cuda") else self.scales.float()
        codes, scales = (part.to(device, copy=copy).contiguous() for part in (self.codes, held))
        return Quantised(codes, scales, offsets, table, self.group, order, self.rounds_inputs)


def dequantise(weight: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] in `dtype`, on the device of the codes."""
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.codes.device)
    num_rows = max(1, _ELEMENTS_AT_ONCE // weight.in_features)
    for first in range(0, weight.out_features, num_rows):
        rows = slice(first, first + num_rows)
        grouped = _code_values(weight, rows).view(-1, weight.in_features // weight.group, weight.group)
        values = grouped * weight.scales[rows, :, None].float()
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
    table = torch.arange(16.0, device=codes.device) if weight.table is None else weight.table
    # Both codes of a byte at once, which on a CPU is five times as fast as one after the other.
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1)
    return functional.embedding(codes.int(), pairs).flatten(1)


def quantise(weight: torch.Tensor, kind: Literal["fp8", "int8", "nf4"]) -> Quantised:
    """A weight [out, in] in codes, on its device: fp8 (e4m3) and int8 with a scale for each output, nf4 in blocks of 64
    as bitsandbytes has them. Of nf4, the number of inputs must be even."""
    if kind == "nf4":
        return _nf4(weight)
    absmax = weight.abs().amax(1, keepdim=True).float()
    scales = torch.where(absmax == 0, 1.0, absmax / _MOST[kind])  # of NaN: NaN
    codes = torch.empty_like(weight, dtype=torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    num_rows = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    for first in range(0, weight.shape[0], num_rows):
        rows = slice(first, first + num_rows)
        values = (weight[rows].float() / scales[rows]).clamp_(-_MOST[kind], _MOST[kind])
        codes[rows] = values.round_().to(torch.int8) if kind == "int8" else values.to(torch.float8_e4m3fn)
    return Quantised(codes, scales, None, None, weight.shape[1], None)


def _nf4(weight: torch.Tensor) -> Quantised:
    table = torch.tensor(NF4, device=weight.device)
    flat = weight.reshape(-1)
    packed, absmax = [], []
    for part in flat.split(_ELEMENTS_AT_ONCE):
        blocks = functional.pad(part.float(), (0, -part.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
        most = blocks.abs().amax(1)
        scaled = blocks * (1.0 / most.clamp(min=1e-38))[:, None]
        codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
        packed.append(pack_nibbles(codes).view(-1)[: part.numel() // 2])
        absmax.append(most)
    codes = torch.cat(packed).view(weight.shape[0], weight.shape[1] // 2)
    return in_flat_blocks(codes, torch.cat(absmax), table, NF4_BLOCK)


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
    rounds_inputs = all(weight.rounds_inputs for weight in weights)
    return Quantised(codes, torch.cat(scales), offsets, first.table, group, first.order, rounds_inputs)


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
