"""The truth of `kernels.paged_attention.ops`: token by token, in float64."""

from __future__ import annotations

import torch

from kernels.attention_maps import AttentionMaps
from kernels.contract import Contract

CONTRACT = Contract()


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
    block_size, groups = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for sequence, kv_len in enumerate(maps.kv_lens):
        start, end = maps.query_starts[sequence : sequence + 2]
        blocks = list(maps.block_tables[sequence])
        for token in range(start, end):
            last = kv_len - end + token
            first = 0 if sliding_window is None else max(0, last + 1 - sliding_window)
            positions = range(first, last + 1)
            block_ids, offsets = [blocks[p // block_size] for p in positions], [p % block_size for p in positions]
            # [heads, positions, head_dim]
            k = k_cache[block_ids, offsets].double().repeat_interleave(groups, dim=1).transpose(0, 1)
            v = v_cache[block_ids, offsets].double().repeat_interleave(groups, dim=1).transpose(0, 1)
            scores = scale * k @ q[token].double().unsqueeze(-1)
            if score_cap is not None:
                scores = score_cap * torch.tanh(scores / score_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None]), dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(positions)]
            out[token] = (weights * v).sum(dim=1).to(out.dtype)
