"""Quotas of clients in the API process: queue slots, and log probabilities that wait to be sent."""

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
        """Slots that are held."""
        return self._shares.num_held

    def acquire(self, num_sequences: int, client: str = "") -> None:
        """QueueFull if the client may not have so many more slots."""
        if not self._shares.acquire(client, num_sequences):
            raise QueueFull(
                f"{self.num_open} of {self.limit} queue slots are taken, and this request needs {num_sequences}; "
                "send it again later, or fewer at a time.",
                headers={"Retry-After": "1"},
            )

    def release(self, num_sequences: int, client: str = "") -> None:
        """Free so many of the client's slots."""
        self._shares.release(client, num_sequences)

    @contextmanager
    def holding(self, num_slots: int = 1) -> Iterator[None]:
        """The client of the request holds so many inside, or all there are. QueueFull."""
        client, num_slots = CLIENT.get(), min(num_slots, self.limit)
        self.acquire(num_slots, client)
        try:
            yield
        finally:
            self.release(num_slots, client)


def logprob_shares(most_of_one: int) -> ClientQuota:
    """The log probabilities, alternatives included, that are in memory until their clients have them: 0.5 KB each.
    most_of_one: of one client alone."""
    return ClientQuota(most_of_one, small=most_of_one // 256)


class LogprobBudget:
    """One request's log probabilities in memory, charged to the client of the request that creates it."""

    def __init__(self, shares: ClientQuota) -> None:
        self._shares, self._client = shares, CLIENT.get()
        self._num_held = 0

    def charge(self, count: int) -> None:
        """Charge `count` more. QueueFull if the client may not hold them."""
        if not self._shares.acquire(self._client, count):
            raise QueueFull(
                f"Answers that are not sent yet hold {self._shares.num_held} log probabilities, "
                f"{self._shares.refusal(self._client)}; send fewer of such requests at a time, lower `max_tokens` or "
                "the number of alternatives, or read a stream.",
                headers={"Retry-After": "1"},
            )
        self._num_held += count

    def refund(self, count: int) -> None:
        """Refund `count`, unless all are released already."""
        count = min(count, self._num_held)
        self._num_held -= count
        self._shares.release(self._client, count)

    def release(self) -> None:
        """Refund everything; further calls do nothing."""
        self.refund(self._num_held)
