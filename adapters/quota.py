"""How something that is scarce is divided among those who pay for it, so that none of them can keep others out."""

from __future__ import annotations

from collections import Counter

# So many payers find room for something small where others have taken all that they may.
NUM_SMALL = 64


class ClientQuota:
    """Counts places or bytes by payer. Not thread-safe.

    A payer may hold as much as it leaves free of twice `most_of_one`: one alone `most_of_one`, a second one beside it
    half of that, and so on, so that however many have all that they may, something is left. Where that is little:

    most_of_one  what a payer alone may hold
    small        who holds no more than that gets it beyond twice `most_of_one`, up to NUM_SMALL times as much
    always       who holds no more than that gets it whatever others hold
    most         of all together, but for `always` of each payer
    num_held     of all together
    """

    def __init__(self, most_of_one: int, *, small: int = 0, always: int = 0) -> None:
        self.most_of_one = most_of_one
        self.most = 2 * most_of_one + NUM_SMALL * small
        self.num_held = 0
        self._small, self._always = small, always
        self._held: Counter[str] = Counter()  # none holds 0

    def held_by(self, payer: str) -> int:
        """What one payer holds."""
        return self._held[payer]

    def take(self, payer: str, count: int) -> bool:
        """Whether the payer may have so many more; if so it has them."""
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

    def give_back(self, payer: str, count: int) -> None:
        """The payer has so many less."""
        left = self._held.pop(payer, 0) - count
        assert left >= 0, "more was given back than taken"
        self.num_held -= count
        if left:
            self._held[payer] = left
