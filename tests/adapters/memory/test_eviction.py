"""Which adapters stay: those asked for most often lately."""

from __future__ import annotations

import random

from adapters.memory.eviction import MOST_REMEMBERED, DecayingLfu, HeapDecayingLfu


def _used(worths: DecayingLfu, digest: str, num_uses: int) -> None:
    worths.add(digest)
    for _ in range(num_uses):
        worths.use(digest)


def test_what_an_adapter_comes_in_for_is_one_use() -> None:
    worths = DecayingLfu(lambda _: 1.0)
    worths.add("a")
    before = worths.of("a")[0]
    worths.use("a")
    assert worths.of("a")[0] == before == 1.0
    worths.use("a")
    assert worths.of("a")[0] > before


def test_one_that_was_evicted_is_known_when_it_comes_back() -> None:
    worths = DecayingLfu(lambda _: 1.0)
    _used(worths, "often", 5)
    worths.evict("often")
    _used(worths, "once", 1)
    _used(worths, "often", 1)
    worths.touch("once")
    assert min(["often", "once"], key=worths.of) == "once"


def test_one_that_left_for_another_reason_is_not() -> None:
    worths = DecayingLfu(lambda _: 1.0)
    _used(worths, "often", 5)
    worths.forget("often")
    _used(worths, "often", 1)
    assert worths.of("often")[0] == 1.0


def test_so_many_are_remembered_and_no_more() -> None:
    worths = DecayingLfu(lambda _: 1.0)
    for number in range(2000):  # uses fade slowly beside so many
        worths.add(f"kept-{number}")
    _used(worths, "often", 5)
    worths.evict("often")
    for number in range(MOST_REMEMBERED):
        worths.add(str(number))
        worths.evict(str(number))
    worths.add("often")
    assert worths.of("often")[0] == 1.0


def test_dear_ones_stay_longer() -> None:
    worths = DecayingLfu({"dear": 10.0, "cheap": 1.0}.__getitem__)
    _used(worths, "dear", 1)
    _used(worths, "cheap", 3)
    assert worths.of("dear") > worths.of("cheap")


def test_the_least_is_known_whatever_has_come_gone_and_been_used() -> None:
    chance, kept = random.Random(3), set[str]()
    costs = {str(number): chance.uniform(1.0, 5.0) for number in range(60)}
    worths = HeapDecayingLfu(costs.__getitem__)
    for _ in range(5000):
        digest = chance.choice([*costs])
        if digest not in kept:
            worths.add(digest)
            kept.add(digest)
        chance.choice([worths.use, worths.use, worths.touch])(digest)
        assert worths.least() == min(kept, key=worths.of)
        if len(kept) > chance.randint(10, 50):
            gone = worths.least() if chance.random() < 0.8 else digest
            (worths.evict if chance.random() < 0.8 else worths.forget)(gone)
            kept.remove(gone)


def test_the_least_costs_no_look_at_all_that_are_there() -> None:
    num_asked: list[str] = []

    def cost_per_size(digest: str) -> float:
        num_asked.append(digest)
        return 1.0

    worths = HeapDecayingLfu(cost_per_size)
    for number in range(2000):
        worths.add(str(number))
    num_asked.clear()
    for number in range(2000, 3000):
        worths.evict(worths.least())
        worths.add(str(number))
    assert len(num_asked) < 10 * 1000
