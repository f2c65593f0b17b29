"""How much all uploads together hold on the disk before they are adapters."""

from __future__ import annotations

import threading
from collections import Counter

from adapters.errors import StagingFull


class StagingBytes:
    """Counts them; thread-safe. No owner has more than half.

    limit_bytes  of all uploads together
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """What is held now."""
        with self._lock:
            return self._held.total()

    def take(self, owner: str, num_bytes: int) -> None:
        """Before so many are written. StagingFull if they do not fit beside what is there."""
        with self._lock:
            if self._held[owner] + num_bytes > self.limit_bytes // 2:
                raise StagingFull(
                    f"Your uploads that are not finished hold {self._held[owner]} of the {self.limit_bytes // 2} bytes "
                    "that they may; upload again when they are done."
                )
            if self._held.total() + num_bytes > self.limit_bytes:
                raise StagingFull(
                    f"The uploads that are not finished hold the {self.limit_bytes} bytes that this server has for "
                    "them; upload again later."
                )
            self._held[owner] += num_bytes

    def give_back(self, owner: str, num_bytes: int) -> None:
        """They are removed, or an adapter's now."""
        with self._lock:
            self._held[owner] -= num_bytes
            assert self._held[owner] >= 0, "more bytes were given back than taken"
            if not self._held[owner]:
                del self._held[owner]
