"""Root-mean-square norms of tokens: shapes and dtypes are checked here.

norm(x) = x / sqrt(mean(x ** 2) + eps) * weight

Rows of padding may hold anything: a row's result depends on that row alone.
"""

from __future__ import annotations

import torch

from kernels.platform import contract, implementation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """norm(x), fresh and contiguous.

    x       [tokens, size], unit stride along size, any stride between tokens; read only
    weight  [size], dtype of x, or float32
    """
    assert x.dim() == 2 and x.stride(1) == 1, "x is [tokens, size], with unit stride along size"
    assert weight.shape == x.shape[1:], "the weight has the shape of one token"
    assert weight.dtype in (x.dtype, torch.float32), f"x is {x.dtype}, its weight {weight.dtype}"
    out: torch.Tensor = implementation("rms_norm", x.device).rms_norm(x, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), each contiguous [tokens, size]. The sum is rounded before it is normed.

    x         [tokens, size], unit stride along size, any stride between tokens; read only
    residual  like x, contiguous; spent: its memory may hold the sum afterwards, so only the returned tensors are to be
              used
    weight    [size], dtype of x, or float32
    """
    # Twice per layer, so few looks at the tensors: each costs a CPU a measurable part of a small layer.
    assert residual.shape == x.shape and residual.dtype == x.dtype, "x and the residual are alike"
    assert x.stride(-1) == 1 and residual.is_contiguous(), "x has unit stride along size, the residual is contiguous"
    assert weight.numel() == x.size(-1), "the weight has the shape of one token"
    assert weight.dtype is x.dtype or weight.dtype is torch.float32, f"x is {x.dtype}, its weight {weight.dtype}"
    both: tuple[torch.Tensor, torch.Tensor] = implementation("rms_norm", x.device).add_rms_norm(
        x, residual, weight, eps
    )
    return both


def warm_up(
    weight: torch.Tensor, dtype: torch.dtype | None = None, *, columns: int | None = None, first: int = 0
) -> int:
    """Compile all that calls with such a weight can need, whatever their number of tokens; the variants compiled.

    dtype           of x; None: the weight's
    columns, first  x are columns of a tensor of so many, from `first` on; None: it is contiguous. How far its rows are
                    apart and where it begins decide, by what divides them, which variant serves.

    0 where nothing is ever compiled (on a CPU).
    """
    size = weight.shape[0]
    x = weight.new_zeros(1, columns or size, dtype=dtype or weight.dtype)[:, first : first + size]
    return contract("rms_norm", weight.device).warm_up_and_count(x, weight)
