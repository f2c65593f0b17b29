"""`kernels.swiglu.ops` with torch_npu's fused gate. Not verified on an NPU."""

from __future__ import annotations

import torch
import torch_npu

from kernels.contract import Contract
from kernels.shapes import Activation
from kernels.swiglu import reference

CONTRACT = Contract(replayable=True)


def swiglu(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """See `ops.swiglu`."""
    if activation != "silu":
        return reference.swiglu(gate_up, activation)
    out: torch.Tensor = torch_npu.npu_swiglu(gate_up, dim=-1)
    return out
