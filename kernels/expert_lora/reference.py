"""`kernels.expert_lora.ops` pair by pair, in float64."""

from __future__ import annotations

import torch

from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.lora.maps import LoraMaps, LoraStack

CONTRACT = Contract()


def expert_lora(x: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, pairs: Pairs) -> None:
    """See `ops.expert_lora`."""
    segment_of = {token: segment for segment in maps.segments for token in range(segment.start, segment.end)}
    for pair, (expert, token) in enumerate(zip(pairs.experts.tolist(), pairs.tokens.tolist(), strict=True)):
        segment = segment_of.get(token)
        first = -1 if segment is None else segment.first_rows[stack.group]
        if segment is None or first < 0:
            continue
        for s, (a, b, column) in enumerate(zip(stack.a, stack.b, stack.slice_starts, strict=True)):
            rank = stack.host_ranks[s][segment.place] // pairs.num_experts
            rows = slice(first + expert * rank, first + (expert + 1) * rank)
            if rank:
                h = stack.host_scalings[s][segment.place] * (a[rows].double() @ x[pair].double())
                place = out[pair, column : column + b.shape[1]]
                place.copy_((place.double() + h @ b[rows].double()).to(out.dtype))
