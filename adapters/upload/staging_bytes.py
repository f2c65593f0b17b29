"""Bytes on the disk of all uploads that are not adapters yet."""

from __future__ import annotations

import threading

from adapters.errors import StagingFull
from adapters.quota import ClientQuota


class StagingBytes:
    """Counts the bytes by owner, as `ClientQuota` divides them; thread-safe.

    limit_bytes  of all uploads together, half of it for one owner; small uploads are admitted beyond it, up to a
                 quarter more
    """

    def __init__(self, limit_bytes: int) -> None:
        self._lock = threading.Lock()
        self._shares = ClientQuota(limit_bytes // 2, small=limit_bytes // 256)

    @property
    def num_bytes(self) -> int:
        """Bytes in use now."""
        with self._lock:
            return self._shares.num_held

    def take(self, owner: str, num_bytes: int) -> None:
        """Reserve bytes before they are written. Raises StagingFull if the owner may not have as many."""
        with self._lock:
            if not self._shares.acquire(owner, num_bytes):
                raise StagingFull(
                    f"The uploads that are not finished hold {self._shares.num_held} bytes, of which yours hold "
                    f"{self._shares.held_by(owner)}; a client gets as much as it leaves free for others, at most "
                    f"{self._shares.most_of_one}; upload again when they are done."
                )

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Release bytes that were removed, or became an adapter's."""
        with self._lock:
            self._shares.release(owner, num_bytes)
