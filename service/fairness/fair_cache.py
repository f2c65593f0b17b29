"""A cache that its owners share: whoever fills it drops what is its own."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Kept(NamedTuple, Generic[V]):
    """A cached value, its size, and a number that rises with each use of any."""

    value: V
    size: int
    used_at: int


class FairCache(Generic[K, V]):
    """Keeps up to `most` in all. One owner alone has all of it; beyond that goes what the owner with the most has not
    used for longest, so that what others use stays. What several put is whose who put it first. Any thread may call:
    it waits for no walk through what is kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._uses = itertools.count()
        self._owners: dict[K, str] = {}
        self._kept: dict[str, OrderedDict[K, _Kept[V]]] = {}  # of those who have something; what was used last is last
        self._sizes: Counter[str] = Counter()  # of the same

    def get(self, key: K) -> V | None:
        """The cached value, None if it is not cached."""
        with self._lock:
            owner = self._owners.get(key)
            if owner is None:
                return None
            of_owner = self._kept[owner]
            kept = of_owner[key] = of_owner[key]._replace(used_at=next(self._uses))
            of_owner.move_to_end(key)
            return kept.value

    def put(self, key: K, value: V, owner: str, size: int = 1) -> None:
        """Keep a value of an owner."""
        with self._lock:
            owner = self._remove(key) or owner
            self._owners[key] = owner
            self._kept.setdefault(owner, OrderedDict())[key] = _Kept(value, size, next(self._uses))
            self._sizes[owner] += size
            while self._sizes.total() > self._most:
                self._remove(self._next_to_go())

    def drop(self, key: K) -> None:
        """Keep it no more."""
        with self._lock:
            self._remove(key)

    def _next_to_go(self) -> K:
        largest = max(self._sizes.values())
        of_largest = [self._kept[owner] for owner, size in self._sizes.items() if size == largest]
        oldest = min(of_largest, key=lambda kept: next(iter(kept.values())).used_at)
        return next(iter(oldest))

    def _remove(self, key: K) -> str | None:
        """Remove an entry and return its client."""
        owner = self._owners.pop(key, None)
        if owner is not None:
            self._sizes[owner] -= self._kept[owner].pop(key).size
            if not self._kept[owner]:
                del self._kept[owner], self._sizes[owner]
        return owner
