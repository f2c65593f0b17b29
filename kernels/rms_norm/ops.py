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
    _check(x, weight)
    out: torch.Tensor = implementation("rms_norm", x.device).rms_norm(x, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), each [tokens, size].

    x         [tokens, size], contiguous; read only
    residual  like x; spent: its memory may hold the sum afterwards, so only the returned tensors are to be used
    weight    [size], dtype of x
    """
    # Twice per layer, so few looks at the tensors: each costs a CPU a measurable part of a small layer.
    assert residual.shape == x.shape and residual.dtype == x.dtype, "x and the residual are alike"
    assert x.is_contiguous() and residual.is_contiguous(), "x and the residual are contiguous"
    assert weight.numel() == x.size(-1) and weight.dtype == x.dtype, "the weight has the shape of one token"
    both: tuple[torch.Tensor, torch.Tensor] = implementation("rms_norm", x.device).add_rms_norm(
        x, residual, weight, eps
    )
    return both


def rms_norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm of each head with a weight of its own, fresh and contiguous.

    x       [tokens, heads, head_dim], unit stride along head_dim
    weight  [heads, head_dim], dtype of x
    """
    _check(x, weight)
    out: torch.Tensor = implementation("rms_norm", x.device).rms_norm_heads(x, weight, eps)
    return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert weight.shape == x.shape[1:], "the weight has the shape of one token"
    assert weight.dtype == x.dtype, f"x is {x.dtype}, its weight {weight.dtype}"
    assert x.stride(-1) == 1, "x has unit stride along its last dimension"
