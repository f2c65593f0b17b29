"""Writing a step's keys and values into the paged cache: shapes and dtypes are checked here."""

from __future__ import annotations

import torch

from kernels.platform import implementation


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """k_cache[s // block_size, s % block_size] = k[t] with s = slot_mapping[t]; v likewise.

    k, v              [tokens, kv_heads, head_dim], any strides
    k_cache, v_cache  [num_blocks, block_size, kv_heads, head_dim], contiguous, same dtype as k and v; changed in place
    slot_mapping      int64 [tokens], no slot twice
    """
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert cache.dim() == 4 and cache.is_contiguous(), "the cache is [num_blocks, block_size, kv_heads, head_dim]"
        assert new.shape == (slot_mapping.shape[0], *cache.shape[2:]), "k and v are [tokens, kv_heads, head_dim]"
        assert new.dtype == cache.dtype, f"the cache holds {cache.dtype}, not {new.dtype}"
    implementation("kv_write", k.device).write_kv(k, v, k_cache, v_cache, slot_mapping)
