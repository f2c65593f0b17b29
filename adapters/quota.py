"""Division of a bounded resource among clients, so that none of them can exclude the others."""

from __future__ import annotations

from collections import Counter

# Number of clients that still get something small after others have used their whole quotas.
NUM_SMALL = 64


class ClientQuota:
    """Counts slots or bytes by client. Not thread-safe.

        max(held by one client) = (2 * most_of_one - held by the others) / 2

    So a client that is alone may hold `most_of_one`, a second one beside it half of that, and so on: some is always
    free.

    most_of_one  the most of a client that is alone
    small        beyond the rule, a client may hold this much while all clients together hold no more than `most`
    always       a client may always hold this much
    most         of all clients together, without what `always` admits: 2 * most_of_one + NUM_SMALL * small
    num_held     of all clients together
    """

    def __init__(self, most_of_one: int, *, small: int = 0, always: int = 0) -> None:
        self.most_of_one = most_of_one
        self.most = 2 * most_of_one + NUM_SMALL * small
        self.num_held = 0
        self._small, self._always = small, always
        self._held: Counter[str] = Counter()  # none holds 0

    def held_by(self, payer: str) -> int:
        """The count of one client."""
        return self._held[payer]

    def refusal(self, payer: str, *, unit: str = "many") -> str:
        """The client's part of a refusal: how much it holds, and may hold."""
        return (
            f"of which you have {self._held[payer]}; a client gets as {unit} as it leaves free for others, at most "
            f"{self.most_of_one}"
        )

    def acquire(self, payer: str, count: int) -> bool:
        """Add `count` to the client's if the quota allows it; returns whether it did."""
        if not count:
            return True
        wanted = self._held[payer] + count
        num_left = 2 * self.most_of_one - (self.num_held - self._held[payer])  # by the others
        fits = wanted <= num_left // 2
        fits = fits or (wanted <= self._small and self.num_held + count <= self.most)
        if fits or wanted <= self._always:
            self._held[payer] = wanted
            self.num_held += count
            return True
        return False

    def release(self, payer: str, count: int) -> None:
        """Subtract `count` from the client's."""
        left = self._held.pop(payer, 0) - count
        assert left >= 0, "more was released than acquired"
        self.num_held -= count
        if left:
            self._held[payer] = left
