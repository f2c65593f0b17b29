"""Paged attention on a CPU by products of one shape: tiles of as many queries, blocks of as many keys.

Blocks of keys begin at multiples of their size in the sequence, and their results are added in that order; keys that a
query does not see weigh exactly 0. So a query's result depends neither on the other queries of its tile nor on how its
sequence was cut into chunks. Computed in float32.
"""

from __future__ import annotations

import torch

from kernels.attention_maps import AttentionMaps
from kernels.contract import Contract
from kernels.paged_attention.sdpa import positions_of

CONTRACT = Contract()

_TILE_QUERIES, _BLOCK_KEYS = 8, 256
# Columns of scores in front of the keys, of which the first is a head's sink: torch sums rows in vectors, and keys keep
# their places in these.
_SINK_COLUMNS = 64


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
    grouped = (num_tokens, k_cache.shape[2], num_heads // k_cache.shape[2], head_dim)
    grouped_q, grouped_out = q.view(grouped), out.view(grouped)
    for sequence, kv_len in enumerate(maps.kv_lens):
        start, end = maps.query_starts[sequence], maps.query_starts[sequence + 1]
        if start == end:
            continue
        before = kv_len - end  # position of a token is its number and this
        first = 0 if sliding_window is None else max(0, before + start + 1 - sliding_window) // _BLOCK_KEYS
        keys, values = (_blocks_of(cache, maps.block_tables[sequence], first, kv_len) for cache in (k_cache, v_cache))
        for tile in range(start, end, _TILE_QUERIES):
            last = min(tile + _TILE_QUERIES, end)
            num_blocks = (before + last - 1) // _BLOCK_KEYS + 1 - first
            hidden = _hidden(before + tile, first, num_blocks, sliding_window)
            scores = _scores(grouped_q[tile:last], keys[:num_blocks], hidden, scale, score_cap)
            grouped_out[tile:last] = _mixed(scores, values, sinks, grouped[1:3])[: last - tile]


def _blocks_of(cache: torch.Tensor, blocks: tuple[int, ...], first: int, kv_len: int) -> torch.Tensor:
    """float32 [blocks of keys, kv_heads, _BLOCK_KEYS, head_dim] from block `first` on, with zeros behind the last."""
    found = positions_of(cache, blocks, first * _BLOCK_KEYS, kv_len)[0]
    kv_heads, num_keys, head_dim = found.shape
    padded = torch.zeros(kv_heads, num_keys + -num_keys % _BLOCK_KEYS, head_dim)
    padded[:, :num_keys] = found
    return padded.unflatten(1, (-1, _BLOCK_KEYS)).transpose(0, 1).contiguous()


def _hidden(position: int, first: int, num_blocks: int, sliding_window: int | None) -> torch.Tensor:
    """bool [_TILE_QUERIES, keys]: what the queries from this position on do not see."""
    positions = torch.arange(position, position + _TILE_QUERIES).unsqueeze(1)
    keys = torch.arange(first * _BLOCK_KEYS, (first + num_blocks) * _BLOCK_KEYS)
    hidden = keys > positions
    return hidden if sliding_window is None else hidden | (keys <= positions - sliding_window)


def _scores(
    q: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, scale: float, score_cap: float | None
) -> torch.Tensor:
    """float32 [kv_heads, groups, _TILE_QUERIES, keys] of q [queries, kv_heads, groups, head_dim]."""
    queries, kv_heads, groups, head_dim = q.shape
    tile = torch.zeros(kv_heads, groups, _TILE_QUERIES, head_dim)
    tile[:, :, :queries] = q.permute(1, 2, 0, 3)
    rows = tile.flatten(1, 2)
    scores = torch.cat([torch.bmm(rows, block.transpose(1, 2)) for block in keys], dim=2).mul_(scale)
    if score_cap is not None:
        scores = torch.tanh(scores.div_(score_cap)).mul_(score_cap)
    return scores.unflatten(1, (groups, _TILE_QUERIES)).masked_fill_(hidden, -torch.inf)


def _mixed(
    scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, heads: tuple[int, int]
) -> torch.Tensor:
    """float32 [_TILE_QUERIES, kv_heads, groups, head_dim]: the values by their weights."""
    if sinks is not None:
        front = torch.full((*scores.shape[:3], _SINK_COLUMNS), -torch.inf)
        front[..., 0] = sinks.view(*heads, 1)
        scores = torch.cat((front, scores), dim=3)
    weights = scores.softmax(-1)[..., 0 if sinks is None else _SINK_COLUMNS :]
    # [blocks, kv_heads, rows, _BLOCK_KEYS]
    weights = weights.unflatten(3, (-1, _BLOCK_KEYS)).flatten(1, 2).movedim(2, 0).contiguous()
    mixed = torch.bmm(weights[0], values[0])
    for weight, value in zip(weights[1:], values[1:], strict=False):
        mixed += torch.bmm(weight, value)
    return mixed.unflatten(1, (heads[1], _TILE_QUERIES)).permute(2, 0, 1, 3)
