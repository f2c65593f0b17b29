"""Which adapters stay: those asked for most often lately."""

from __future__ import annotations

import bisect
import itertools
import random

from adapters.worth import MOST_REMEMBERED, Worths
from bench.cluster_bounds import hits_of_greedy_dual, hits_of_least_recent, hits_of_worth


def _used(worths: Worths, digest: str, num_uses: int) -> None:
    worths.come(digest)
    for _ in range(num_uses):
        worths.use(digest)


def test_what_an_adapter_comes_in_for_is_one_use() -> None:
    worths = Worths(lambda _: 1.0)
    worths.come("a")
    before = worths.of("a")[0]
    worths.use("a")
    assert worths.of("a")[0] == before == 1.0
    worths.use("a")
    assert worths.of("a")[0] > before


def test_one_that_was_evicted_is_known_when_it_comes_back() -> None:
    worths = Worths(lambda _: 1.0)
    _used(worths, "often", 5)
    worths.evict("often")
    _used(worths, "once", 1)
    _used(worths, "often", 1)
    worths.look_at("once")
    assert min(["often", "once"], key=worths.of) == "once"


def test_one_that_left_for_another_reason_is_not() -> None:
    worths = Worths(lambda _: 1.0)
    _used(worths, "often", 5)
    worths.forget("often")
    _used(worths, "often", 1)
    assert worths.of("often")[0] == 1.0


def test_so_many_are_remembered_and_no_more() -> None:
    worths = Worths(lambda _: 1.0)
    for number in range(2000):  # uses fade slowly beside so many
        worths.come(f"kept-{number}")
    _used(worths, "often", 5)
    worths.evict("often")
    for number in range(MOST_REMEMBERED):
        worths.come(str(number))
        worths.evict(str(number))
    worths.come("often")
    assert worths.of("often")[0] == 1.0


def test_dear_ones_stay_longer() -> None:
    worths = Worths({"dear": 10.0, "cheap": 1.0}.__getitem__)
    _used(worths, "dear", 1)
    _used(worths, "cheap", 3)
    assert worths.of("dear") > worths.of("cheap")


def _requests(*, moves: bool) -> list[int]:
    """For 200 adapters by Zipf's law; with `moves`, for others by and by."""
    chance = random.Random(1)
    weights = list(itertools.accumulate(1 / (one + 1) for one in range(200)))
    drawn = [bisect.bisect(weights, chance.random() * weights[-1]) for _ in range(8000)]
    return [(one + number // 2000 * 20) % 200 for number, one in enumerate(drawn)] if moves else drawn


def test_more_is_there_than_by_the_last_use_and_by_the_uses_since_it_came() -> None:
    for moves in (False, True):
        requests = _requests(moves=moves)
        hits = hits_of_worth(requests, 20)
        assert hits > 1.05 * hits_of_least_recent(requests, 20)
        assert hits > 1.05 * hits_of_greedy_dual(requests, 20)
