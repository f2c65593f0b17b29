"""`kernels.rms_norm.ops` with the fused norms of torch_npu. Not verified on an NPU."""

from __future__ import annotations

import torch
import torch_npu

from kernels.contract import Contract
from kernels.rms_norm import reference

CONTRACT = Contract(replayable=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    if weight.dtype is not x.dtype:  # a pair that torch_npu does not document
        return reference.rms_norm(x, weight, eps)
    return torch_npu.npu_rms_norm(x, gamma=weight, epsilon=eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.add_rms_norm`."""
    if weight.dtype is not x.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    normed, _, total = torch_npu.npu_add_rms_norm(x, residual, gamma=weight, epsilon=eps)
    return normed, total
