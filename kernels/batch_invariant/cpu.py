"""Torch operators on a CPU whose results for a token do not depend on its step.

Rows are multiplied in blocks of one size, so that each product has one shape. Functions whose vector and scalar code
round differently are given pieces that one thread computes in whole vectors. Sums along rows need nothing: torch
divides them among threads by rows, as long as a row has less than 32,768 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

# Rows of a product. Fewer would read weights more often in large steps, more would compute more for nothing in small
# ones.
BLOCK_ROWS = 16
# Elements that torch leaves to one thread (at::internal::GRAIN_SIZE is 32768), and those of two vectors of 512 bits of
# the narrowest type: whole pieces have no rest that scalar code computes.
_UNIT = 64
_PIECE = 32768 - _UNIT

_aten = torch.ops.aten


def _by_blocks(x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """product(x) of x [tokens, in], by BLOCK_ROWS rows at a time."""
    num_rows = x.shape[0]
    x = functional.pad(x, (0, 0, 0, -num_rows % BLOCK_ROWS)).contiguous()
    if len(x) == BLOCK_ROWS:
        return product(x)[:num_rows]
    if not num_rows:
        return product(x)
    first = product(x[:BLOCK_ROWS])
    out = first.new_empty(len(x), first.shape[1])
    out[:BLOCK_ROWS] = first
    for start in range(BLOCK_ROWS, len(x), BLOCK_ROWS):
        out[start : start + BLOCK_ROWS] = product(x[start : start + BLOCK_ROWS])
    return out[:num_rows]


def _linear_pointwise(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _by_blocks(x, lambda rows: torch.ops.mkldnn._linear_pointwise.default(rows, weight, *rest))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = _by_blocks(x.reshape(-1, x.shape[-1]), lambda rows: _aten.linear.default(rows, weight, bias))
    return product.view(*x.shape[:-1], weight.shape[0])


def _mm(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return _by_blocks(x, lambda rows: _aten.mm.default(rows, other))


def _matmul(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Of more dimensions: an implementation's own, which calls it with one shape.
    return _mm(x, other) if x.dim() == other.dim() == 2 else _aten.matmul.default(x, other)


def _addmm(bias: torch.Tensor, x: torch.Tensor, other: torch.Tensor, **factors: Any) -> torch.Tensor:
    assert bias.dim() == 1, "a bias is the same for all rows"
    return _by_blocks(x, lambda rows: _aten.addmm.default(bias, rows, other, **factors))


def _addcmul(total: torch.Tensor, one: torch.Tensor, two: torch.Tensor, *, value: float = 1.0) -> torch.Tensor:
    """Rounded twice everywhere: a fused multiplication is rounded once, in vector or scalar code alone."""
    return total + one * two * value


def _addcmul_(total: torch.Tensor, one: torch.Tensor, two: torch.Tensor, *, value: float = 1.0) -> torch.Tensor:
    return total.add_(one * two * value)


def _in_pieces(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """function(x), element by element."""
    size = x.numel()
    flat = functional.pad(x.reshape(-1), (0, -size % _UNIT))
    parts = [function(part, *rest, **options) for part in flat.split(_PIECE)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:size].view(x.shape)


def _pieces_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, *rest, **options: _in_pieces(function, x, *rest, **options)


def _pieces_in_place_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, *rest, **options: x.copy_(_in_pieces(function, x, *rest, **options))


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """By its definition: oneDNN, which computes it, divides elements among threads as it likes."""
    assert approximate == "tanh", "gelu by its approximation"
    wide = x.float()
    inner = (wide + wide * wide * wide * 0.044715) * math.sqrt(2 / math.pi)
    return (wide * 0.5 * (_in_pieces(_aten.tanh.default, inner) + 1)).to(x.dtype)


REPLACEMENTS: dict[object, Callable[..., Any]] = {
    _aten.linear.default: _linear,
    _aten.mm.default: _mm,
    _aten.matmul.default: _matmul,
    _aten.addmm.default: _addmm,
    _aten.gelu.default: _gelu,
    _aten.addcmul.default: _addcmul,
    _aten.addcmul_.default: _addcmul_,
    **{
        function: _pieces_of(function)
        for function in (
            *(_aten.exp.default, _aten.silu.default, _aten.sigmoid.default, _aten.tanh.default),
            *(_aten.softplus.default, _aten.cos.default, _aten.sin.default, _aten.log.default),
        )
    },
    _aten.exp_.default: _pieces_in_place_of(_aten.exp.default),
    _aten.tanh_.default: _pieces_in_place_of(_aten.tanh.default),
    _aten.sigmoid_.default: _pieces_in_place_of(_aten.sigmoid.default),
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    REPLACEMENTS[torch.ops.mkldnn._linear_pointwise.default] = _linear_pointwise
