"""Adapters that are made up where they are used: a host tier for measurements, which needs no store and no disk."""

from __future__ import annotations

from pathlib import Path

import torch

from adapters.layout import BaseLayout
from adapters.memory.host_tier import HostTier
from adapters.memory.slab import HostAdapter, ModuleShape, make_adapter, slab_bytes

_SEED = 20_26
_STANDARD_DEVIATION = 0.02
_POOL_NUMBERS = 1 << 26


class FakeAdapters(HostTier):
    """A host tier that makes its adapters up: rank `rank` on every projection of every layer, another one by digest.

    All are cut out of one pool of random numbers at places that follow from the digest: the loader copies them into a
    slab when they are asked for, as it would from a file in the page cache.
    """

    def __init__(
        self, layout: BaseLayout, rank: int, dtype: torch.dtype, *, budget_bytes: int = 1 << 30, is_pinned: bool = False
    ) -> None:
        super().__init__(Path(), layout, budget_bytes, dtype=dtype, is_pinned=is_pinned)
        self._of_layout, self._of_dtype = layout, dtype
        projections = [projection for projection in layout.projections if projection.group != "embeddings"]
        self._shapes = [
            ModuleShape(piece.module, rank, projection.in_features, piece.out_features, 1.0)
            for projection in projections
            for piece in projection.slices
        ]
        self.rows: dict[str, int] = {projection.group: rank for projection in projections}
        widest = max(max(one.in_features, one.out_features) for one in self._shapes)
        size = max(min(_POOL_NUMBERS, 64 * rank * widest), rank * widest)
        generator = torch.Generator().manual_seed(_SEED + 1)
        self._pool = torch.empty(size, dtype=dtype).normal_(std=_STANDARD_DEVIATION, generator=generator)

    def read(self, digest: str) -> HostAdapter:
        """An adapter made from a name that ends in a number, which is the seed."""
        places = torch.Generator().manual_seed(int(digest.rpartition("-")[2]))
        slab, memory = self.take(slab_bytes(self._of_layout, self._shapes, self._of_dtype))
        adapter = make_adapter(self._of_layout, digest, self._shapes, self._of_dtype, slab, memory)
        for held in adapter.slices.values():
            for side in (held.a, held.b):
                start = int(torch.randint(self._pool.numel() - side.numel() + 1, (), generator=places))
                side.copy_(self._pool[start : start + side.numel()].view_as(side))
        return adapter
