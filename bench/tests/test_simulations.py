"""The simulations of routing and of eviction find what the rules of the product are chosen for."""

from __future__ import annotations

import bisect
import itertools
import random

from bench.scale import cluster_routing
from bench.scale.cluster_bounds import hits_of_greedy_dual, hits_of_least_recent, hits_of_worth


def test_the_simulation_finds_more_adapters_on_the_device_than_chance_and_no_replica_overrun() -> None:
    flags = "--replicas 16 --adapters 600 --requests 3000 --rows-for 24 --load 0.6 --seed 3"
    given = cluster_routing.parser().parse_args(flags.split())
    rules = "multilora", "random", "round-robin (production-stack)"
    ours, chance, turns = (cluster_routing.simulate(name, given) for name in rules)
    assert ours.hit_rate >= 1.6 * max(chance.hit_rate, turns.hit_rate)
    assert ours.disk_loads <= 0.5 * chance.disk_loads
    assert ours.imbalance <= 1.35
    assert ours.moved is not None and ours.moved <= 1.3  # few adapters: what must move is uneven


def test_two_replicas_find_as_much_of_chats_as_one_of_their_size() -> None:
    flags = "--replicas 2 --ingresses 1 --sessions 64 --requests 800 --cache-tokens 150000 --seed 3"
    given = cluster_routing.parser().parse_args(flags.split())
    one = cluster_routing.simulate_chats(cluster_routing.chat_by_load, given, 1)
    ours = cluster_routing.simulate_chats(cluster_routing.chat_by_prefixes, given, 2)
    by_load = cluster_routing.simulate_chats(cluster_routing.chat_by_load, given, 2)
    assert ours.hit_rate >= 0.97 * one.hit_rate > by_load.hit_rate
    assert ours.imbalance <= 1.2


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
