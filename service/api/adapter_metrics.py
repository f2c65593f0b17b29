"""Counts per adapter: kept for all that were used, shown for the busiest and for those that are asked for.

Thousands of adapters would make an exposition of megabytes that every scrape pays for; the totals of all are metrics of
their own (`service.api.metrics`), so nothing is missed in sums.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

# Series of adapters that are called "deleted:", which no adapter can be.
DELETED = "deleted:"
# Names in each list of `vllm:lora_requests_info`: it is one line, and routers look for few.
_MOST_LISTED = 100


class VersionOf(NamedTuple):
    """What a name stands for, for the metric that tells it."""

    number: int
    digest: str


class _Counts(msgspec.Struct, gc=False):
    """Of one adapter: tokens, and sequences by how they ended. `gc=False`: see `adapters.records`."""

    prompt_tokens: int = 0
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
    """

    def __init__(self, base_name: str, most_shown: int) -> None:
        self._base_name = base_name
        self._most_shown = most_shown
        self._known = {base_name}
        self._counts: dict[str, _Counts] = {}
        self._waiting: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self.version_of: Callable[[str], VersionOf | None] = lambda _: None
        self.max_adapters = 0

    # ---- which names have series

    def know(self, name: str) -> None:
        """The adapter is in the store, so it may have series."""
        self._known.add(name)

    def label_of(self, name: str) -> str:
        """The `adapter` label for the base or an adapter."""
        return name if name in self._known else DELETED

    def forget(self, name: str) -> None:
        """Drop the series of a deleted adapter."""
        self._known.discard(name)
        self._counts.pop(name, None)

    # ---- what is counted

    def began(self, name: str, num_prompt_tokens: int) -> None:
        """A sequence was submitted."""
        self._of(name).prompt_tokens += num_prompt_tokens
        self._waiting[name] += 1

    def first_token(self, name: str) -> None:
        """The first token of a sequence has come."""
        _take(self._waiting, name)
        self._running[name] += 1

    def ended(self, name: str, outcome: str, num_tokens: int, *, had_token: bool) -> None:
        """A sequence has ended."""
        counts = self._of(name)
        setattr(counts, outcome, getattr(counts, outcome) + 1)
        counts.generation_tokens += num_tokens
        _take(self._running if had_token else self._waiting, name)

    def _of(self, name: str) -> _Counts:
        return self._counts.setdefault(self.label_of(name), _Counts())

    # ---- what is shown

    def collect(self, wanted: Collection[str] = ()) -> Iterator[Metric]:
        """The series of the base and of `wanted`, or else of the busiest."""
        counts = dict(self._counts)
        shown = [name for name in dict.fromkeys(wanted) if name in self._known] if wanted else self._busiest(counts)
        if self._base_name not in shown:
            shown.append(self._base_name)
        ended = CounterMetricFamily(
            "multilora_requests",
            "Sequences that ended, by adapter and how: stop, length, abort or error. Of the busiest adapters, or of "
            "those that ?adapter= asks for; multilora_all_requests has all.",
            labels=("adapter", "outcome"),
        )
        prompt = CounterMetricFamily("multilora_prompt_tokens", "Prompt tokens, likewise.", labels=("adapter",))
        generated = CounterMetricFamily(
            "multilora_generation_tokens", "Tokens generated, likewise.", labels=("adapter",)
        )
        info = GaugeMetricFamily(
            "multilora_adapter_info",
            "1 for the version that a name stands for.",
            labels=("adapter", "version", "digest"),
        )
        for name in shown:
            one = counts.get(name, _Counts())
            for outcome, count in one.ended():
                ended.add_metric((name, outcome), count)
            prompt.add_metric((name,), one.prompt_tokens)
            generated.add_metric((name,), one.generation_tokens)
            if (version := self.version_of(name)) is not None:
                info.add_metric((name, str(version.number), version.digest[:12]), 1)
        yield from (ended, prompt, generated, info, self._requests_info())

    def _busiest(self, counts: dict[str, _Counts]) -> list[str]:
        return heapq.nlargest(self._most_shown, counts, key=lambda name: (counts[name].tokens(), name))

    def _requests_info(self) -> Metric:
        """vLLM's, for routers that send a request where its adapter is: the value is the time."""
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            f"Adapters of running and waiting sequences, at most {_MOST_LISTED} of each, the busiest first.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        lists = (self._listed(self._running), self._listed(self._waiting))
        info.add_metric((str(self.max_adapters), *lists), time.time())
        return info

    def _listed(self, sequences: Counter[str]) -> str:
        names = (name for name, _ in Counter(dict(sequences)).most_common(_MOST_LISTED + 1) if name != self._base_name)
        return ",".join(list(names)[:_MOST_LISTED])


def _take(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
