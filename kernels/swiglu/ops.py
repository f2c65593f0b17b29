"""The gate of a feed-forward layer: shapes are checked here."""

from __future__ import annotations

import torch

from kernels.platform import implementation


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate_up[:, :size]) * gate_up[:, size:], fresh [tokens, size].

    gate_up  [tokens, 2 * size], contiguous; read only
    """
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "gate_up is [tokens, 2 * size]"
    assert gate_up.is_contiguous(), "gate_up is contiguous"
    out: torch.Tensor = implementation("swiglu", gate_up.device).swiglu(gate_up)
    return out
