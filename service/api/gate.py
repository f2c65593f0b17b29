"""Places that requests take, so that none waits for long: beyond them one is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.api.errors import QueueFull
from service.payer import PAYER


class Gate:
    """Counts the sequences, or calls, that wait or run, so that a full queue answers at once instead of growing.

    One payer alone may take all `limit` places. That keeps nobody out: a payer that has less than its part, `limit` by
    the number of those that hold places, gets in beyond the limit, up to twice the limit in all.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_open = 0
        self._held: dict[str, int] = {}  # by payer; none holds 0

    def enter(self, num_sequences: int, payer: str = "") -> None:
        """Take places. QueueFull if the payer may not have all of them."""
        held = self._held.get(payer, 0)
        part = self.limit // (len(self._held) + (held == 0))
        most = self.limit if held + num_sequences > part else 2 * self.limit
        if self.num_open + num_sequences > most:
            raise QueueFull(
                f"{self.num_open} of {self.limit} places are taken and this request needs {num_sequences}; "
                "send it again later, or fewer at a time.",
                headers={"Retry-After": "1"},
            )
        self.num_open += num_sequences
        if num_sequences:
            self._held[payer] = held + num_sequences

    def leave(self, num_sequences: int, payer: str = "") -> None:
        """Give a payer's places back."""
        self.num_open -= num_sequences
        held = self._held.pop(payer, 0) - num_sequences
        assert held >= 0, "more places were given back than taken"
        if held:
            self._held[payer] = held

    @contextmanager
    def places(self, num_places: int = 1) -> Iterator[None]:
        """Held inside by who pays for the request; all there are, if that is fewer. QueueFull if they are not free."""
        payer, num_places = PAYER.get(), min(num_places, self.limit)
        self.enter(num_places, payer)
        try:
            yield
        finally:
            self.leave(num_places, payer)
