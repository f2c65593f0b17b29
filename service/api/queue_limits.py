"""Places that requests take, so that none waits for long: beyond them one is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adapters.quota import ClientQuota
from service.api.errors import QueueFull
from service.fairness.client_identity import CLIENT


class QueueLimits:
    """Counts the sequences, or calls, that wait or run, so that a full queue answers at once instead of growing.

    A single client may occupy all `limit` slots without keeping others out (see `ClientQuota`); all clients together
    occupy at most twice the limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._shares = ClientQuota(limit)

    @property
    def num_open(self) -> int:
        """Places that are taken."""
        return self._shares.num_held

    def enter(self, num_sequences: int, client: str = "") -> None:
        """Take places. QueueFull if the client may not have all of them."""
        if not self._shares.acquire(client, num_sequences):
            raise QueueFull(
                f"{self.num_open} of {self.limit} places are taken and this request needs {num_sequences}; "
                "send it again later, or fewer at a time.",
                headers={"Retry-After": "1"},
            )

    def leave(self, num_sequences: int, client: str = "") -> None:
        """Give a client's places back."""
        self._shares.release(client, num_sequences)

    @contextmanager
    def places(self, num_places: int = 1) -> Iterator[None]:
        """Held inside by who pays for the request; all there are, if that is fewer. QueueFull if they are not free."""
        client, num_places = CLIENT.get(), min(num_places, self.limit)
        self.enter(num_places, client)
        try:
            yield
        finally:
            self.leave(num_places, client)
