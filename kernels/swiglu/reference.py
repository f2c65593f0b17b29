"""`kernels.swiglu.ops` in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.contract import Contract
from kernels.shapes import CLAMP, CLAMPED_SLOPE, Activation

CONTRACT = Contract(replayable=True)


def swiglu(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """See `ops.swiglu`."""
    gate, up = gate_up.chunk(2, dim=1)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh").mul_(up)
    if activation == "clamped":
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return (gate * torch.sigmoid(gate * CLAMPED_SLOPE)).mul_(up + 1)
    return functional.silu(gate).mul_(up)
