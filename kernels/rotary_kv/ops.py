"""Preparation of attention from a packed projection: queries and keys rotated, keys and values in the paged cache.

Shapes and dtypes are checked here; the platform's implementation does the work, in one launch where it can.
"""

from __future__ import annotations

import torch

from kernels.paged_attention.cache_layout import is_heads_first
from kernels.platform import contract, implementation, in_use


def rotary_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    head_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    has_gates: bool = False,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values into the paged cache. For token t, with s = slot_mapping[t]:

        q, k, v = the first heads of qkv[t], then kv_heads, then kv_heads again
        n(x)    = x / sqrt(mean(x ** 2) + eps) * head_weight  for each head x of q and k;  x without head_weight
        r(x)    = n(x) * cos[t] + rotate_half(n(x)) * sin[t],  rotate_half((a, b)) = (-b, a) for the two halves,
                  of the first rotary_dim elements of n(x); the others stay as they are
        k_cache[s // block_size, s % block_size] = r(k),  v_cache likewise = v

    qkv               [tokens, heads + 2 * kv_heads, head_dim], unit stride along head_dim, head_dim stride between
                      heads, any stride between tokens; read only. With has_gates [tokens, 2 * heads + 2 * kv_heads,
                      head_dim]: behind each query stands its gate, which is passed over
    cos, sin          [tokens, 1, rotary_dim], contiguous, dtype of qkv; both halves of a row are the same. Values in
                      [-1, 1] where rotary_dim is head_dim
    k_cache, v_cache  [num_blocks, block_size, kv_heads, head_dim], dtype of qkv, both contiguous, or both head by head
                      (`kernels/paged_attention/cache_layout.py`) on an NPU; changed in place
    slot_mapping      int64 [tokens], contiguous; no slot twice, none in block 0. -1 pads a step: such a token writes
                      nothing to the caches, its rows may hold anything, and its queries come out as anything
    head_weight, eps  of the norm of query and key heads, None where they have none: [heads + kv_heads, head_dim],
                      contiguous, dtype of qkv, or float32. All query heads have the same row, and all key heads

    Returns r(q), [tokens, heads, head_dim], fresh, with head_dim stride between heads.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    kv_heads = k_cache.shape[2]
    num_heads = num_all_heads - 2 * kv_heads
    if has_gates:
        assert num_heads % 2 == 0, "qkv: each of the first heads before its gate, then kv_heads, then kv_heads"
        num_heads //= 2
    assert k_cache.shape == v_cache.shape and k_cache.dim() == 4, "caches: [num_blocks, block_size, kv_heads, head_dim]"
    heads_first = is_heads_first(k_cache)
    assert heads_first or k_cache.is_contiguous(), "a cache is contiguous, or lies head by head"
    assert k_cache.stride() == v_cache.stride(), "both caches lie alike"
    assert not heads_first or in_use(qkv.device).device == "npu", "head by head, caches are an NPU's"
    assert k_cache.shape[3] == head_dim and num_heads > 0, "qkv: heads, then kv_heads, then kv_heads"
    assert head_dim % 2 == 0 and qkv.stride()[1:] == (head_dim, 1), "the heads of a token are contiguous, of two halves"
    rotary_dim = cos.shape[-1]
    assert cos.shape == sin.shape == (num_tokens, 1, rotary_dim), "cos, sin: [tokens, 1, rotary_dim]"
    assert rotary_dim % 2 == 0 and rotary_dim <= head_dim, "what is turned of a head has two halves"
    assert cos.dtype == sin.dtype == qkv.dtype, f"qkv is {qkv.dtype}, its rotation {cos.dtype} and {sin.dtype}"
    assert k_cache.dtype == v_cache.dtype == qkv.dtype, f"the caches hold {k_cache.dtype}, not {qkv.dtype}"
    assert slot_mapping.shape == (num_tokens,), "slot_mapping: [tokens]"
    if head_weight is not None:
        assert head_weight.shape == (num_heads + kv_heads, head_dim), "head_weight: [heads + kv_heads, head_dim]"
        assert head_weight.dtype in (qkv.dtype, torch.float32), f"qkv is {qkv.dtype}, head_weight {head_weight.dtype}"
    q: torch.Tensor = implementation("rotary_kv", qkv.device).rotary_kv(
        qkv, cos, sin, k_cache, v_cache, slot_mapping, head_weight, eps, has_gates
    )
    return q


def warm_up(
    k_cache: torch.Tensor,
    num_heads: int,
    *,
    head_weight: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    has_gates: bool = False,
) -> int:
    """Compile all that calls with this cache can need, whatever their number of tokens.

    k_cache     [num_blocks, block_size, kv_heads, head_dim]; neither read nor changed. v_cache is taken to be like it
    rotary_dim  elements of a head that are turned; None: all

    Returns the number of variants that were compiled; 0 where nothing is ever compiled (on a CPU).
    """
    serving = contract("rotary_kv", k_cache.device)
    return serving.warm_up_and_count(k_cache, num_heads, head_weight, rotary_dim or k_cache.shape[3], has_gates)
