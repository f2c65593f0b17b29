"""The common first part of all torch implementations: splitting the heads, and computing their steps."""

from __future__ import annotations

import torch
from torch.nn import functional


def heads_of(
    xbc: torch.Tensor, states: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [tokens, num_heads, head_dim], B and C [tokens, num_heads, state_size])"""
    _, num_heads, state_size, head_dim = states.shape
    size = num_heads * head_dim
    size_of_groups = (xbc.shape[1] - size) // 2
    x, b, c = xbc.to(dtype).split((size, size_of_groups, size_of_groups), dim=1)
    num_shared = num_heads * state_size // size_of_groups
    b, c = (part.unflatten(1, (-1, state_size)).repeat_interleave(num_shared, dim=1) for part in (b, c))
    return x.unflatten(1, (num_heads, head_dim)), b, c


def steps_of(
    dt: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(step, the logarithm of the decay), each [tokens, num_heads]; the latter is at most 0."""
    step = functional.softplus(dt.to(dtype) + dt_bias.to(dtype))
    return step, -a_log.to(dtype).exp() * step
