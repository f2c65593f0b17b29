"""`kernels.rotary_kv.ops` on a CPU, where torch looks at each slot it writes: only steps with padding pay for those."""

from __future__ import annotations

import torch

from kernels.contract import Contract
from kernels.rotary_kv.reference import rotated, without_gates

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
    has_gates: bool = False,
) -> torch.Tensor:
    """See `ops.rotary_kv`."""
    if has_gates:
        qkv = without_gates(qkv, k_cache.shape[2])
    q, k, v = rotated(qkv, cos, sin, k_cache.shape[2], head_weight, eps)
    try:
        _write(k, v, k_cache, v_cache, slot_mapping)
    except IndexError:  # at the first -1; what was written before is right
        is_real = slot_mapping >= 0
        _write(k[is_real], v[is_real], k_cache, v_cache, slot_mapping[is_real])
    return q


def _write(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)
