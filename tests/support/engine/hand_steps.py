"""Runs a model step by step with maps built by hand, without the engine: what the model's own tests drive it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels.attention_maps import AttentionMaps, QueryStarts
from kernels.lora.maps import LoraMaps
from service.models.layers.caches import allocate_caches
from service.models.loader import LoadedModel
from service.models.step_batch import ConvMaps, StepBatch


@dataclass
class HandSequence:
    """A sequence between steps: its blocks and line, its length so far, and its limit for dynamic rope scaling."""

    blocks: list[int]
    line: int
    limit: int
    length: int = 0


@dataclass
class HandDriver:
    """Owns caches and hands out blocks; `scatter` gives neighbouring blocks to different sequences."""

    loaded: LoadedModel
    block_size: int = 4
    num_blocks: int = 200
    num_lines: int = 20
    scatter: bool = False
    _next_line: int = 1
    _free_blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        loaded = self.loaded
        self.caches = allocate_caches(
            loaded.spec, self.num_blocks, self.block_size, self.num_lines, loaded.dtype, loaded.device
        )
        self._free_blocks = list(range(1, self.num_blocks))
        if self.scatter:
            order = torch.randperm(len(self._free_blocks), generator=torch.Generator().manual_seed(0))
            self._free_blocks = [self._free_blocks[index] for index in order.tolist()]

    def sequence(self, limit: int = 64) -> HandSequence:
        """A new sequence with room for `limit` tokens."""
        num_blocks = -(-limit // self.block_size)
        blocks = [self._free_blocks.pop(0) for _ in range(num_blocks)]
        self._next_line += 1
        return HandSequence(blocks, self._next_line - 1, limit)

    def step(
        self,
        chunks: Sequence[tuple[HandSequence, Sequence[int]]],
        *,
        all_logits: bool = False,
        lora: LoraMaps | None = None,
        logits_lora: LoraMaps | None = None,
    ) -> torch.Tensor:
        """One forward over (sequence, its next tokens); logits on the CPU, of each last token or of all tokens."""
        device = self.loaded.device
        starts, positions, slots, limits, kv_lens, known = [0], [], [], [], [], []
        for sequence, tokens in chunks:
            known.append(sequence.length > 0)
            for position in range(sequence.length, sequence.length + len(tokens)):
                positions.append(position)
                limits.append(float(sequence.limit))
                block = sequence.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            sequence.length += len(tokens)
            starts.append(starts[-1] + len(tokens))
            kv_lens.append(sequence.length)
        tables = tuple(tuple(sequence.blocks[: -(-sequence.length // self.block_size)]) for sequence, _ in chunks)
        attention = _attention_maps(starts, kv_lens, tables, slots, device)
        rows = list(range(starts[-1])) if all_logits else [end - 1 for end in starts[1:]]
        spec = self.loaded.spec
        conv = None
        if spec.has_states:
            lines = torch.tensor([sequence.line for sequence, _ in chunks], dtype=torch.int32, device=device)
            conv = ConvMaps(
                query_starts=QueryStarts(starts),
                query_start_loc=attention.query_start_loc,
                state_indices=lines,
                source_state_indices=lines,
                has_initial_state=torch.tensor(known, device=device),
                all_decode=all(known) and all(len(tokens) == 1 for _, tokens in chunks),
            )
        batch = StepBatch(
            token_ids=torch.tensor([token for _, tokens in chunks for token in tokens], device=device),
            positions=torch.tensor(positions, device=device),
            rope_limits=torch.tensor(limits, device=device) if spec.needs_rope_limits else None,
            lora=lora,
            attention=attention,
            conv=conv,
            logits_rows=torch.tensor(rows, device=device),
            logits_lora=logits_lora,
        )
        return self.loaded.model.forward(batch, self.caches).float().cpu()


def _attention_maps(
    starts: list[int],
    kv_lens: list[int],
    tables: tuple[tuple[int, ...], ...],
    slots: list[int],
    device: torch.device,
) -> AttentionMaps:
    table = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return AttentionMaps(
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        block_tables=tables,
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.tensor(slots, device=device),
    )
