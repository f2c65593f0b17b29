"""Counts per adapter: kept for all that were used, shown for the busiest and for those that are asked for.

Thousands of adapters would make an exposition of megabytes that every scrape pays for; the totals of all are metrics of
their own (`service.api.metrics.metrics`), so nothing is missed in sums.

Metrics by tier say how adapters come from disk to host memory and to the device, as the engine tells it.
"""

from __future__ import annotations

import collections
import heapq
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from adapters.files.paths import OWNERLESS, without_root
from service.engine.ipc.messages import Stats, Tier

# Series of adapters that are called "deleted:", which no adapter can be.
DELETED = "deleted:"
# And those of sums of adapters, of which there may be any number.
SUMS = "sums:"
# Names in each list of `vllm:lora_requests_info`: it is one line, and routers look for few. As many adapters of the
# device and of host memory are told one by one.
MOST_LISTED = 100
# And characters of the names of each: 80 for one, where a name and its tenant's may have 193.
_MOST_CHARACTERS = 80 * MOST_LISTED
# vLLM's names of the tiers.
_LEVELS: dict[Tier, str] = {"device": "gpu", "host": "cpu"}


class VersionOf(NamedTuple):
    """A name's current version, for the metric that shows it."""

    number: int
    digest: str


class Resident(NamedTuple):
    """An adapter that is ready to run, or nearly."""

    name: str
    tier: Tier
    rank: int
    is_pinned: bool


class _Counts(msgspec.Struct, gc=False):
    """Counts of one adapter: tokens, and sequences by how they ended. `gc=False`: see `adapters.files.manifest`.

    cached_tokens  those of prompts that the prefix cache had
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    abort: int = 0
    error: int = 0
    length: int = 0
    stop: int = 0

    def ended(self) -> Iterator[tuple[str, int]]:
        """(how, count), by name."""
        counts = ((outcome, getattr(self, outcome)) for outcome in ("abort", "error", "length", "stop"))
        return ((outcome, count) for outcome, count in counts if count)

    def tokens(self) -> int:
        return self.prompt_tokens + self.generation_tokens


class AdapterMetrics:
    """Counted in the event loop, collected in any thread.

    most_shown  adapters that a scrape shows where it does not ask for some
    version_of  what a name stands for now, None for one that is gone
    residents   adapters on the device, then those in host memory, by name, some of each; and how many are on the device
    """

    def __init__(self, base_name: str, most_shown: int) -> None:
        self._base_name = base_name
        self._most_shown = most_shown
        self._known = {base_name, SUMS}
        self._counts: dict[str, _Counts] = {}
        self._waiting: collections.Counter[str] = collections.Counter()
        self._running: collections.Counter[str] = collections.Counter()
        self.version_of: Callable[[str], VersionOf | None] = lambda _: None
        self.residents: Callable[[], tuple[list[Resident], int]] = lambda: ([], 0)
        self.max_adapters = 0

    # ---- which names have series

    def know(self, name: str) -> None:
        """The adapter is in the store, so it may have series."""
        self._known.add(name)

    def label_of(self, name: str) -> str:
        """The `adapter` label for the base or an adapter, as the store calls it."""
        return self._shown(name) if name in self._known else DELETED

    def _shown(self, name: str) -> str:
        label = without_root(name)
        # The name of a tenant's adapter may be the same.
        return label if label == name or label not in self._known else f"{OWNERLESS}{name}"

    def _names_of(self, labels: Collection[str]) -> list[str]:
        """The names that have these labels, of those that there are."""
        named = ((label, f"/{label}", label.removeprefix(OWNERLESS)) for label in dict.fromkeys(labels))
        return [name for names in named if (name := next((one for one in names if one in self._known), None))]

    def forget(self, name: str) -> None:
        """Drop the series of a deleted adapter."""
        self._known.discard(name)
        self._counts.pop(name, None)

    # ---- what is counted

    def began(self, name: str, num_prompt_tokens: int) -> None:
        """A sequence was submitted."""
        self._of(name).prompt_tokens += num_prompt_tokens
        self._waiting[name] += 1

    def first_token(self, name: str, num_cached: int) -> None:
        """The first token of a sequence has come, and the prefix cache had so many of its prompt's."""
        self._of(name).cached_tokens += num_cached
        _take(self._waiting, name)
        self._running[name] += 1

    def ended(self, name: str, outcome: str, num_tokens: int, *, had_token: bool) -> None:
        """A sequence has ended."""
        counts = self._of(name)
        setattr(counts, outcome, getattr(counts, outcome) + 1)
        counts.generation_tokens += num_tokens
        _take(self._running if had_token else self._waiting, name)

    def _of(self, name: str) -> _Counts:
        return self._counts.setdefault(name if name in self._known else DELETED, _Counts())

    # ---- what is shown

    def collect(self, wanted: Collection[str] = ()) -> Iterator[Metric]:
        """The series of the base and of `wanted`, or else of the busiest."""
        counts = dict(self._counts)
        shown = self._names_of(wanted) if wanted else self._busiest(counts)
        if self._base_name not in shown:
            shown.append(self._base_name)
        ended = CounterMetricFamily(
            "multilora_requests",
            "Sequences that ended, by adapter and how: stop, length, abort or error. Of the busiest adapters, or of "
            "those that ?adapter= asks for; multilora_all_requests has all.",
            labels=("adapter", "outcome"),
        )
        prompt = CounterMetricFamily("multilora_prompt_tokens", "Prompt tokens, likewise.", labels=("adapter",))
        cached = CounterMetricFamily(
            "multilora_cached_prompt_tokens", "Prompt tokens that the prefix cache had, likewise.", labels=("adapter",)
        )
        generated = CounterMetricFamily(
            "multilora_generation_tokens", "Tokens generated, likewise.", labels=("adapter",)
        )
        info = GaugeMetricFamily(
            "multilora_adapter_info",
            "1 for the version that a name stands for.",
            labels=("adapter", "version", "digest"),
        )
        for name in shown:
            one, label = counts.get(name, _Counts()), self.label_of(name)
            for outcome, count in one.ended():
                ended.add_metric((label, outcome), count)
            prompt.add_metric((label,), one.prompt_tokens)
            cached.add_metric((label,), one.cached_tokens)
            generated.add_metric((label,), one.generation_tokens)
            if (version := self.version_of(name)) is not None:
                info.add_metric((label, str(version.number), version.digest[:12]), 1)
        yield from (ended, prompt, cached, generated, info, *self._for_routers())

    def _busiest(self, counts: dict[str, _Counts]) -> list[str]:
        return heapq.nlargest(self._most_shown, counts, key=lambda name: (counts[name].tokens(), name))

    def _for_routers(self) -> Iterator[Metric]:
        """vLLM's, by which routers send a request where its adapter is. Those that go by adapters of running sequences
        are told of all on the device: that is what they want to know."""
        residents, num_on_device = self.residents()
        on_device = [self._shown(one.name) for one in residents if one.tier == "device"]
        requests = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "The time, with adapters of running sequences, the busiest first, and others on the device; and with those "
            f"of waiting sequences; at most {MOST_LISTED} of each, with {_MOST_CHARACTERS} characters together.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        lists = (self._listed(self._running, on_device), self._listed(self._waiting))
        requests.add_metric((str(self.max_adapters), *lists), time.time())
        loaded = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            f"1 for an adapter on the device or in host memory; at most {MOST_LISTED} of each, likewise.",
            labels=("adapter_name", "level", "pinned", "rank"),
        )
        for tier, level in _LEVELS.items():
            there = {self._shown(one.name): one for one in residents if one.tier == tier}
            for label in list(there)[: _num_listed(list(there))]:
                one = there[label]
                loaded.add_metric((label, level, str(one.is_pinned).lower(), str(one.rank)), 1)
        counts = (
            ("num_gpu_loaded_lora_adapters", "Adapters on the device.", num_on_device),
            ("max_gpu_lora_adapters", "As many adapters of rank 16 fit on the device.", self.max_adapters),
        )
        yield from (requests, loaded, *(GaugeMetricFamily(f"vllm:{name}", what, n) for name, what, n in counts))

    def _listed(self, sequences: collections.Counter[str], more: Collection[str] = ()) -> str:
        others = (self._base_name, SUMS)
        names = [
            name for name, _ in collections.Counter(dict(sequences)).most_common(MOST_LISTED + 2) if name not in others
        ]
        names = list(dict.fromkeys((*map(self._shown, names), *more)))
        return ",".join(names[: _num_listed(names)])


def _num_listed(names: Sequence[str]) -> int:
    """How many of the first of them are told."""
    ends = accumulate(map(len, names[:MOST_LISTED]))
    return sum(end <= _MOST_CHARACTERS for end in ends)


def _take(counter: collections.Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]


_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_STEPS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)


class TierMetrics:
    """See the module's docstring. The label `tier` is device, host or disk."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._hits = self._counter(registry, "hits", "Requests for an adapter that found it there when they came.")
        self._misses = self._counter(registry, "misses", "Requests for an adapter that did not, and looked further.")
        self._evictions = self._counter(registry, "evictions", "Adapters that left, for others.")
        self._loaded = self._counter(registry, "loaded_bytes", "Bytes of adapters that were brought there.")
        self._bytes = Gauge("multilora_adapter_tier_bytes", "Bytes of adapters there.", ("tier",), registry=registry)
        self._load_seconds = self._histogram(
            registry, "load_seconds", "To bring an adapter there from the tier below.", _SECONDS
        )
        self._first_seconds = self._histogram(
            registry,
            "first_token_seconds",
            "From a request's arrival in the engine to its first token, by where its adapter was when it came.",
            _SECONDS,
        )
        self._first_steps = self._histogram(
            registry, "first_token_steps", "The same in steps of the engine; 1 is the next one.", _STEPS
        )

    def _counter(self, registry: CollectorRegistry, name: str, text: str) -> Counter:
        return Counter(f"multilora_adapter_tier_{name}", text, ("tier",), registry=registry)

    def _histogram(self, registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"multilora_adapter_{name}", text, ("tier",), buckets=buckets, registry=registry)

    def take_stats(self, stats: Stats, last: Stats | None) -> None:
        """Add what is new against the last Stats of the same engine."""
        for tier, count in _new(stats.num_adapter_requests, last.num_adapter_requests if last else {}).items():
            self._hits.labels(tier).inc(count)
            if tier != "device":
                self._misses.labels("device").inc(count)
            if tier == "disk":
                self._misses.labels("host").inc(count)
        for tier, count in _new(stats.num_tier_evictions, last.num_tier_evictions if last else {}).items():
            self._evictions.labels(tier).inc(count)
        for tier, count in _new(stats.loaded_bytes, last.loaded_bytes if last else {}).items():
            self._loaded.labels(tier).inc(count)
        for tier, seconds in stats.adapter_load_seconds:
            self._load_seconds.labels(tier).observe(seconds)
        for tier, num_steps, seconds in stats.first_tokens:
            self._first_seconds.labels(tier).observe(seconds)
            self._first_steps.labels(tier).observe(num_steps)

    def show(self, stats: Stats | None) -> None:
        """Show the bytes that the running engine holds in each tier; 0 without one."""
        self._bytes.labels("device").set(0 if stats is None else stats.row_bytes_used)
        self._bytes.labels("host").set(0 if stats is None else stats.host_bytes_used)


def _new(now: dict[Tier, int], before: dict[Tier, int]) -> dict[Tier, int]:
    return {key: count - before.get(key, 0) for key, count in now.items()}
