"""Paged attention with torch's scaled_dot_product_attention, one call per sequence and tile of queries.

Where a sequence's blocks follow one another in the cache, keys and values are read through a view; elsewhere its blocks
are copied together first. The query heads that share a key/value head are folded into the query length: a decode token
is then `groups` queries over all of its keys, without a mask and without repeating keys.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.attention_maps import AttentionMaps
from kernels.contract import Contract

CONTRACT = Contract()

# Queries of a chunk are taken in tiles: a tile's mask stays small, and keys beyond its last position are not visited.
_TILE_TOKENS = 128


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    maps: AttentionMaps,
    *,
    scale: float,
    sliding_window: int | None,
    score_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """See `ops.paged_attention`; writes all of `out`."""
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    grouped_q = q.view(num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    grouped_out = out.view(grouped_q.shape)
    for sequence, kv_len in enumerate(maps.kv_lens):
        start, end = maps.query_starts[sequence], maps.query_starts[sequence + 1]
        blocks = maps.block_tables[sequence]
        for tile_start in range(start, end, _TILE_TOKENS):
            tile_end = min(tile_start + _TILE_TOKENS, end)
            last = kv_len - end + tile_end
            first = 0 if sliding_window is None else max(0, last - (tile_end - tile_start) + 1 - sliding_window)
            k = positions_of(k_cache, blocks, first, last)
            v = positions_of(v_cache, blocks, first, last)
            tile_q, tile_out = grouped_q[tile_start:tile_end], grouped_out[tile_start:tile_end]
            if score_cap is not None or sinks is not None:
                _attend_plainly(tile_q, k, v, tile_out, scale, sliding_window, score_cap, sinks)
            elif tile_end - tile_start == 1:
                tile_out.copy_(functional.scaled_dot_product_attention(tile_q, k, v, scale=scale))
            else:
                _attend_tile(tile_q, k, v, tile_out, scale, sliding_window)


def _attend_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float, sliding_window: int | None
) -> None:
    """Attention of consecutive queries, of which the last stands at the last key; writes `out`.

    q, out  [queries, kv_heads, groups, head_dim];  k, v  [1, kv_heads, keys, head_dim]
    """
    num_queries, kv_heads, groups, head_dim = q.shape
    hidden = _hidden(num_queries, k.shape[2], sliding_window, q.device)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    folded_q = q.permute(1, 2, 0, 3).reshape(1, kv_heads, groups * num_queries, head_dim)
    mixed = functional.scaled_dot_product_attention(folded_q, k, v, attn_mask=mask.repeat(groups, 1), scale=scale)
    out.copy_(mixed.view(kv_heads, groups, num_queries, head_dim).permute(2, 0, 1, 3))


def _attend_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    score_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """As `_attend_tile`, with caps and sinks, which torch's fused attention does not know: the products one by one, in
    float32.

    Half the keys of a chunk are multiplied for nothing, and its scores lie in memory, which a tile bounds.
    """
    num_queries, kv_heads, groups, head_dim = q.shape
    keys, values = k[0].float(), v[0].float()
    folded_q = q.permute(1, 2, 0, 3).reshape(kv_heads, groups * num_queries, head_dim).float()
    scores = torch.matmul(folded_q, keys.transpose(1, 2)).mul_(scale)
    if score_cap is not None:
        scores = scores.div_(score_cap).tanh_().mul_(score_cap)
    if num_queries > 1:
        hidden = _hidden(num_queries, keys.shape[1], sliding_window, q.device)
        scores.view(kv_heads, groups, num_queries, -1).masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(kv_heads, groups, 1).repeat_interleave(num_queries, 1)), dim=-1)
    mixed = torch.matmul(scores.softmax(-1)[..., : keys.shape[1]], values)
    out.copy_(mixed.view(kv_heads, groups, num_queries, head_dim).permute(2, 0, 1, 3))


def _hidden(num_queries: int, num_keys: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """bool [num_queries, num_keys]: what consecutive queries, of which the last stands at the last key, do not see."""
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril_(num_keys - num_queries)
    if sliding_window is not None:
        visible.triu_(num_keys - num_queries + 1 - sliding_window)
    return visible.logical_not_()


def positions_of(cache: torch.Tensor, blocks: tuple[int, ...], first: int, last: int) -> torch.Tensor:
    """Positions [first, last) of a sequence as [1, kv_heads, last - first, head_dim]; a view if its blocks adjoin."""
    _, block_size, kv_heads, head_dim = cache.shape
    first_block, num_blocks = first // block_size, -(-last // block_size) - first // block_size
    used = blocks[first_block : first_block + num_blocks]
    skipped = first - first_block * block_size
    if used != tuple(range(used[0], used[0] + num_blocks)):
        cache, used = cache[list(used)], (0,)
    slot_size = kv_heads * head_dim
    return cache.as_strided(
        (1, kv_heads, last - first, head_dim),
        (0, head_dim, slot_size, 1),
        cache.storage_offset() + (used[0] * block_size + skipped) * slot_size,
    )
