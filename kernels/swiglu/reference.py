"""`kernels.swiglu.ops` in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.contract import Contract

CONTRACT = Contract(replayable=True)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.swiglu`."""
    gate, up = gate_up.chunk(2, dim=1)
    return functional.silu(gate).mul_(up)
