"""Which replica a request goes to, decided by pure functions: by hand, and by simulation of many."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from service.cluster.routing import (
    PART_TOKENS,
    Demand,
    Prefixes,
    Replica,
    ReplicaHealth,
    Rule,
    beginnings,
    choose,
    homes_wanted,
    load_limit,
    preference,
)

RULE = Rule(bound=1.25, host_tokens=64, disk_tokens=1000, evict_tokens=200, slack_tokens=100)
DIGESTS = [f"{one:064x}" for one in range(2000)]


def _names(num: int) -> tuple[str, ...]:
    return tuple(sorted(f"replica-{one}" for one in range(num)))


def _replicas(num: int = 4, **fields: object) -> list[Replica]:
    return [Replica(name, **fields) for name in _names(num)]  # type: ignore[arg-type]


def test_nobody_is_chosen_where_nobody_is() -> None:
    assert choose("a", 16, 10, []) == []


def test_the_base_goes_to_the_least_loaded() -> None:
    replicas = [Replica("a", 30), Replica("b", 10), Replica("c", 20)]
    assert choose(None, 0, 10, replicas) == ["b", "c", "a"]


def test_base_requests_that_choose_at_once_are_spread() -> None:
    chosen = Counter(choose(None, 0, 10, _replicas(), key=str(key))[0] for key in range(400))
    assert len(chosen) == 4
    assert max(chosen.values()) < 150


def test_an_adapter_has_one_home_whoever_asks_and_in_whatever_order() -> None:
    replicas = _replicas()
    (home,) = {choose("d" * 64, 16, 10, replicas, key=str(key))[0] for key in range(50)}
    assert choose("d" * 64, 16, 10, replicas[::-1])[0] == home


def test_every_replica_is_named_once_so_that_there_is_somebody_left_to_try() -> None:
    for digest in (None, *DIGESTS[:50]):
        assert sorted(choose(digest, 16, 10, _replicas(5))) == list(_names(5))


def test_a_replica_that_leaves_moves_its_own_adapters_alone() -> None:
    before, after = _names(16), tuple(one for one in _names(16) if one != "replica-7")
    for digest in DIGESTS:
        order = preference(digest, before)
        assert preference(digest, after) == tuple(one for one in order if one != "replica-7")


def test_a_replica_that_joins_takes_its_share_and_no_more() -> None:
    moved = [digest for digest in DIGESTS if preference(digest, _names(16))[0] != preference(digest, _names(17))[0]]
    assert all(preference(digest, _names(17))[0] == "replica-16" for digest in moved)
    assert len(moved) == pytest.approx(len(DIGESTS) / 17, rel=0.3)


def test_a_home_above_the_bound_gives_way_to_where_the_adapter_is_then_to_the_next_in_its_order() -> None:
    digest, names = DIGESTS[0], _names(4)
    first, second, third, fourth = preference(digest, names)
    loads = {first: 900.0, second: 100.0, third: 100.0, fourth: 100.0}
    replicas = [Replica(name, loads[name]) for name in names]
    assert choose(digest, 16, 10, replicas, rule=RULE) == [second, third, fourth, first]
    replicas = [Replica(name, loads[name], tiers={digest: "device"} if name == fourth else {}) for name in names]
    assert choose(digest, 16, 10, replicas, rule=RULE)[0] == fourth


def test_no_choice_lifts_a_replica_above_the_bound() -> None:
    loads = dict.fromkeys(_names(8), 0.0)
    chosen = 0
    for number in range(4000):
        replicas = [Replica(name, load) for name, load in loads.items()]
        digest = DIGESTS[0] if number % 2 else DIGESTS[number % 100]  # every other request for one adapter
        name = choose(digest, 16, 10, replicas, rule=RULE)[0]
        assert loads[name] + 10 <= load_limit(replicas, 10, RULE)
        loads[name] += 10
        chosen += 1
    assert max(loads.values()) <= 1.25 * (10 * chosen) / 8 + 100


def test_of_several_homes_the_one_that_begins_soonest() -> None:
    digest, names = DIGESTS[3], _names(4)
    first, second = preference(digest, names)[:2]

    def chosen(**by_name: Replica) -> str:
        return choose(digest, 16, 10, [by_name.get(name) or Replica(name) for name in names], num_homes=2, rule=RULE)[0]

    there, on_host = {digest: "device"}, {digest: "host"}
    assert chosen(**{first: Replica(first), second: Replica(second, 50, 0, there)}) == second  # type: ignore[arg-type]
    assert chosen(**{first: Replica(first, 0, 16, on_host), second: Replica(second, 90, 0, there)}) == first  # type: ignore[arg-type]
    assert chosen(**{first: Replica(first, 0, 0), second: Replica(second, 0, 16)}) == second  # rows are free there


def test_a_hot_adapter_spreads_and_shrinks_back_and_a_demand_around_a_limit_moves_nothing() -> None:
    homes = 1
    for share, expected in ((0.01, 1), (0.09, 3), (0.5, 16), (0.09, 4), (0.001, 1)):
        homes = homes_wanted(homes, share, 16, RULE)
        assert homes == expected, share
    homes = homes_wanted(1, 0.07, 16, RULE)
    assert {homes_wanted(homes, share, 16, RULE) for share in (0.060, 0.065, 0.07, 0.09)} == {homes}


def test_demand_is_forgotten_with_time() -> None:
    demand = Demand(half_seconds=10)
    for second in range(100):
        demand.ask(DIGESTS[second % 50], 10, 8, second, RULE)
    hot = [demand.ask("hot", 10, 8, 100, RULE) for _ in range(200)][-1]
    assert hot > 4
    for second in range(100, 300):
        demand.ask(DIGESTS[second % 50], 10, 8, second, RULE)
    assert demand.ask("hot", 10, 8, 300, RULE) == 1


# ---- prefixes

PROMPT = tuple(range(4 * PART_TOKENS + PART_TOKENS // 2))
SCOPE = ("tenant", "")


def test_a_prompt_goes_where_its_beginning_is_within_the_bound() -> None:
    found = 512
    for digest, tiers in ((None, {}), ("d" * 64, {"d" * 64: "device"})):
        there = Replica("there", 3000, tiers=tiers, found_tokens=found)  # type: ignore[arg-type]
        assert choose(digest, 16, 600, [Replica("idle", 0, 16), there], rule=Rule(slack_tokens=2000))[0] == "there"
        assert choose(digest, 16, 600, [Replica("idle", 0, 16), there], rule=RULE)[0] == "idle"


def test_a_conversation_goes_on_away_from_its_adapters_home_where_both_are() -> None:
    digest, (home, other) = DIGESTS[0], preference(DIGESTS[0], _names(2))
    here, there = Replica(home, tiers={digest: "device"}), Replica(other, 500, found_tokens=PART_TOKENS)
    assert choose(digest, 16, 600, [here, there])[0] == home
    there = Replica(other, 500, tiers={digest: "device"}, found_tokens=PART_TOKENS)
    assert choose(digest, 16, 600, [here, there])[0] == other


@pytest.mark.parametrize(
    ("token_ids", "scope", "adapter", "start", "num"),
    [
        (PROMPT, SCOPE, None, 0, 4),
        (PROMPT[: 3 * PART_TOKENS - 1], SCOPE, None, 0, 2),
        ((*PROMPT[: 3 * PART_TOKENS - 1], 9, *PROMPT[3 * PART_TOKENS :]), SCOPE, None, 0, 2),
        (PROMPT, ("other", ""), None, 0, 0),
        (PROMPT, ("tenant", "salt"), None, 0, 0),
        (PROMPT, ("", "tenant"), None, 0, 0),
        (PROMPT, SCOPE, "d" * 64, 0, 0),
        (PROMPT, SCOPE, "d" * 64, 2 * PART_TOKENS, 2),
        (PROMPT, SCOPE, "d" * 64, 2 * PART_TOKENS - 1, 1),
        (PROMPT[:9], SCOPE, None, 0, 0),
        ((), SCOPE, None, 0, 0),
    ],
)
def test_beginnings_are_shared_as_the_prefix_cache_shares_blocks(
    token_ids: tuple[int, ...], scope: tuple[str, str], adapter: str | None, start: int, num: int
) -> None:
    prefixes = Prefixes()
    prefixes.note(beginnings(PROMPT, SCOPE), 10**6)
    assert prefixes.num_tokens(beginnings(token_ids, scope, adapter, start)) == num * PART_TOKENS


def test_a_short_turn_is_told_from_others_behind_the_same_system_prompt() -> None:
    system, here, there = tuple(range(300)), Prefixes(), Prefixes()
    turns = [beginnings((*system, *range(1000, 1000 + num)), SCOPE) for num in (100, 200)]
    here.note(turns[0], 10**6)
    there.note(beginnings((*system, *range(5000, 5100)), SCOPE), 10**6)
    assert here.num_tokens(turns[1]) > there.num_tokens(turns[1]) > 0


def test_as_many_beginnings_are_known_as_a_cache_has_room_for_and_ends_go_first() -> None:
    prefixes, most_tokens = Prefixes(), 6 * PART_TOKENS
    prompts = [tuple(range(one, one + 4 * PART_TOKENS)) for one in range(40)]
    for prompt in prompts:
        prefixes.note(beginnings(prompt, SCOPE), most_tokens)
    found = [prefixes.num_tokens(beginnings(prompt, SCOPE)) // PART_TOKENS for prompt in prompts]
    assert found == [*[0] * 38, 2, 4]


def test_an_engine_that_began_anew_has_no_prompts_and_one_without_a_cache_never() -> None:
    client: Any = SimpleNamespace(ready=SimpleNamespace(keeps_prefixes=True, kv_capacity_tokens=10**5))
    member, known = ReplicaHealth("engine-0", client), beginnings(PROMPT, SCOPE)
    member.note_prompt(known)
    assert member.num_found(known) == 4 * PART_TOKENS
    client.ready = SimpleNamespace(keeps_prefixes=False, kv_capacity_tokens=10**5)
    assert member.num_found(known) == 0
    member.note_prompt(known)
    assert member.num_found(known) == 0
