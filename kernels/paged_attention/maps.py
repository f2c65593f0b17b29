"""Where each sequence of a step stands, in the step's tokens and in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """Paged attention over all sequences of the step; a decode token is a query of length 1.

    query_starts  host, [num_sequences + 1]: tokens [query_starts[i], query_starts[i + 1]) belong to sequence i
    kv_lens       host, [num_sequences]: length of the sequence in the cache after this step's tokens are written
    block_tables  host, per sequence its KV blocks in order (block 0 is the null block and occurs in none of them)
    query_start_loc int32 [num_sequences + 1], kv_lens_device int32 [num_sequences],
    block_table   int32 [num_sequences, max_blocks] (padding 0)
    slot_mapping  int64 [num_tokens] = block * block_size + offset
    is_decode     host: every sequence has one token; False says nothing

    Tokens behind the last sequence pad a step: their slot is -1, and what attention gives for them harms no other. Ops
    for devices look at no values on the host, since nothing there runs when a captured step is replayed.
    """

    query_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    query_start_loc: torch.Tensor
    kv_lens_device: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    is_decode: bool = False

    def __post_init__(self) -> None:
        assert self.query_starts[-1] <= self.slot_mapping.shape[0], "a sequence ends behind the step's tokens"
