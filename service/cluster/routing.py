"""Which replica a request goes to: pure functions over what replicas have reported; and an engine as the server sees
it: the requests it was sent, and whether it answers.

An adapter has homes: the first `num_homes` replicas in an order that follows from its digest and the replicas' names
alone (rendezvous hashing, Thaler and Ravishankar 1998: a replica that leaves moves the adapters it was a home of and no
other, one that joins takes only its own). Loads are bounded as in "Consistent Hashing with Bounded Loads" (Mirrokni,
Thorup and Zadimoghaddam 2018): none gets a request that would lift it above `bound` times the mean. Among those that
may have it, the one that would begin soonest gets it, where a missing adapter costs what the replica could have
computed while it reads it, and a known beginning of the prompt saves what the replica need not compute. Everything is
counted in tokens.

What replicas know of prompts is what was sent to them from here, last used last: nothing after a restart of either.
Beginnings are digests, in which the tenant and `cache_salt` come first and the adapter where it begins, as the prefix
cache finds them; a wrong guess costs time and no more. Cost: 0.3 ms for 8,192 tokens, and 200 bytes for each 64 tokens
of a replica's KV cache.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

from service.engine.ipc.link import EngineLink
from service.engine.ipc.messages import EngineStatus, Ready, Tier

# Adapters whose order is remembered: an order is as long as there are replicas.
_ORDERS_KEPT = 16_384
# Prompts are compared in parts of so many tokens; so many parts of a replica are known at most.
PART_TOKENS = 64
_MOST_PARTS = 65_536


@dataclass(frozen=True, slots=True)
class Replica:
    """The load and adapters of a replica that takes requests.

    queued_tokens  prompt and output still to be computed: its last report, and what was sent to it since
    free_rows      of the device's adapter rows, neither held by an adapter that runs nor by one that is idle
    tiers          where it holds adapters, by digest; those that are not named are on disk
    found_tokens   of the request's prompt, which it is likely to find in its prefix cache
    """

    name: str
    queued_tokens: float = 0.0
    free_rows: int = 0
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    found_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """How replicas are weighed.

    bound          most load of a replica, as a multiple of the mean
    host_tokens    what a replica computes while it copies an adapter from host memory to the device
    disk_tokens    likewise, while it reads it from disk and copies it
    evict_tokens   likewise, in expectation, while an evicted adapter is brought back later
    slack_tokens   above the mean that always counts as within the bound: with few requests any mean is small
    home_share     part of a replica's mean load that an adapter has to be to fill one home
    found_weight   queued tokens for which a found token makes up: output that is queued is computed beside others', and
                   what is computed anew takes another prompt's place in the cache
    """

    bound: float = 1.25
    host_tokens: float = 64.0
    disk_tokens: float = 1024.0
    evict_tokens: float = 256.0
    slack_tokens: float = 1024.0
    home_share: float = 0.5
    found_weight: float = 16.0


DEFAULT_RULE = Rule()


def choose(
    digest: str | None,
    num_rows: int,
    num_tokens: float,
    replicas: Sequence[Replica],
    *,
    key: str = "",
    num_homes: int = 1,
    rule: Rule = DEFAULT_RULE,
) -> list[str]:
    """All replicas by name, the one that shall have the request first, then those to try if it cannot.

    digest      of the adapter, None for the base
    num_rows    rows that the adapter takes on the device
    num_tokens  prompt and output of the request, as far as it is known
    key         of the request: breaks ties, so that several that choose at once do not all choose the same
    num_homes   of the adapter, see `homes_wanted`
    """
    if not replicas:
        return []
    limit_tokens = load_limit(replicas, num_tokens, rule)
    if digest is None:

        def rank_of_base(one: Replica) -> tuple[bool, float, int]:
            is_above = one.queued_tokens + num_tokens - one.found_tokens > limit_tokens
            waits_tokens = one.queued_tokens - (0 if is_above else rule.found_weight * one.found_tokens)
            return is_above, waits_tokens, _score(key, one.name)

        return [one.name for one in sorted(replicas, key=rank_of_base)]
    names = tuple(sorted(one.name for one in replicas))
    places = {name: place for place, name in enumerate(preference(digest, names))}

    def rank(one: Replica) -> tuple[int, float, int]:
        place = places[one.name]
        waits_tokens = one.queued_tokens + _load_tokens(one, digest, num_rows, rule)
        waits_tokens -= rule.found_weight * one.found_tokens
        if one.queued_tokens + num_tokens - one.found_tokens > limit_tokens:
            return 3, one.queued_tokens, place
        if place < num_homes or (one.found_tokens and one.tiers.get(digest) == "device"):
            return 0, waits_tokens, place
        # Elsewhere: where it happens to be already, else the next in the adapter's own order, so that several overflows
        # meet on one replica.
        return (1, waits_tokens, place) if one.tiers.get(digest) == "device" else (2, place, place)

    return [one.name for one in sorted(replicas, key=rank)]


def load_limit(replicas: Sequence[Replica], num_tokens: float, rule: Rule = DEFAULT_RULE) -> float:
    """Most tokens that a replica may have once this request is on one of them. The least loaded is always below it."""
    mean_tokens = (sum(one.queued_tokens for one in replicas) + num_tokens) / len(replicas)
    return rule.bound * mean_tokens + max(rule.slack_tokens, num_tokens)


def homes_wanted(before: int, share: float, num_replicas: int, rule: Rule = DEFAULT_RULE) -> int:
    """How many homes an adapter gets that makes up `share` of all tokens asked for lately, 0 to 1, and had `before`.

    One more as soon as it fills those it has; one less only when it would fill no more than half of the last of those
    that stay, so that a demand around a limit moves nothing.
    """
    wanted = share * num_replicas / rule.home_share
    most = max(1, num_replicas)
    before = min(max(before, 1), most)
    if wanted > before:
        return min(math.ceil(wanted), most)
    return max(1, min(before, math.ceil(wanted + 0.5)))


@lru_cache(_ORDERS_KEPT)
def preference(digest: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The replicas in the adapter's own order; of any two, which comes first follows from these two alone."""
    return tuple(sorted(names, key=lambda name: (_score(digest, name), name), reverse=True))


def _score(digest: str, name: str) -> int:
    return int.from_bytes(blake2b(f"{digest}\0{name}".encode(), digest_size=8).digest(), "big")


def _load_tokens(one: Replica, digest: str, num_rows: int, rule: Rule) -> float:
    """The cost, in tokens, for the replica to bring the adapter to its device."""
    tier = one.tiers.get(digest, "disk")
    if tier == "device":
        return 0.0
    load_tokens = rule.host_tokens if tier == "host" else rule.disk_tokens
    return load_tokens + (rule.evict_tokens if one.free_rows < num_rows else 0.0)


def beginnings(
    token_ids: Sequence[int], scope: tuple[str, str], adapter: str | None = None, adapter_start: int = 0
) -> list[bytes]:
    """Digests of a prompt's beginnings of one part, two parts and so on, as far as it has whole ones.

    scope  tenant and `cache_salt`; other scopes have other digests
    """
    hashed = blake2b(repr(scope).encode(), digest_size=8)
    tokens = array("i", token_ids)
    digests = []
    for end in range(PART_TOKENS, len(tokens) + 1, PART_TOKENS):
        start = end - PART_TOKENS
        tag = b"" if adapter is None or end <= adapter_start else f"{max(adapter_start - start, 0)} {adapter}".encode()
        hashed.update(len(tag).to_bytes(4, "little") + tag + tokens[start:end].tobytes())
        digests.append(hashed.digest())
    return digests


class Prefixes:
    """Beginnings of prompts that a replica is likely to have, the last used ones. One thread."""

    def __init__(self) -> None:
        self._parts: OrderedDict[bytes, None] = OrderedDict()

    def num_tokens(self, digests: Sequence[bytes]) -> int:
        """Tokens of a prompt with these beginnings that are likely to be found."""
        num = next((number for number, digest in enumerate(digests) if digest not in self._parts), len(digests))
        return num * PART_TOKENS

    def note(self, digests: Sequence[bytes], most_tokens: int) -> None:
        """A prompt was sent there; of the parts that `most_tokens` have no room for, those used longest ago are
        forgotten, ends of prompts first."""
        for digest in reversed(digests):
            self._parts[digest] = None
            self._parts.move_to_end(digest)
        while len(self._parts) > min(most_tokens // PART_TOKENS, _MOST_PARTS):
            self._parts.popitem(last=False)

    def clear(self) -> None:
        """Its cache is empty."""
        self._parts.clear()


class Demand:
    """Tokens asked for by adapter and in all, of the last minute or so: older ones count by half each `half_seconds`.

    Kept for adapters that are asked for; one that is forgotten has less than a token left. One thread.
    """

    def __init__(self, half_seconds: float = 30.0) -> None:
        self._half_seconds = half_seconds
        # By digest: tokens, when that was right, homes.
        self._asked: dict[str, tuple[float, float, int]] = {}
        self._all = (0.0, 0.0)

    def ask(self, digest: str | None, num_tokens: float, num_replicas: int, now_seconds: float, rule: Rule) -> int:
        """Count a request; how many homes its adapter has from now on (1 for the base, which needs none)."""
        self._all = (self._left(*self._all, now_seconds) + num_tokens, now_seconds)
        if digest is None:
            return 1
        tokens, since_seconds, homes = self._asked.get(digest, (0.0, now_seconds, 1))
        tokens = self._left(tokens, since_seconds, now_seconds) + num_tokens
        # Among a few requests each is a large share of all tokens, which says nothing; one home is enough.
        is_busy = self._all[0] >= 16 * num_tokens
        homes = homes_wanted(homes, tokens / self._all[0], num_replicas, rule) if is_busy else 1
        self._asked[digest] = (tokens, now_seconds, homes)
        if len(self._asked) > 2 * _ORDERS_KEPT:
            self._forget(now_seconds)
        return homes

    def _left(self, tokens: float, since_seconds: float, now_seconds: float) -> float:
        return float(tokens * 0.5 ** ((now_seconds - since_seconds) / self._half_seconds))

    def _forget(self, now_seconds: float) -> None:
        by_tokens = sorted(self._asked.items(), key=lambda one: self._left(one[1][0], one[1][1], now_seconds))
        self._asked = dict(by_tokens[_ORDERS_KEPT:])


# An engine that has sent nothing for so long is pinged, again and again; it answers between two steps.
PING_SECONDS = 1.0
# After so many pings it gets no new requests, and those that wait for their first token go elsewhere. Pings and not
# seconds, since this process may have stood still itself.
PINGS_UNTIL_SILENT = 6
# After so many it is killed, and started again: far more than the longest step of a machine that works.
PINGS_UNTIL_HUNG = 120


@dataclass(eq=False)
class ReplicaHealth:
    """An engine.

    open                  ids of requests that were sent to it and are not over
    num_pings_unanswered  pings since its last message
    pinged_seconds        time of the last ping, by time.monotonic()
    prefixes              of prompts that it has; use `num_found` and `note_prompt`, since a new process has none
    """

    name: str
    client: EngineLink
    open: set[str] = field(default_factory=set)
    queued_tokens: int = 0
    num_sent: Counter[Tier] = field(default_factory=Counter)
    num_sent_again: int = 0
    num_pings_unanswered: int = 0
    pinged_seconds: float = 0.0
    prefixes: Prefixes = field(default_factory=Prefixes)
    _prefixes_of: Ready | None = None

    @property
    def answers(self) -> bool:
        """Whether it is ready, and not silent."""
        return self.client.state == "ready" and self.num_pings_unanswered < PINGS_UNTIL_SILENT

    @property
    def takes_requests(self) -> bool:
        return self.answers and self.client.cordoned is None

    def ping_if_silent(self) -> None:
        """Count unanswered pings; send one more if the engine has sent nothing for PING_SECONDS."""
        now_seconds, heard_seconds = time.monotonic(), self.client.heard_seconds
        if self.client.state != "ready" or heard_seconds >= self.pinged_seconds:
            self.num_pings_unanswered = 0
        if self.client.state == "ready" and now_seconds - heard_seconds >= PING_SECONDS:
            self.client.ping()
            self.num_pings_unanswered, self.pinged_seconds = self.num_pings_unanswered + 1, now_seconds

    def num_found(self, beginnings: Sequence[bytes]) -> int:
        """Tokens of a prompt with these beginnings that it is likely to find."""
        return self.prefixes.num_tokens(beginnings) if self.client.ready is self._prefixes_of else 0

    def note_prompt(self, beginnings: Sequence[bytes]) -> None:
        """It is sent such a prompt."""
        ready = self.client.ready
        if ready is not self._prefixes_of:
            self.prefixes.clear()
            self._prefixes_of = ready
        if ready is not None and ready.keeps_prefixes:
            self.prefixes.note(beginnings, ready.kv_capacity_tokens)

    def as_replica(self, beginnings: Sequence[bytes]) -> Replica:
        """The load, tiers and prefixes that `service.cluster.routing` chooses by."""
        stats = self.client.stats
        free_rows = 0 if stats is None else stats.rows_total - stats.rows_used
        return Replica(self.name, self.queued_tokens, free_rows, self.client.tiers, self.num_found(beginnings))

    def status(self) -> EngineStatus:
        """The status for /health, /metrics and the page."""
        state: str = self.client.state
        if state == "ready":
            state = (self.client.cordoned or state) if self.answers else "silent"
        return EngineStatus(
            state,
            self.client.state_error,
            self.queued_tokens,
            len(self.open),
            dict(self.num_sent),
            self.num_sent_again,
            self.client.stats,
        )
