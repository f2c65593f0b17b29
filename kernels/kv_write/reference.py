"""`kernels.kv_write.ops` in plain torch."""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `ops.write_kv`."""
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)
