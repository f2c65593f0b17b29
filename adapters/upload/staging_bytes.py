"""How much all uploads together hold on the disk before they are adapters."""

from __future__ import annotations

import threading

from adapters.errors import StagingFull
from adapters.quota import ClientQuota


class StagingBytes:
    """Counts them; thread-safe. They are divided among owners as `ClientQuota` are.

    limit_bytes  of all uploads together, half of it of one owner; small ones get in beyond it, up to a quarter more
    """

    def __init__(self, limit_bytes: int) -> None:
        self._lock = threading.Lock()
        self._shares = ClientQuota(limit_bytes // 2, small=limit_bytes // 256)

    @property
    def num_bytes(self) -> int:
        """What is held now."""
        with self._lock:
            return self._shares.num_held

    def take(self, owner: str, num_bytes: int) -> None:
        """Before so many are written. StagingFull if the owner may not have so many more."""
        with self._lock:
            if not self._shares.take(owner, num_bytes):
                raise StagingFull(
                    f"The uploads that are not finished hold {self._shares.num_held} bytes, of which yours hold "
                    f"{self._shares.held_by(owner)}; a client gets as much as it leaves free for others, at most "
                    f"{self._shares.most_of_one}; upload again when they are done."
                )

    def give_back(self, owner: str, num_bytes: int) -> None:
        """They are removed, or an adapter's now."""
        with self._lock:
            self._shares.give_back(owner, num_bytes)
