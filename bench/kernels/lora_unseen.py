"""Rows of LoRA that no launch table was tuned on, drawn from a seed, and what cuBLAS takes for them."""

from __future__ import annotations

import random

import torch

from bench.kernels.lora import Row
from kernels.lora.maps import LoraMaps, LoraStack

NUM_UNSEEN = 20
_IN_FEATURES = (2048, 3072, 4096, 5120, 8192, 14336)
_WIDTHS = ((1024,), (4096,), (4096, 1024, 1024), (5120,), (11008, 11008), (14336, 14336))
_RANKS = (8, 16, 32, 64, 128)
_DECODE_TOKENS, _PREFILL_TOKENS = (1, 4, 16, 64, 128, 256), (512, 1024, 2048, 4096, 8192)
_ADAPTERS = (1, 2, 4, 8, 32, 64)
# Beside those that are drawn, in each run: prompts of one adapter, where two plain products are at their best, high
# ranks and wide outputs, and decode rows of long inputs, the first of which stood closest to the best peer.
HARD_ROWS = (
    *(Row(f"o.r{rank}.M8192.n1.pf", 4096, (4096,), rank, 8192, 1) for rank in (32, 64, 128)),
    *(Row(f"o.r128.M{num_tokens}.n1.pf", 4096, (4096,), 128, num_tokens, 1) for num_tokens in (512, 1024, 2048)),
    Row("o.r16.M512.n1.pf", 4096, (4096,), 16, 512, 1),
    Row("o.r256.M4096.n1.pf", 4096, (4096,), 256, 4096, 1),
    Row("qkv.r128.M1024.n8.pf", 4096, (4096, 1024, 1024), 128, 1024, 8),
    Row("gu.r128.M2048.n1.pf", 4096, (14336, 14336), 128, 2048, 1),
    Row("gu.r16.M2048.n4.pf", 4096, (14336, 14336), 16, 2048, 4),
    Row("down.r16.M64.n8", 14336, (4096,), 16, 64, 8),
    Row("down.r16.M64.n64", 14336, (4096,), 16, 64, 64),
)


def unseen_rows(seed: int, num_rows: int = NUM_UNSEEN) -> list[Row]:
    """Decode and prefill rows in turn; the same for a seed everywhere."""
    rng, rows = random.Random(seed), []
    for index in range(num_rows):
        is_prefill = bool(index % 2)
        num_tokens = rng.choice(_PREFILL_TOKENS if is_prefill else _DECODE_TOKENS)
        num_adapters = rng.choice([num for num in _ADAPTERS if num <= num_tokens])
        in_features, widths, rank = rng.choice(_IN_FEATURES), rng.choice(_WIDTHS), rng.choice(_RANKS)
        name = f"u{index}.{in_features}.r{rank}.M{num_tokens}.n{num_adapters}{'.pf' if is_prefill else ''}"
        rows.append(Row(name, in_features, widths, rank, num_tokens, num_adapters))
    return rows


def grouped_by_adapter(x: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> None:
    """As `kernels.lora.ops.lora_linear`, by two products for each adapter and slice: on a GPU they are cuBLAS's."""
    assert stack.host_ranks is not None and stack.host_scalings is not None
    for segment in maps.segments:
        first = segment.first_rows[stack.group]
        tokens = slice(segment.start, segment.end)
        for index, start in enumerate(stack.slice_starts):
            rank = stack.host_ranks[index][segment.place]
            a, b = stack.a[index][first : first + rank], stack.b[index][first : first + rank]
            columns = out[tokens, start : start + b.shape[1]]
            torch.addmm(columns, x[tokens] @ a.T, b, alpha=stack.host_scalings[index][segment.place], out=columns)
