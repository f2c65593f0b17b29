"""Where each sequence of a step stands, in the step's tokens and in the paged cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic

import numpy as np
import torch

from kernels.arrays import LAST, Array, declared


@dataclass(frozen=True, slots=True)
class AttentionArrays(Generic[Array]):
    """By num_tokens, num_sequences and table_blocks, the width of the block table.

    query_start_loc  token at which each sequence begins, and where the last one ends
    kv_lens_device   length of each sequence in the cache after this step's tokens are written
    block_table      its KV blocks in order; behind them the null block, 0
    slot_mapping     of each token: block * block_size + offset; -1 for padding
    """

    query_start_loc: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.num_sequences + 1,), LAST))
    kv_lens_device: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.num_sequences,)))
    block_table: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.num_sequences, sizes.table_blocks)))
    slot_mapping: Array = field(metadata=declared(np.int64, lambda sizes: (sizes.num_tokens,), -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMaps(AttentionArrays[torch.Tensor]):
    """Paged attention over all sequences of the step; a decode token is a query of length 1.

    query_starts  host, [num_sequences + 1]: tokens [query_starts[i], query_starts[i + 1]) belong to sequence i
    kv_lens       host, [num_sequences]: as on the device
    block_tables  host, per sequence its KV blocks in order (block 0 is the null block and occurs in none of them)
    is_decode     host: every sequence has one token; False says nothing

    Tokens behind the last sequence pad a step: their slot is -1, and what attention gives for them harms no other. Ops
    for devices look at no values on the host, since nothing there runs when a captured step is replayed.
    """

    query_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    is_decode: bool = False

    def __post_init__(self) -> None:
        assert self.query_starts[-1] <= self.slot_mapping.shape[0], "a sequence ends behind the step's tokens"


class QueryStarts(tuple[int, ...]):
    """`query_start_loc` as host integers, [num_sequences + 1]: tokens [starts[i], starts[i + 1]) belong to sequence i.

    Ops look at the values of any other sequence at each call. ValueError where they do not begin at 0 or do not ascend.
    """

    __slots__ = ()

    def __new__(cls, starts: Iterable[int]) -> QueryStarts:
        made = super().__new__(cls, starts)
        if not made or made[0] != 0:
            raise ValueError(f"query_start_loc begins at {made[0] if made else 'nothing'}; it must start at 0")
        if any(start > end for start, end in pairwise(made)):
            raise ValueError("query_start_loc must ascend")
        return made

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self[-1]
