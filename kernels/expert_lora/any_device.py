"""`kernels.expert_lora.ops` on any device: two products for each expert and adapter that meet. Waits for the device to
learn which do."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import torch

from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.lora.maps import LoraMaps, LoraStack, Segment

CONTRACT = Contract()


def expert_lora(x: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, pairs: Pairs) -> None:
    """See `ops.expert_lora`."""
    x = x.to(stack.a[0].dtype)
    for start, end, expert, segment in _meetings(maps, pairs):
        first = segment.first_rows[stack.group]
        for s, (a, b, column) in enumerate(zip(stack.a, stack.b, stack.slice_starts, strict=True)):
            rank = stack.host_ranks[s][segment.place] // pairs.num_experts if first >= 0 else 0
            if rank:
                rows = slice(first + expert * rank, first + (expert + 1) * rank)
                h = (x[start:end] @ a[rows].t()).float() * stack.host_scalings[s][segment.place]
                out[start:end, column : column + b.shape[1]] += h.to(b.dtype) @ b[rows]


def _meetings(maps: LoraMaps, pairs: Pairs) -> list[tuple[int, int, int, Segment]]:
    """(first pair, the one behind the last, expert, segment) of each expert with each segment that has pairs of it."""
    experts, tokens = torch.stack((pairs.experts, pairs.tokens)).tolist()
    borders = [0, *(i for i, (one, two) in enumerate(pairwise(experts), start=1) if one != two), len(experts)]
    found = []
    for low, high in pairwise(borders):
        for segment in maps.segments:
            start = bisect_left(tokens, segment.start, low, high)
            end = bisect_left(tokens, segment.end, start, high)
            if end > start:
                found.append((start, end, experts[low], segment))
    return found
