"""`kernels.rotary.ops` in plain torch: queries and keys are turned together."""

from __future__ import annotations

import torch


def rotary(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.rotary`; q and k are views of one tensor."""
    half = qk.shape[-1] // 2
    half_sin = sin[..., :half]
    turned = qk * cos
    turned[..., :half].addcmul_(qk[..., half:], half_sin, value=-1)
    turned[..., half:].addcmul_(qk[..., :half], half_sin)
    return turned[:, :num_heads], turned[:, num_heads:]
