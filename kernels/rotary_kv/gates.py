"""Queries that are each followed by a gate, for implementations that take queries side by side."""

from __future__ import annotations

import torch


def without_gates(qkv: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[tokens, 2 * heads + 2 * kv_heads, head_dim] -> fresh [tokens, heads + 2 * kv_heads, head_dim]"""
    num_gated = qkv.shape[1] - 2 * kv_heads
    return torch.cat((qkv[:, :num_gated:2], qkv[:, num_gated:]), dim=1)
