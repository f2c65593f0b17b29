"""Root-mean-square norms over the last dimension: shapes and dtypes are checked here.

norm(x) = x / sqrt(mean(x ** 2) + eps) * weight
"""

from __future__ import annotations

import torch

from kernels.platform import implementation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x), fresh.

    x       [tokens, size], unit stride along size
    weight  [size], dtype of x
    """
    _check(x, weight, num_dims=2)
    return _module(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), each [tokens, size].

    x         [tokens, size], contiguous; read only
    residual  like x; spent: its memory may hold the sum afterwards, so only the returned tensors are to be used
    weight    [size], dtype of x
    """
    _check(x, weight, num_dims=2)
    assert residual.shape == x.shape and residual.dtype == x.dtype, "x and the residual are alike"
    assert x.is_contiguous() and residual.is_contiguous(), "x and the residual are contiguous"
    return _module(x).add_rms_norm(x, residual, weight, eps)


def rms_norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm of each head with a weight of its own, fresh and contiguous.

    x       [tokens, heads, head_dim], unit stride along head_dim
    weight  [heads, head_dim], dtype of x
    """
    _check(x, weight, num_dims=3)
    return _module(x).rms_norm_heads(x, weight, eps)


def _module(x: torch.Tensor):  # type: ignore[no-untyped-def]
    return implementation("rms_norm", x.device)


def _check(x: torch.Tensor, weight: torch.Tensor, num_dims: int) -> None:
    assert x.dim() == num_dims and x.stride(-1) == 1, f"x has {num_dims} dimensions, the last of unit stride"
    assert weight.shape == x.shape[1:] and weight.is_contiguous(), "the weight has the shape of one token"
    assert weight.dtype == x.dtype, f"x is {x.dtype}, its weight {weight.dtype}"
