"""`kernels.rotary.ops` with torch_npu's fused rotation. Not verified on an NPU.

Queries and keys are turned apart, since what reads them next wants contiguous tensors: two launches instead of one
launch and two copies.
"""

from __future__ import annotations

import torch
import torch_npu

from kernels.rotary import reference

# What torch_npu documents for the mode "half": fewer heads and a smaller head than these.
_HEADS_END = 1000
_HEAD_DIM_END = 896


def rotary(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.rotary`; q and k are two tensors."""
    if qk.shape[1] >= _HEADS_END or qk.shape[2] >= _HEAD_DIM_END:
        return reference.rotary(qk, cos, sin, num_heads)
    # [1, tokens, 1, head_dim]: the documented layout with a batch of one.
    cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    q, k = qk[:, :num_heads].unsqueeze(0), qk[:, num_heads:].unsqueeze(0)
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [1, tokens, heads, head_dim] -> fresh [tokens, heads, head_dim]"""
    return torch_npu.npu_rotary_mul(x, r1=cos, r2=sin, rotary_mode="half").squeeze(0)
