"""The gate of a feed-forward layer: shapes are checked here."""

from __future__ import annotations

import torch

from kernels.platform import contract, implementation
from kernels.shapes import Activation


def swiglu(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """act(gate_up[:, :size]) * gate_up[:, size:], fresh and contiguous [tokens, size].

    gate_up  [tokens, 2 * size], unit stride along the columns, any stride between tokens; read only. Rows of padding
             may hold anything
    activation  silu(x) = x / (1 + exp(-x)), or gelu by its approximation with tanh (Hendrycks and Gimpel, 2016):
             gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)));
             "clamped", of gpt-oss: with gate at most 7 and up within [-7, 7],
             gate / (1 + exp(-1.702 * gate)) * (up + 1)
    """
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "gate_up is [tokens, 2 * size]"
    assert gate_up.stride(1) == 1, "gate_up has unit stride along its columns"
    out: torch.Tensor = implementation("swiglu", gate_up.device).swiglu(gate_up, activation)
    return out


def warm_up(size: int, dtype: torch.dtype, device: torch.device, activation: Activation = "silu") -> int:
    """Compile all that calls of this size can need, whatever their number of tokens; the number of variants compiled.

    0 where nothing is ever compiled (on a CPU).
    """
    return contract("swiglu", device).warm_up_and_count(size, dtype, device, activation)
