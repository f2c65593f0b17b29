"""Quotas of clients in the API process: places in the queue, and log probabilities that wait to be sent."""

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


def logprob_shares(most_of_one: int) -> ClientQuota:
    """The log probabilities, alternatives included, that are in memory until their clients have them: 0.5 KB each.
    most_of_one: of one client alone."""
    return ClientQuota(most_of_one, small=most_of_one // 256)


class LogprobBudget:
    """One request's log probabilities in memory, charged to the client of the request that creates it."""

    def __init__(self, shares: ClientQuota) -> None:
        self._shares, self._client = shares, CLIENT.get()
        self._num_held = 0

    def take(self, count: int) -> None:
        """Charge `count` more. QueueFull if the client may not hold them."""
        if not self._shares.acquire(self._client, count):
            raise QueueFull(
                f"Answers that are not sent yet hold {self._shares.num_held} log probabilities, of which you have "
                f"{self._shares.held_by(self._client)}; a client gets as many as it leaves free for others, at most "
                f"{self._shares.most_of_one}; send fewer of such requests at a time, lower `max_tokens` or the number "
                "of alternatives, or read a stream.",
                headers={"Retry-After": "1"},
            )
        self._num_held += count

    def give_back(self, count: int) -> None:
        """Refund `count`, unless all are released already."""
        count = min(count, self._num_held)
        self._num_held -= count
        self._shares.release(self._client, count)

    def release(self) -> None:
        """Refund everything; further calls do nothing."""
        self.give_back(self._num_held)
