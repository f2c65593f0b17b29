"""What attention needs of a packed projection: queries and keys rotated, keys and values in the paged cache.

Shapes and dtypes are checked here; the platform's implementation does the work, in one launch where it can.
"""

from __future__ import annotations

import torch

from kernels.platform import contract, implementation


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
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values into the paged cache. For token t, with s = slot_mapping[t]:

        q, k, v = the first heads of qkv[t], then kv_heads, then kv_heads again
        n(x)    = x / sqrt(mean(x ** 2) + eps) * head_weight  for each head x of q and k;  x without head_weight
        r(x)    = n(x) * cos[t] + rotate_half(n(x)) * sin[t],  rotate_half((a, b)) = (-b, a) for the two halves
        k_cache[s // block_size, s % block_size] = r(k),  v_cache likewise = v

    qkv               [tokens, heads + 2 * kv_heads, head_dim], unit stride along head_dim, head_dim stride between
                      heads, any stride between tokens; read only
    cos, sin          [tokens, 1, head_dim], contiguous, dtype of qkv, values in [-1, 1]; both halves of a row are the
                      same
    k_cache, v_cache  [num_blocks, block_size, kv_heads, head_dim], contiguous, dtype of qkv; changed in place
    slot_mapping      int64 [tokens], contiguous; no slot twice, none in block 0. -1 pads a step: such a token writes
                      nothing to the caches, its rows may hold anything, and its queries come out as anything
    head_weight, eps  of the norm of query and key heads, None where they have none: [heads + kv_heads, head_dim],
                      contiguous, dtype of qkv

    Returns r(q), [tokens, heads, head_dim], fresh, with head_dim stride between heads.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    kv_heads = k_cache.shape[2]
    assert k_cache.shape == v_cache.shape and k_cache.dim() == 4, "caches: [num_blocks, block_size, kv_heads, head_dim]"
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "the caches are contiguous"
    assert k_cache.shape[3] == head_dim and num_all_heads > 2 * kv_heads, "qkv: heads, then kv_heads, then kv_heads"
    assert head_dim % 2 == 0 and qkv.stride()[1:] == (head_dim, 1), "the heads of a token are contiguous, of two halves"
    assert cos.shape == sin.shape == (num_tokens, 1, head_dim), "cos, sin: [tokens, 1, head_dim]"
    assert cos.dtype == sin.dtype == qkv.dtype, f"qkv is {qkv.dtype}, its rotation {cos.dtype} and {sin.dtype}"
    assert k_cache.dtype == v_cache.dtype == qkv.dtype, f"the caches hold {k_cache.dtype}, not {qkv.dtype}"
    assert slot_mapping.shape == (num_tokens,), "slot_mapping: [tokens]"
    if head_weight is not None:
        assert head_weight.shape == (num_all_heads - kv_heads, head_dim), "head_weight: [heads + kv_heads, head_dim]"
        assert head_weight.dtype == qkv.dtype, f"qkv is {qkv.dtype}, head_weight {head_weight.dtype}"
    q: torch.Tensor = implementation("rotary_kv", qkv.device).rotary_kv(
        qkv, cos, sin, k_cache, v_cache, slot_mapping, head_weight, eps
    )
    return q


def warm_up(k_cache: torch.Tensor, num_heads: int, *, head_weight: torch.Tensor | None = None) -> int:
    """Compile all that calls with this cache can need, whatever their number of tokens.

    k_cache  [num_blocks, block_size, kv_heads, head_dim]; neither read nor changed. v_cache is taken to be like it

    Returns the number of variants that were compiled; 0 where nothing is ever compiled (on a CPU).
    """
    return contract("rotary_kv", k_cache.device).warm_up_and_count(k_cache, num_heads, head_weight)
