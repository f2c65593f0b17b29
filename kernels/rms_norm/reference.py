"""`kernels.rms_norm.ops` in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.contract import Contract

CONTRACT = Contract(replayable=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    return _normed(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.add_rms_norm`; the sum is written over the residual."""
    residual.add_(x)
    return _normed(residual, weight, eps), residual


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype is x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
