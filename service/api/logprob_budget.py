"""Log probabilities that are in memory until their client has them, divided among who pays: 0.5 KB each."""

from __future__ import annotations

from adapters.quota import ClientQuota
from service.api.errors import QueueFull
from service.fairness.client_identity import CLIENT


def logprob_shares(most_of_one: int) -> ClientQuota:
    """The log probabilities of all answers, alternatives included. most_of_one: of one client alone."""
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
