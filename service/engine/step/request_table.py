"""Data of running sequences by slot: on the host their rows of the block table, on the device their latest token.

Row 0 is the null slot's: its blocks are the null block. A row is written when the sequence's blocks change, and is
whole whenever it is read. The latest tokens are written by the step that samples them and read by the next one, without
the host in between; whatever another sequence left there is never read, since a sequence's first steps bring their
tokens along.
"""

from __future__ import annotations

import numpy as np
import torch


class RequestTable:
    """Tables of `num_slots` slots, the null slot included, for sequences of up to max_blocks blocks.

    block_table   int32 [num_slots, max_blocks], on the host; 0 behind a sequence's last block
    last_tokens   int64 [num_slots], on the device
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.block_table = np.zeros((num_slots, max_blocks), np.int32)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._blocks: list[tuple[int, ...]] = [()] * num_slots

    def set_blocks(self, slot: int, blocks: tuple[int, ...]) -> None:
        """The blocks of the sequence that holds the slot, in its order. Costs nothing for the same tuple again."""
        before = self._blocks[slot]
        if blocks is before:
            return
        row = self.block_table[slot]
        row[: len(blocks)] = blocks
        row[len(blocks) : len(before)] = 0
        self._blocks[slot] = blocks

    def keep_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Remember what a step has sampled: token_ids int64 [n] of the slots int64 [n], none of them twice; -1, where
        there was nothing to choose from, is kept as token 0, since the step after may read it before the host knows."""
        self.last_tokens.index_copy_(0, slots, token_ids.clamp(min=0))

    def resolve_tokens(self, token_ids: torch.Tensor, token_slots: torch.Tensor) -> None:
        """token_ids[t] = latest token of token_slots[t] where token_ids[t] is -1, in place. Both int64 [tokens]."""
        latest = self.last_tokens.index_select(0, token_slots)
        torch.where(token_ids < 0, latest, token_ids, out=token_ids)
