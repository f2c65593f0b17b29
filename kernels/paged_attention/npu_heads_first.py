"""`kernels.paged_attention.npu` over caches that lie head by head, which torch_npu's documentation calls the faster
layout: a head's keys of a block are one piece of memory. Not verified on an NPU.
"""

from __future__ import annotations

import torch

from kernels.attention_maps import AttentionMaps
from kernels.contract import Contract
from kernels.paged_attention import npu

CONTRACT = Contract(refuses=npu.refuses, updates=npu.host_lengths)


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
    """See `ops.paged_attention`; writes all of `out`. What `npu.refuses` names must have been kept away."""
    assert score_cap is None and sinks is None, "scores are not capped, and have no sinks"
    keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    assert keys.is_contiguous(), "the caches lie head by head"
    npu.attend(q, keys, values, k_cache.shape, maps, scale, sliding_window, out)
