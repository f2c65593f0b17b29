"""The most that routing can win on several replicas, whatever the rule: adapters on the device, and loads.

python -m bench.scale.cluster_bounds [--replicas 2] [--adapters 200] [--rows-for 20] [--zipf 1.0] [--requests 40000]
                               [--moves 0]

Requests one after another, their adapters by Zipf's law. Of each replica the device holds the adapters that are worth
most (`adapters.memory.eviction`, as ours do), those used last, those of GreedyDual-Size-Frequency, or, as no server
can, those asked for most in all, or those that will be used soonest (Belady 1966), which no order of evictions beats.
`at random` sends each request to any replica; `by adapter` deals the adapters out evenly by how much they are asked
for, which no rule knows beforehand. Requests that wait, and could be served in another order, are not looked at.

--moves  requests after which others are asked for: each adapter takes the place in Zipf's law of the one 20 further on
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from adapters.memory.eviction import DecayingLfu

Streams = Sequence[Sequence[int]]
_NEVER = 1 << 60


def hits_of_worth(requests: Sequence[int], room: int) -> int:
    """Requests whose adapter is held, where the one goes that is worth least, as on our devices."""
    worths, held, hits = DecayingLfu(lambda _: 1.0), set[str](), 0
    for adapter in map(str, requests):
        hits += adapter in held
        if adapter not in held:
            if len(held) == room:
                least = min(held, key=worths.of)
                held.remove(least)
                worths.evict(least)
            held.add(adapter)
            worths.add(adapter)
        worths.use(adapter)
    return hits


def hits_of_greedy_dual(requests: Sequence[int], room: int) -> int:
    """Likewise, where uses since it came in count, above the worth of what was evicted last before that."""
    held: dict[int, tuple[float, int]] = {}
    worth_evicted, counts, hits = 0.0, Counter[int](), 0
    for turn, adapter in enumerate(requests):
        hits += adapter in held
        if adapter not in held:
            if len(held) == room:
                least = min(held, key=held.__getitem__)
                worth_evicted = held.pop(least)[0]
            counts[adapter] = 0
        counts[adapter] += 1
        held[adapter] = worth_evicted + counts[adapter], turn
    return hits


def hits_of_most_asked(requests: Sequence[int], room: int) -> int:
    """Likewise, where those asked for most in all of `requests` are there from the beginning and stay."""
    return sum(number for _, number in Counter(requests).most_common(room))


def hits_of_least_recent(requests: Sequence[int], room: int) -> int:
    """Likewise, where the one goes that was used longest ago."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for adapter in requests:
        hits += adapter in held
        held[adapter] = None
        held.move_to_end(adapter)
        if len(held) > room:
            held.popitem(last=False)
    return hits


def hits_of_foreseen(requests: Sequence[int], room: int) -> int:
    """Likewise, where the one goes that will be used last."""
    following: dict[int, int] = {}
    next_use = [_NEVER] * len(requests)
    for at in range(len(requests) - 1, -1, -1):
        next_use[at] = following.get(requests[at], _NEVER)
        following[requests[at]] = at
    held: dict[int, int] = {}
    hits = 0
    for adapter, following_at in zip(requests, next_use, strict=True):
        hits += adapter in held
        if adapter not in held and len(held) == room:
            del held[max(held, key=held.__getitem__)]
        held[adapter] = following_at
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (
        ("replicas", 2),
        ("adapters", 200),
        ("rows-for", 20),
        ("requests", 40_000),
        ("moves", 0),
        ("seed", 1),
    ):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    weights = list(itertools.accumulate(1 / (one + 1) ** given.zipf for one in range(given.adapters)))
    requests = [bisect.bisect(weights, chance.random() * weights[-1]) for _ in range(given.requests)]
    if given.moves:
        requests = [(one + number // given.moves * 20) % given.adapters for number, one in enumerate(requests)]
    places = [chance.randrange(given.replicas) for _ in requests]
    at_random = [[a for a, at in zip(requests, places, strict=True) if at == one] for one in range(given.replicas)]
    by_adapter = [[a for a in requests if a % given.replicas == one] for one in range(given.replicas)]
    print(f"{'evicted':28}{'at random':>10}{'by adapter':>12}{'hits':>8}{'loads':>8}")
    rules: list[tuple[str, Callable[[Sequence[int], int], int]]] = [
        ("worth least (ours)", hits_of_worth),
        ("used longest ago", hits_of_least_recent),
        ("GreedyDual-Size-Frequency", hits_of_greedy_dual),
        ("asked for least in all", hits_of_most_asked),
        ("will be used last (Belady)", hits_of_foreseen),
    ]
    for name, hits_of in rules:
        chosen, routed = (
            sum(hits_of(one, given.rows_for) for one in streams) / given.requests for streams in (at_random, by_adapter)
        )
        print(f"{name:28}{chosen:10.3f}{routed:12.3f}{routed / chosen:7.2f}x{(1 - routed) / (1 - chosen):7.2f}x")


if __name__ == "__main__":
    main()
