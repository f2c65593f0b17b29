"""A cache that its owners share: whoever fills it drops what is its own."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Kept(NamedTuple, Generic[V]):
    """What is kept, whose it is and how large."""

    value: V
    owner: str
    size: int


class FairCache(Generic[K, V]):
    """Keeps up to `most` in all. One owner alone has all of it; beyond that goes what the owner with the most has not
    used for longest, so that what others use stays. What several put is whose who put it first. Any thread may call."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, _Kept[V]] = OrderedDict()  # what was used last is last
        self._sizes: Counter[str] = Counter()  # of those who have something

    def get(self, key: K) -> V | None:
        """What was put there, if it is kept."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
            return kept.value

    def put(self, key: K, value: V, owner: str, size: int = 1) -> None:
        """Keep a value of an owner."""
        with self._lock:
            before = self._remove(key)
            owner = owner if before is None else before.owner
            self._kept[key] = _Kept(value, owner, size)
            self._sizes[owner] += size
            while self._sizes.total() > self._most:
                largest = max(self._sizes.values())
                self._remove(next(key for key, kept in self._kept.items() if self._sizes[kept.owner] == largest))

    def drop(self, key: K) -> None:
        """Keep it no more."""
        with self._lock:
            self._remove(key)

    def _remove(self, key: K) -> _Kept[V] | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._sizes[kept.owner] -= kept.size
            if not self._sizes[kept.owner]:
                del self._sizes[kept.owner]
        return kept
