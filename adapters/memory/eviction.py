"""The eviction rule of a cache of adapters: least frequently used, with uses that decay, per cost of loading again.

    worth = uses * cost / size

A use counts half once there have been `HALF_LIFE` other uses per kept adapter. Uses of evicted adapters are remembered,
so an adapter that is often asked for is known when it returns. `cost` is the cost of loading it again, `size` the
memory that it occupies. Among equal worths the least recently used is evicted.

All uses decay at one rate, so the order of two adapters stays the same until one of them is used again: log2(uses) at
a use, plus the half-lives that had passed then, is a constant key, and a heap finds the smallest.

The decaying frequency is LRFU's (Lee et al. 2001), the rest GreedyDual-Size-Frequency's (Cherkasova 1998), which
forgets
the uses of evicted entries and ages the others by evictions alone: while demand moves on, it hits less often than LRU
does (`python -m bench.scale.cluster_bounds --moves 2000`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

# Compared as a tuple: worth, then the ordinal of the last use.
Worth = tuple[float, int]
# In uses per kept adapter. Among 2 to 32, this hits more often than both rules above on every stream tried.
HALF_LIFE = 16.0
# Evicted adapters whose uses are remembered: the last ones.
MOST_REMEMBERED = 8192


@dataclass(slots=True)
class _Used:
    """Decayed uses of one adapter.

    uses    the count when `at` half-lives had passed
    is_new  it was loaded for a use that has not begun
    """

    uses: float
    at: float
    last_use: int = 0
    is_new: bool = False


class DecayingLfu:
    """Worths of the adapters in one cache, by digest.

    cost_per_size  cost of loading an adapter again, per unit of its size; read when worths are compared
    """

    def __init__(self, cost_per_size: Callable[[str], float]) -> None:
        self._cost_per_size = cost_per_size
        self._kept: dict[str, _Used] = {}
        self._gone: dict[str, _Used] = {}  # in the order of their evictions
        self._half_lives = 0.0  # passed so far
        self._num_uses = 0

    def add(self, digest: str) -> None:
        """Add an adapter that is loaded for a use. The use counts now, and not again when it begins."""
        self._kept[digest] = self._gone.pop(digest, _Used(0.0, self._half_lives))
        self.use(digest)
        self._kept[digest].is_new = True

    def use(self, digest: str) -> None:
        """Count a use of an adapter in the cache."""
        used = self._kept[digest]
        if not used.is_new:
            self._half_lives += 1.0 / (HALF_LIFE * len(self._kept))
            used.uses = self._uses_now(used) + 1.0
        used.at, used.is_new = self._half_lives, False
        self.touch(digest)

    def touch(self, digest: str) -> None:
        """Note the end of a use, which counts as no further use."""
        self._num_uses += 1
        self._kept[digest].last_use = self._num_uses

    def of(self, digest: str) -> Worth:
        """The worth of an adapter in the cache."""
        used = self._kept[digest]
        return self._uses_now(used) * self._cost_per_size(digest), used.last_use

    def evict(self, digest: str) -> None:
        """Remove an adapter to make room, and remember its uses."""
        self._gone[digest] = self._kept.pop(digest)
        self._gone[digest].is_new = False
        if len(self._gone) > MOST_REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def forget(self, digest: str) -> None:
        """Remove an adapter for another reason, with its uses."""
        del self._kept[digest]

    def last_use(self, digest: str) -> int:
        """The ordinal of its last use: larger is later."""
        return self._kept[digest].last_use

    def _uses_now(self, used: _Used) -> float:
        return float(used.uses * 0.5 ** (self._half_lives - used.at))


class HeapDecayingLfu(DecayingLfu):
    """Finds the adapter of least worth without a scan, as long as the cost of loading an adapter again stays the same
    from its first use on."""

    def __init__(self, cost_per_size: Callable[[str], float]) -> None:
        super().__init__(cost_per_size)
        # (key, ordinal, digest) of a use; entries whose ordinal is not the digest's last one are stale.
        self._heap: list[tuple[float, int, str]] = []

    def touch(self, digest: str) -> None:
        super().touch(digest)
        heapq.heappush(self._heap, self._entry(digest))
        if len(self._heap) > 2 * len(self._kept) + 64:  # mostly old ones
            self._heap = [self._entry(one) for one in self._kept]
            heapq.heapify(self._heap)

    def least(self) -> str:
        """The adapter of least `of`. The cache must not be empty."""
        while not self._is_current(*self._heap[0][1:]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def _entry(self, digest: str) -> tuple[float, int, str]:
        used = self._kept[digest]
        return used.at + math.log2(used.uses * self._cost_per_size(digest)), used.last_use, digest

    def _is_current(self, last_use: int, digest: str) -> bool:
        used = self._kept.get(digest)
        return used is not None and used.last_use == last_use
