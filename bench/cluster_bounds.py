"""The most that routing can win on several replicas, whatever the rule: adapters on the device, and loads.

python -m bench.cluster_bounds [--replicas 2] [--adapters 200] [--rows-for 20] [--zipf 1.0] [--requests 40000]

Requests one after another, their adapters by Zipf's law. Of each replica the device holds the adapters used last, or,
as no server can, those that will be used soonest (Belady 1966), which no order of evictions beats. `at random` sends
each request to any replica; `by adapter` deals the adapters out evenly by how much they are asked for, which no rule
knows beforehand. Requests that wait, and could be served in another order, are not looked at.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

Streams = Sequence[Sequence[int]]
_NEVER = 1 << 60


def hits_of_least_recent(requests: Sequence[int], room: int) -> int:
    """Requests whose adapter is held, where the one goes that was used longest ago."""
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
    for flag, default in (("replicas", 2), ("adapters", 200), ("rows-for", 20), ("requests", 40_000), ("seed", 1)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    weights = list(itertools.accumulate(1 / (one + 1) ** given.zipf for one in range(given.adapters)))
    requests = [bisect.bisect(weights, chance.random() * weights[-1]) for _ in range(given.requests)]
    places = [chance.randrange(given.replicas) for _ in requests]
    at_random = [[a for a, at in zip(requests, places, strict=True) if at == one] for one in range(given.replicas)]
    by_adapter = [[a for a in requests if a % given.replicas == one] for one in range(given.replicas)]
    print(f"{'evicted':28}{'at random':>10}{'by adapter':>12}{'hits':>8}{'loads':>8}")
    rules: list[tuple[str, Callable[[Sequence[int], int], int]]] = [
        ("used longest ago", hits_of_least_recent),
        ("will be used last (Belady)", hits_of_foreseen),
    ]
    for name, hits_of in rules:
        chosen, routed = (
            sum(hits_of(one, given.rows_for) for one in streams) / given.requests for streams in (at_random, by_adapter)
        )
        print(f"{name:28}{chosen:10.3f}{routed:12.3f}{routed / chosen:7.2f}x{(1 - routed) / (1 - chosen):7.2f}x")


if __name__ == "__main__":
    main()
