"""Places that requests take, so that none waits for long: beyond them one is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

from adapters.quota import ClientQuota
from service.api.errors import QueueFull
from service.fairness.client_identity import CLIENT
from service.tenants.limits import Tenant


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


class QueuePlaces:
    """Places of one request's sequences, the tenant's and the queue's, held until they are given back.

    LimitReached or QueueFull, with nothing taken, where the tenant or the client may not have all of them.
    """

    def __init__(self, queue: QueueLimits, tenant: Tenant, client: str, num_places: int) -> None:
        tenant.enter(num_places)
        try:
            queue.enter(num_places, client)
        except QueueFull:
            tenant.leave(num_places)
            raise
        self._queue, self._tenant, self._client = queue, tenant, client
        self.num_held = num_places

    def split(self, num_places: int) -> QueuePlaces:
        """Hand so many of the places to another request."""
        self.num_held -= num_places
        assert self.num_held >= 0, "more places were handed over than held"
        part = copy(self)
        part.num_held = num_places
        return part

    def shrink(self, most: int) -> None:
        """Give back all places beyond `most`."""
        num_given = max(0, self.num_held - most)
        self.num_held -= num_given
        self._queue.leave(num_given, self._client)
        self._tenant.leave(num_given)

    def release(self) -> None:
        """Give back all places."""
        self.shrink(0)
