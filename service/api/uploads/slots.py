"""Slots of uploads: divided among clients, and revoked from who sends too slowly while others want them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from adapters.quota import ClientQuota
from service.api.errors import QueueFull
from service.fairness.client_identity import CLIENT

# Least speed of an upload while others want its slot; one alone may be as slow as `http_rules` lets it.
CONTENDED_BYTES_PER_SECOND = 1 << 16
# Over so long a wait for its client; the time in which the server writes or checks what came does not count.
WINDOW_SECONDS = 30.0


class UploadSlot:
    """One upload: how fast its client sends, and whether it may go on."""

    def __init__(self, client: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self._clock = clock
        self._waited_seconds, self._num_bytes = 0.0, 0  # of this window
        self._since: float | None = None  # waits for the client
        self._was_slow = self._is_revoked = False
        self._timeout: asyncio.Timeout | None = None

    @contextmanager
    def waiting(self, timeout: asyncio.Timeout | None = None) -> Iterator[None]:
        """Inside the client is waited for; the timeout ends at once when the slot is revoked."""
        self._since, self._timeout = self._clock(), timeout
        try:
            yield
        finally:
            self._waited_seconds += self._clock() - self._since
            self._since = self._timeout = None

    def came(self, num_bytes: int) -> None:
        """So much has come."""
        self._num_bytes += num_bytes
        if self._waited_seconds >= WINDOW_SECONDS:
            self._was_slow = self._num_bytes < CONTENDED_BYTES_PER_SECOND * self._waited_seconds
            self._waited_seconds, self._num_bytes = 0.0, 0

    def is_slow(self) -> bool:
        """Whether it waits for its client, and too little came in the last window."""
        if self._since is None or self._is_revoked:
            return False
        waited = self._waited_seconds + self._clock() - self._since
        return self._was_slow or (waited >= WINDOW_SECONDS and self._num_bytes < CONTENDED_BYTES_PER_SECOND * waited)

    def revoke(self) -> None:
        """It may not go on."""
        self._is_revoked = True
        self.wake()

    def wake(self) -> None:
        """If its client is waited for, end the timeout of that at once."""
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def check(self) -> None:
        """QueueFull if it may not go on."""
        if self._is_revoked:
            raise QueueFull(
                f"Others wait to upload, and less than {CONTENDED_BYTES_PER_SECOND} bytes a second of this upload have "
                f"come for {WINDOW_SECONDS:g} seconds; upload again over a faster connection, or fewer at a time.",
                headers={"Retry-After": "5"},
            )


class UploadSlots:
    """All of them.

    most  twice what one client alone may have
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._shares = ClientQuota(max(1, most // 2), small=1)
        self._clock = clock
        self._open: list[UploadSlot] = []  # the oldest first
        self._one_ended = asyncio.Event()  # another one for each upload

    @property
    def num_open(self) -> int:
        """Uploads that are on their way."""
        return self._shares.num_held

    @contextmanager
    def holding(self) -> Iterator[UploadSlot]:
        """Held inside by who pays for the request. QueueFull if it may have no more now; a slow upload of who has the
        most then ends, so that it may have one soon."""
        client = CLIENT.get()
        if not self._shares.acquire(client, 1):
            self._revoke_one(client)
            raise QueueFull(
                f"{self.num_open} uploads are on their way, {self._shares.refusal(client)}; upload again when they are "
                "done.",
                headers={"Retry-After": "5"},
            )
        slot = UploadSlot(client, self._clock)
        self._open.append(slot)
        try:
            yield slot
        finally:
            self._open.remove(slot)
            self._shares.release(client, 1)
            self._one_ended.set()
            self._one_ended = asyncio.Event()

    async def next_end(self) -> None:
        """Until the next upload has ended."""
        await self._one_ended.wait()

    def _revoke_one(self, client: str) -> None:
        """From somebody with more than the client would have, so that nobody ends the uploads of who has fewer."""
        held = self._shares.held_by
        slow = [one for one in self._open if held(one.client) > held(client) + 1 and one.is_slow()]
        if slow:
            max(slow, key=lambda one: held(one.client)).revoke()
