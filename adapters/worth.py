"""Which adapter to keep where not all fit: GreedyDual-Size-Frequency, for rows on the device and for host memory.

    worth = L + uses * cost / size

`uses` count since the adapter came in, `cost` is what bringing it again would take, `size` what it occupies, and L is
the largest worth of any that was evicted: it ages those that were used often long ago. (Cherkasova, "Improving WWW
Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Labs 1998.) Of equal worth, the least recently
used goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Compared as it is: worth, then the turn of the last use.
Worth = tuple[float, int]


@dataclass(slots=True)
class _Used:
    since: float
    uses: int
    last_turn: int


class Worths:
    """Of what is kept in one place, by digest.

    cost_per_size  what it takes to bring an adapter again, for each unit of its size; asked when worths are compared
    """

    def __init__(self, cost_per_size: Callable[[str], float]) -> None:
        self._cost_per_size = cost_per_size
        self._used: dict[str, _Used] = {}
        self._age = 0.0  # L
        self._turn = 0

    def use(self, digest: str) -> None:
        """It comes in, or is used again."""
        self._turn += 1
        used = self._used.setdefault(digest, _Used(self._age, 0, 0))
        used.since, used.last_turn = self._age, self._turn
        used.uses += 1

    def look_at(self, digest: str) -> None:
        """It was in use until now, which counts as no further use."""
        self._turn += 1
        self._used[digest].last_turn = self._turn

    def of(self, digest: str) -> Worth:
        """Of one that is there."""
        used = self._used[digest]
        return used.since + used.uses * self._cost_per_size(digest), used.last_turn

    def evict(self, digest: str) -> None:
        """It makes room for others, which ages the rest."""
        self._age = max(self._age, self.of(digest)[0])
        self.forget(digest)

    def forget(self, digest: str) -> None:
        """It leaves for another reason."""
        del self._used[digest]

    def last_turn(self, digest: str) -> int:
        """Of its last use: larger is later."""
        return self._used[digest].last_turn
