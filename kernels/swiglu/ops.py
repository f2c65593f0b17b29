"""The gate of a feed-forward layer: shapes are checked here."""

from __future__ import annotations

import torch

from kernels.platform import contract, implementation


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate_up[:, :size]) * gate_up[:, size:], fresh and contiguous [tokens, size].

    gate_up  [tokens, 2 * size], unit stride along the columns, any stride between tokens; read only. Rows of padding
             may hold anything
    """
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "gate_up is [tokens, 2 * size]"
    assert gate_up.stride(1) == 1, "gate_up has unit stride along its columns"
    out: torch.Tensor = implementation("swiglu", gate_up.device).swiglu(gate_up)
    return out


def warm_up(size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Compile all that calls of this size can need, whatever their number of tokens; the number of variants compiled.

    0 where nothing is ever compiled (on a CPU).
    """
    return contract("swiglu", device).warm_up_and_count(size, dtype, device)
