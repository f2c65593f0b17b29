"""Adapters that are made up where they are used: a host tier for measurements, which needs no store and no disk."""

from __future__ import annotations

import torch

from adapters.host_tier import HostAdapter, HostSlice
from adapters.layout import BaseLayout

_SEED = 20_26
_STANDARD_DEVIATION = 0.02
_POOL_NUMBERS = 1 << 26


class MadeUpAdapters:
    """A host tier that makes its adapters up: rank `rank` on every projection of every layer, another one by digest.

    All are cut out of one pool of random numbers at places that follow from the digest, so that handing one out costs
    no more than a look-up; its rows are copied to the device like those of any other.
    """

    def __init__(self, layout: BaseLayout, rank: int, dtype: torch.dtype) -> None:
        self._rank = rank
        self._projections = [projection for projection in layout.projections if projection.group != "embeddings"]
        self.rows: dict[str, int] = {projection.group: rank for projection in self._projections}
        widest = max(max(p.in_features, *(s.out_features for s in p.slices)) for p in self._projections)
        size = max(min(_POOL_NUMBERS, 64 * rank * widest), rank * widest)
        generator = torch.Generator().manual_seed(_SEED + 1)
        self._pool = torch.empty(size, dtype=dtype).normal_(std=_STANDARD_DEVIATION, generator=generator)

    def kept(self, _digest: str) -> None:
        """None is: each is made up by the loader, when it is asked for."""

    def get(self, digest: str) -> HostAdapter:
        """Of a name that ends in a number."""
        places = torch.Generator().manual_seed(int(digest.rpartition("-")[2]))
        slices: dict[str, HostSlice] = {}
        for projection in self._projections:
            for piece in projection.slices:
                a, b = (self._cut(width, places) for width in (projection.in_features, piece.out_features))
                slices[piece.module] = HostSlice(a, b, self._rank, 1.0)
        num_bytes = sum(one.a.nbytes + one.b.nbytes for one in slices.values())
        return HostAdapter(digest, slices, dict(self.rows), num_bytes)

    def drop(self, digest: str) -> None:
        """Nothing is kept."""

    def resident(self) -> tuple[str, ...]:
        return ()

    def _cut(self, width: int, places: torch.Generator) -> torch.Tensor:
        size = self._rank * width
        start = int(torch.randint(self._pool.numel() - size + 1, (), generator=places))
        return self._pool[start : start + size].view(self._rank, width)
