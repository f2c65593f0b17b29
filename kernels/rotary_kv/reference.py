"""`kernels.rotary_kv.ops` in plain torch, for any device: no size depends on values, and no device is waited for."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.contract import Contract
from kernels.paged_attention.cache_layout import as_lines, line_slots


def without_gates(qkv: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[tokens, 2 * heads + 2 * kv_heads, head_dim] -> fresh [tokens, heads + 2 * kv_heads, head_dim]"""
    num_gated = qkv.shape[1] - 2 * kv_heads
    return torch.cat((qkv[:, :num_gated:2], qkv[:, num_gated:]), dim=1)


CONTRACT = Contract(replayable=True)


def rotary_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_weight: torch.Tensor | None,
    eps: float,
    has_gates: bool = False,
) -> torch.Tensor:
    """See `ops.rotary_kv`."""
    if has_gates:
        qkv = without_gates(qkv, k_cache.shape[2])
    q, k, v = rotated(qkv, cos, sin, k_cache.shape[2], head_weight, eps)
    slots = line_slots(k_cache, slot_mapping)
    # Slot 0 stands in the null block, which no token owns. Padding writes there what is there.
    is_padding = (slots < 0)[:, None, None]
    slots = slots.clamp(min=0)
    for cache, new in ((as_lines(k_cache), k), (as_lines(v_cache), v)):
        lines = cache.view(-1, *cache.shape[2:])
        lines.index_copy_(0, slots, torch.where(is_padding, lines[0], new.reshape(-1, *lines.shape[1:])))
    return q


def rotated(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_heads: int,
    head_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(r(q), r(k), v); queries and keys are turned together and are views of one tensor, values of qkv."""
    num_qk_heads = qkv.shape[1] - kv_heads
    qk, v = qkv[:, :num_qk_heads], qkv[:, num_qk_heads:]
    if head_weight is not None and head_weight.dtype is qk.dtype:
        qk = functional.rms_norm(qk, qk.shape[-1:], None, eps).mul_(head_weight)
    elif head_weight is not None:
        qk = functional.rms_norm(qk.float(), qk.shape[-1:], None, eps).mul_(head_weight).to(qk.dtype)
    rotary_dim = cos.shape[-1]
    half = rotary_dim // 2
    half_sin = sin[..., :half]
    if rotary_dim == qk.shape[-1]:
        turned = qk * cos
    else:
        turned = qk.clone()
        turned[..., :rotary_dim] *= cos
    turned[..., :half].addcmul_(qk[..., half:rotary_dim], half_sin, value=-1)
    turned[..., half:rotary_dim].addcmul_(qk[..., :half], half_sin)
    num_heads = num_qk_heads - kv_heads
    return turned[:, :num_heads], turned[:, num_heads:], v
