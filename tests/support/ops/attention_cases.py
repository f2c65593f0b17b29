"""Random steps of paged attention, and what float64 says to them; for the tests of every implementation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.attention_maps import AttentionMaps
from kernels.paged_attention import reference
from tests.tolerances import OP

SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """One step.

    sequences          (tokens in this step, tokens in the cache after it) of each
    scatter            blocks drawn at random; else in order, with a hole between sequences
    num_spare_columns  of the block table, as in a captured step
    num_spare_tokens   behind the last sequence, as in a captured step
    """

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    score_cap: float | None = None
    has_sinks: bool = False
    scatter: bool = True
    num_spare_columns: int = 0
    num_spare_tokens: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """Arguments of a call. Slots that no query may see hold NaN, the null block's included."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    maps: AttentionMaps
    sliding_window: int | None
    score_cap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window, "score_cap": self.score_cap, "sinks": self.sinks}

    def to(self, device: str) -> Step:
        """This step's tensors there. Queries stay a slice of a packed product."""
        maps = replace(
            self.maps,
            query_start_loc=self.maps.query_start_loc.to(device),
            kv_lens_device=self.maps.kv_lens_device.to(device),
            block_table=self.maps.block_table.to(device),
            slot_mapping=self.maps.slot_mapping.to(device),
        )
        num_heads = self.q.shape[1]
        packed = torch.cat((self.q, self.k_cache.new_zeros(len(self.q), *self.k_cache.shape[2:])), 1).to(device)
        caches = self.k_cache.to(device), self.v_cache.to(device)
        sinks = None if self.sinks is None else self.sinks.to(device)
        return Step(packed[:, :num_heads], *caches, maps, self.sliding_window, self.score_cap, sinks)


def make_step(case: Case) -> Step:
    """On the CPU."""
    generator = torch.Generator().manual_seed(case.seed)
    maps, num_blocks = make_maps(case)
    shape = (num_blocks, case.block_size, case.kv_heads, case.head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=case.dtype) for _ in range(2))
    for (num_new, kv_len), blocks in zip(case.sequences, maps.block_tables, strict=True):
        first = 0 if case.sliding_window is None else max(0, kv_len - num_new + 1 - case.sliding_window)
        slots = [blocks[p // case.block_size] * case.block_size + p % case.block_size for p in range(first, kv_len)]
        if num_new:
            new = torch.randn(2, len(slots), case.kv_heads, case.head_dim, generator=generator).to(case.dtype)
            for cache, written in zip((k_cache, v_cache), new, strict=True):
                cache.view(-1, *written.shape[1:])[slots] = written
    num_tokens = maps.query_starts[-1] + case.num_spare_tokens
    # Queries come as a slice of a packed product, so the rows are wider than the heads.
    packed = torch.randn(num_tokens, case.num_heads + case.kv_heads, case.head_dim, generator=generator).to(case.dtype)
    sinks = torch.randn(case.num_heads, generator=generator) if case.has_sinks else None
    return Step(packed[:, : case.num_heads], k_cache, v_cache, maps, case.sliding_window, case.score_cap, sinks)


def make_maps(case: Case) -> tuple[AttentionMaps, int]:
    """The maps, and the number of blocks of the cache."""
    lengths = [-(-kv_len // case.block_size) for _, kv_len in case.sequences]
    num_blocks = 2 + sum(lengths) + len(lengths)
    free = list(range(1, num_blocks))
    if case.scatter:
        random.Random(case.seed).shuffle(free)
    starts, tables = [0], []
    for (num_new, _), num_used in zip(case.sequences, lengths, strict=True):
        starts.append(starts[-1] + num_new)
        tables.append(tuple(free.pop(0) for _ in range(num_used)))
        free.pop(0)
    table = torch.zeros(len(tables), max(lengths, default=0) + case.num_spare_columns, dtype=torch.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    kv_lens = [kv_len for _, kv_len in case.sequences]
    maps = AttentionMaps(
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        block_tables=tuple(tables),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=table,
        # Nothing is written here, but there is a slot for each token.
        slot_mapping=torch.full((starts[-1] + case.num_spare_tokens,), -1),
    )
    return maps, num_blocks


def float64_truth(step: Step) -> torch.Tensor:
    """[tokens, num_heads, head_dim] in the step's dtype; zero behind the last sequence. `step` is on the CPU."""
    out = torch.zeros(step.q.shape, dtype=step.q.dtype)
    reference.paged_attention(step.q, step.k_cache, step.v_cache, step.maps, scale=SCALE, **step.options, out=out)
    return out


def check(case: Case, device: str, attend: Callable[[Step, torch.Tensor], None]) -> None:
    """`attend` fills `out` of the case's step on `device` with what float64 says."""
    check_step(make_step(case), device, attend)


def check_step(step: Step, device: str, attend: Callable[[Step, torch.Tensor], None]) -> None:
    """See `check`; `step` is on the CPU."""
    out = torch.full(step.q.shape, torch.nan, dtype=step.q.dtype, device=device)
    attend(step.to(device), out)
    atol, rtol = OP[step.q.dtype]
    torch.testing.assert_close(out.cpu(), float64_truth(step), atol=atol, rtol=rtol)
