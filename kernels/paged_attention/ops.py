"""Attention over a paged cache: shapes and dtypes are checked here, the platform's implementation does the work.

For sequence i, with n = query_starts[i + 1] - query_starts[i] tokens in the step and L = kv_lens[i] cached ones (these
n included), token t of them stands at position p = L - n + t and

    out[t] = softmax(cap(scale * q[t] @ K[first : p + 1].T)) @ V[first : p + 1]
    first = max(0, p + 1 - sliding_window),   cap(s) = score_cap * tanh(s / score_cap), or s where score_cap is None

where query head h reads key/value head h // (num_heads / kv_heads), and position j of the sequence is in the cache at
[block_tables[i][j // block_size], j % block_size]. With sinks the softmax runs over sinks[h] too, a score without a
value, so that the weights of the keys add up to less than 1.
"""

from __future__ import annotations

import torch

from kernels.attention_maps import AttentionMaps
from kernels.paged_attention.cache_layout import is_heads_first
from kernels.platform import contract, implementation, in_use


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    maps: AttentionMaps,
    *,
    scale: float,
    sliding_window: int | None = None,
    score_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a step's tokens over their own sequences, this step's keys and values being in the cache already.

    q                 [tokens, num_heads, head_dim], unit stride along head_dim, head_dim stride between heads
    k_cache, v_cache  [num_blocks, block_size, kv_heads, head_dim], same dtype as q, both contiguous, or both head by
                      head (`cache_layout.py`) where the platform has them so; read only
    sliding_window    latest tokens that a query sees, itself included; None = all
    score_cap         above 0: bound of the scores' magnitude; None = none
    sinks             float32 [num_heads], contiguous: a score of each head, neither scaled nor capped; None = none
    out               [tokens, num_heads, head_dim] contiguous; made when None

    Returns out.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(2) == 1 and q.stride(1) == head_dim, "the heads of a token are contiguous"
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride(), "caches disagree"
    heads_first = is_heads_first(k_cache)
    assert heads_first or k_cache.is_contiguous(), "a cache is contiguous, or lies head by head"
    assert not heads_first or in_use(q.device).kv_heads_first, "caches lie as the platform has them"
    assert k_cache.shape[3] == head_dim and num_heads % k_cache.shape[2] == 0, "q does not fit the cache"
    assert q.dtype == k_cache.dtype == v_cache.dtype, "q and the cache have one dtype"
    assert maps.slot_mapping.shape == (num_tokens,), "the maps do not cover the step's tokens"
    assert sliding_window is None or sliding_window > 0, "a window holds at least the token itself"
    assert score_cap is None or score_cap > 0, "a cap is above 0"
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype == torch.float32), "a sink for each head"
    if out is None:
        out = q.new_empty(num_tokens, num_heads, head_dim)
    assert out.shape == q.shape and out.is_contiguous() and out.dtype == q.dtype, "out is like q, and contiguous"
    module = implementation("paged_attention", q.device, regime_of(maps, sliding_window))
    options = {"scale": scale, "sliding_window": sliding_window, "score_cap": score_cap, "sinks": sinks}
    module.paged_attention(q, k_cache, v_cache, maps, **options, out=out)
    return out


def regime_of(maps: AttentionMaps, sliding_window: int | None) -> str:
    """By what a captured step keeps."""
    if maps.is_decode:
        return "" if sliding_window is None else "window"
    return "mixed" if sliding_window is None else "mixed_window"


def warm_up(
    k_cache: torch.Tensor,
    num_heads: int,
    *,
    sliding_window: int | None = None,
    score_cap: float | None = None,
    has_sinks: bool = False,
) -> int:
    """Compile all that `paged_attention` over this cache can need, and reserve memory, so that steps can be captured.

    Afterwards no step of any size compiles anything. To be called once for each distinct set of window, cap and
    sinks of a model's layers.

    k_cache    [num_blocks, block_size, kv_heads, head_dim]; neither read nor changed
    num_heads  query heads; q is taken to be contiguous, as `rotary_kv` gives it where kernels are compiled

    Returns the number of variants that were compiled; 0 where nothing is ever compiled (on a CPU).
    """
    serving = contract("paged_attention", k_cache.device)
    options = {"sliding_window": sliding_window, "score_cap": score_cap, "has_sinks": has_sinks}
    return serving.warm_up_and_count(k_cache, num_heads, **options)
