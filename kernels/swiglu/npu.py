"""`kernels.swiglu.ops` with torch_npu's fused gate. Not verified on an NPU."""

from __future__ import annotations

import torch
import torch_npu

from kernels.contract import Contract

CONTRACT = Contract()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.swiglu`."""
    out: torch.Tensor = torch_npu.npu_swiglu(gate_up, dim=-1)
    return out
