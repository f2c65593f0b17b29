"""`kernels.rotary_kv.ops` on a CPU, which may look at the slots: only steps with padding pay for it."""

from __future__ import annotations

import torch

from kernels.contract import Contract
from kernels.rotary_kv.reference import rotated

CONTRACT = Contract()


def rotary_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See `ops.rotary_kv`."""
    q, k, v = rotated(qkv, cos, sin, k_cache.shape[2], head_weight, eps)
    is_real = slot_mapping >= 0
    if not bool(is_real.all()):
        slot_mapping, k, v = slot_mapping[is_real], k[is_real], v[is_real]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)
    return q
