"""Paged attention of plain torch operations on the device: what serves where no fused operator does.

Blocks are gathered by the block table as it lies on the device. An index that is a list, as in `sdpa.py`, would be a
copy from the host for each sequence and layer, which on an NPU waits for all that was asked of it before. All decode
tokens of a step are served at once, as far as `MAX_BYTES` goes; a chunk in tiles of queries. Scores, softmax and sums
are float32.
"""

from __future__ import annotations

import torch

from kernels.attention_maps import AttentionMaps
from kernels.contract import Contract
from kernels.paged_attention.cache_layout import is_heads_first

CONTRACT = Contract()

_TILE_TOKENS = 128
# Keys and values in float32 that are gathered at the same time.
MAX_BYTES = 256 << 20
_ELEMENT_BYTES = 4


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
    """See `ops.paged_attention`; writes the rows of all sequences' tokens."""
    _, block_size, kv_heads, head_dim = k_cache.shape
    num_tokens, num_heads, _ = q.shape
    grouped_q = q.view(num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    grouped_out = out.view(grouped_q.shape)
    row_bytes = 2 * kv_heads * head_dim * _ELEMENT_BYTES
    for first, last in runs_of(maps, block_size * row_bytes, block_size):
        start, end = maps.query_starts[first], maps.query_starts[last]
        num_blocks = -(-max(maps.kv_lens[first:last]) // block_size)
        blocks = maps.block_table[first:last, :num_blocks].reshape(-1)
        shape = (last - first, num_blocks * block_size, kv_heads, head_dim)
        keys, values = (_gathered(cache, blocks).reshape(shape).float() for cache in (k_cache, v_cache))
        lens = maps.kv_lens_device[first:last].long()
        num_queries = (end - start) // (last - first)
        for tile in range(0, num_queries, _TILE_TOKENS):
            size = min(_TILE_TOKENS, num_queries - tile)
            # A run of several sequences has one query of each.
            rows = slice(start + tile, start + tile + size) if last - first == 1 else slice(start, end)
            tile_q = grouped_q[rows].view(last - first, size, *grouped_q.shape[1:]).float()
            positions = (lens - num_queries + tile)[:, None] + torch.arange(size, device=q.device)
            mixed = _attend(tile_q, keys, values, positions, scale, sliding_window, score_cap, sinks)
            grouped_out[rows].copy_(mixed.reshape(grouped_out[rows].shape))


def _gathered(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, kv_heads, head_dim], copied out of memory as it lies: devices make a copy of all of what is
    not contiguous first."""
    if is_heads_first(cache):
        return cache.transpose(1, 2).index_select(0, blocks).transpose(1, 2)
    return cache.index_select(0, blocks)


def runs_of(maps: AttentionMaps, block_bytes: int, block_size: int) -> list[tuple[int, int]]:
    """Ranges of neighbouring sequences that are served at once: of one query each, or a single one with more."""
    runs: list[tuple[int, int]] = []
    most = 0  # blocks of the longest sequence of the last run, whose table is padded to it
    for sequence, kv_len in enumerate(maps.kv_lens):
        num_queries = maps.query_starts[sequence + 1] - maps.query_starts[sequence]
        if num_queries == 0:  # padding
            most = 0
            continue
        num_blocks = -(-kv_len // block_size)
        widest = max(most, num_blocks)
        fits = most and (sequence + 1 - runs[-1][0]) * widest * block_bytes <= MAX_BYTES
        if num_queries == 1 and fits:
            runs[-1], most = (runs[-1][0], sequence + 1), widest
        else:
            runs.append((sequence, sequence + 1))
            most = num_blocks if num_queries == 1 else 0
    return runs


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    score_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of float32 q [sequences, queries, kv_heads, groups, head_dim] at int64 positions [sequences, queries];
    returns a fresh tensor.

    keys, values  float32 [sequences, positions, kv_heads, head_dim]
    """
    places = torch.arange(keys.shape[1], device=q.device)
    visible = places <= positions[..., None]  # [sequences, queries, positions]
    seen = visible[:, -1]  # by any of the queries, which follow one another
    if sliding_window is not None:
        seen = seen & (places > positions[:, :1] - sliding_window)
        visible = visible & (places > positions[..., None] - sliding_window)
    # Memory that no query sees may hold NaN, which a weight of 0 would not hide.
    values = values.masked_fill(~seen[..., None, None], 0.0)
    scores = torch.einsum("sqkgd,slkd->sqkgl", q, keys).mul_(scale)
    if score_cap is not None:
        scores = scores.div_(score_cap).tanh_().mul_(score_cap)
    scores.masked_fill_(~visible[:, :, None, None], -torch.inf)
    if sinks is not None:
        sinks = sinks.view(*scores.shape[2:4], 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.einsum("sqkgl,slkd->sqkgd", weights, values)
