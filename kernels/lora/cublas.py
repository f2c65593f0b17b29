"""`lora_linear` of long prompts by products of the GPU's library, two for each adapter and slice.

Which products these are follows from the step's segments on the host, so a captured step cannot consist of them.
"""

from __future__ import annotations

import torch

from kernels.lora.cuda.configs import LoraConfig
from kernels.lora.maps import LoraMaps, LoraStack


def serves(config: LoraConfig, x: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> bool:
    """Whether they are faster for this step than the two kernels; see `LoraConfig.is_plain`."""
    if not maps.runs_once or config.min_plain_tokens is None or x.dtype != stack.a[0].dtype:
        return False
    segments = [segment for segment in maps.segments if segment.first_rows[stack.group] >= 0]
    rank = max((ranks[segment.place] for segment in segments for ranks in stack.host_ranks), default=0)
    widths = [b.shape[1] for b in stack.b]
    return config.is_plain([segment.end - segment.start for segment in segments], rank, x.shape[1], widths)


def lora_linear(x: torch.Tensor, out: torch.Tensor, h: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> None:
    """See `ops.lora_linear`, which adds to `out`; h [slices, tokens, at least the largest rank], dtype of x, is written
    to."""
    for segment in maps.segments:
        first, tokens = segment.first_rows[stack.group], slice(segment.start, segment.end)
        for index, (a, b, start) in enumerate(zip(stack.a, stack.b, stack.slice_starts, strict=True)):
            rank = stack.host_ranks[index][segment.place]
            if first < 0 or not rank:
                continue
            shrunk, columns = h[index, tokens, :rank], out[tokens, start : start + b.shape[1]]
            torch.mm(x[tokens], a[first : first + rank].T, out=shrunk)
            scaling = stack.host_scalings[index][segment.place]
            torch.addmm(columns, shrunk, b[first : first + rank], alpha=scaling, out=columns)
