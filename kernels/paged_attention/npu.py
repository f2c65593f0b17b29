"""Paged attention with torch_npu's fused attention: prefill, chunks and decode in one call. Not verified on an NPU.

The lengths go to the operator as host integers, so they come from the maps' host side: reading them back from the
device would stall every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch_npu

from kernels.contract import Contract
from kernels.paged_attention.maps import AttentionMaps
from kernels.probe.shapes import ProbeShapes

# What the operator takes in the layout TND with a paged cache. 256 is not documented, but used in production.
_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 192, 256)
_BLOCK_SIZES_TOKENS = (128, 256, 384, 512)
_MAX_SEQUENCES = 4096
_MAX_HEADS = 256
_MAX_GROUPS = 64
_MAX_TOKEN_ELEMENTS = 65_535
_MAX_CACHE_ELEMENTS = 2**31 - 1

_CAUSAL, _BAND = 3, 4
_MASK_SIZE = 2048
_ALL_TOKENS = 2**31 - 1


def refuses(shapes: ProbeShapes) -> str | None:
    """Why the operator cannot serve a model and its cache, as part of a sentence; None if it can."""
    num_heads, kv_heads, head_dim = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim
    num_blocks, block_size, max_sequences = shapes.num_blocks, shapes.block_size, shapes.max_sequences
    if shapes.score_cap is not None:
        return "it does not cap scores"
    if shapes.torch_dtype not in _DTYPES:
        return f"it computes in 16 bits, not in {shapes.dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"it takes heads of {', '.join(map(str, _HEAD_DIMS))} elements, not {head_dim}"
    if block_size not in _BLOCK_SIZES_TOKENS:
        return f"it takes blocks of {', '.join(map(str, _BLOCK_SIZES_TOKENS))} tokens, not {block_size}"
    if num_heads > _MAX_HEADS or num_heads // kv_heads > _MAX_GROUPS:
        return f"it takes at most {_MAX_HEADS} query heads and {_MAX_GROUPS} of them for each key head"
    if kv_heads * head_dim > _MAX_TOKEN_ELEMENTS or num_blocks * block_size * kv_heads * head_dim > _MAX_CACHE_ELEMENTS:
        return f"it takes caches of less than 2**31 elements, {_MAX_TOKEN_ELEMENTS} of them for each token"
    if max_sequences > _MAX_SEQUENCES:
        return f"it takes at most {_MAX_SEQUENCES} sequences in a step, not {max_sequences}"
    return None


def host_lengths(maps: AttentionMaps) -> Mapping[str, list[int]]:
    """What the operator is told of the sequences on the host: where the queries of each end, and its length.

    The last end must be the number of tokens, and no length 0. Padding, of which only decode steps have any, is
    therefore told as sequences of one token, whose block is the null block.
    """
    num_tokens, num_known = maps.slot_mapping.shape[0], maps.query_starts[-1]
    num_padding = num_tokens - num_known
    num = len(maps.kv_lens) - num_padding
    ends, lengths = [*maps.query_starts[1 : num + 1]], [*maps.kv_lens[:num]]
    assert not num_padding or ends[-1:] in ([], [num_known]), "padding lies behind the sequences"
    return {
        "actual_seq_lengths": ends + list(range(num_known + 1, num_tokens + 1)),
        "actual_seq_lengths_kv": lengths + [1] * num_padding,
    }


CONTRACT = Contract(refuses=refuses, updates=host_lengths)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    maps: AttentionMaps,
    *,
    scale: float,
    sliding_window: int | None,
    score_cap: float | None = None,
    out: torch.Tensor,
) -> None:
    """See `ops.paged_attention`; writes all of `out`. What `refuses` names must have been kept away."""
    assert score_cap is None, "scores are not capped"
    num_blocks, block_size, kv_heads, head_dim = k_cache.shape
    flat_shape = (num_blocks, block_size, kv_heads * head_dim)
    # A band reaches `pre_tokens` back from the query's own token, which the window counts too.
    lengths = host_lengths(maps)
    pre_tokens = _ALL_TOKENS if sliding_window is None else sliding_window - 1
    mixed, _ = torch_npu.npu_fused_infer_attention_score(
        query=q.contiguous(),
        key=k_cache.view(flat_shape),
        value=v_cache.view(flat_shape),
        atten_mask=_mask(q.device),
        actual_seq_lengths=lengths["actual_seq_lengths"],
        actual_seq_lengths_kv=lengths["actual_seq_lengths_kv"],
        block_table=maps.block_table,
        num_heads=q.shape[1],
        scale=scale,
        pre_tokens=pre_tokens,
        next_tokens=0,
        input_layout="TND",
        num_key_value_heads=kv_heads,
        sparse_mode=_CAUSAL if sliding_window is None else _BAND,
        block_size=block_size,
    )
    out.copy_(mixed)


@cache
def _mask(device: torch.device) -> torch.Tensor:
    """The compressed mask of the causal modes: one size for all lengths, 1 = hidden."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.int8).triu_(1).to(device)
