"""What a cache of several owners keeps, compared with its rule spelt out."""

from __future__ import annotations

import random
from collections import Counter

from service.fairness.fair_cache import FairCache

MOST = 9


class Spelt:
    """One list, what was used last at its end, gone through for each question."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, str, int]] = []  # key, owner, size

    def use(self, key: int) -> bool:
        self.kept.sort(key=lambda one: one[0] == key)
        return key in self.keys

    def put(self, key: int, owner: str, size: int) -> None:
        owner = next((whose for one, whose, _ in self.kept if one == key), owner)
        self.drop(key)
        self.kept.append((key, owner, size))
        while sum(size for _, _, size in self.kept) > MOST:
            sizes = Counter[str]()
            for _, whose, size in self.kept:
                sizes[whose] += size
            self.drop(next(one for one, whose, _ in self.kept if sizes[whose] == max(sizes.values())))

    def drop(self, key: int) -> None:
        self.kept = [one for one in self.kept if one[0] != key]

    @property
    def keys(self) -> set[int]:
        return {key for key, _, _ in self.kept}


def test_whoever_has_most_loses_what_it_used_longest_ago() -> None:
    chosen = random.Random(0)
    cache, spelt = FairCache[int, str](MOST), Spelt()
    for _ in range(3000):
        key, owner = chosen.randrange(20), chosen.choice("abcd")
        match chosen.choice(("get", "put", "put", "drop")):
            case "get":
                assert (cache.get(key) is not None) == spelt.use(key)
            case "put":
                size = chosen.choice((1, 1, 1, 2, MOST, MOST + 1))
                cache.put(key, f"{key}", owner, size)
                spelt.put(key, owner, size)
            case "drop":
                cache.drop(key)
                spelt.drop(key)
    for key in range(20):
        assert cache.get(key) == (f"{key}" if spelt.use(key) else None)


def test_one_owner_alone_has_all_of_it() -> None:
    cache = FairCache[int, int](MOST)
    for key in range(2 * MOST):
        cache.put(key, key, "one")
    assert [cache.get(key) for key in range(2 * MOST)] == [*[None] * MOST, *range(MOST, 2 * MOST)]
