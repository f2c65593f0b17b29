"""Prometheus metrics of the server, named `multilora_*`, in a registry of their own, and some by vLLM's names too.

Series with an `adapter` label are those of `service.api.metrics.adapter_metrics`. All others are few, whatever clients
do.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate, chain

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from service.api.metrics.adapter_metrics import AdapterMetrics, TierMetrics
from service.api.metrics.vllm_metrics import with_vllm_names
from service.engine.ipc.messages import EngineStatus, Loads, OpInUse, Stats

# A gauge beside each counter and histogram that says when it began: nobody asks for it, and it is half of all series.
prometheus_client.disable_created_metrics()
# Adapters that a scrape shows, if nothing else is said.
MOST_ADAPTERS_SHOWN = 64
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# These have vLLM's bounds, for its dashboards and alerts, and shorter ones.
_TO_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_REQUEST_TOKENS = tuple(first * 10**power for power in range(6) for first in (1, 2, 5))
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# Gauges that are a field of Stats, and 0 while no engine is there: name, field, help.
_STATS_GAUGES = (
    ("num_requests_waiting", "num_waiting", "Sequences waiting in the engine."),
    ("num_requests_running", "num_running", "Sequences running in the engine."),
    ("kv_blocks_used", "kv_blocks_used", "KV blocks in use."),
    ("kv_blocks_total", "kv_blocks_total", "KV blocks there are."),
    ("prefix_cache_idle_blocks", "prefix_cache_idle_blocks", "Free KV blocks that prompts can begin with."),
    ("prefix_cache_states", "prefix_cache_states", "States that prompts can begin with."),
    ("prefix_cache_host_bytes_used", "prefix_cache_host_bytes_used", "Bytes of the prefix cache in host memory."),
    ("prefix_cache_host_bytes_total", "prefix_cache_host_bytes_total", "Bytes of host memory for the prefix cache."),
    ("state_lines_used", "state_lines_used", "Conv-state lines in use."),
    ("state_lines_total", "state_lines_total", "Conv-state lines there are."),
    ("adapter_rows_used", "rows_used", "Adapter rows in use on the device."),
    ("adapter_rows_total", "rows_total", "Adapter rows there are on the device."),
    ("adapter_row_bytes_used", "row_bytes_used", "Bytes of adapter rows in use on the device."),
    ("adapter_row_bytes_total", "row_bytes_total", "Bytes of adapter rows there are on the device."),
)
# Counters that are a field of Stats and start again at 0 with each engine: name, field, help.
_STATS_COUNTERS = (
    ("engine_steps", "num_steps", "Steps of the engine."),
    ("preemptions", "num_preemptions", "Sequences preempted because KV blocks or state lines ran out."),
    ("prefix_cache_queries", "prefix_cache_queried_tokens", "Prompt tokens that were looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hit_tokens", "Prompt tokens that the prefix cache had."),
    ("prefix_cache_host_hits", "prefix_cache_host_hit_tokens", "Those of them that came from host memory."),
    (
        "prefix_cache_resumed_tokens",
        "prefix_cache_resumed_tokens",
        "Tokens that the prefix cache had when preempted sequences went on.",
    ),
    (
        "prefix_cache_stateless_tokens",
        "prefix_cache_stateless_tokens",
        "Prompt tokens whose blocks the prefix cache had, and no state behind them.",
    ),
    ("prefix_cache_evicted_blocks", "prefix_cache_evicted_blocks", "Blocks that the prefix cache lost to others."),
    ("prefix_cache_evicted_states", "prefix_cache_evicted_states", "States that the prefix cache lost to others."),
    ("adapter_loads", "num_adapter_loads", "Adapters loaded onto the device."),
    ("adapter_evictions", "num_adapter_evictions", "Adapters that left the device."),
    (
        "kernel_variants_compiled",
        "num_kernel_variants",
        "Variants of kernels that were compiled, or read from a cache.",
    ),
    (
        "kernel_variants_compiled_after_ready",
        "num_kernel_variants_after_ready",
        "Those of them that a step waited for, after the start; more than 0 is a fault.",
    ),
    ("lora_op_calls", "num_lora_op_calls", "LoRA ops called; steps without adapters, and replayed ones, call none."),
    ("engine_steps_replayed", "num_steps_replayed", "Steps that were replayed from a captured graph."),
)


class Metrics:
    """The counters of one server."""

    def __init__(self, base_name: str, most_adapters: int = MOST_ADAPTERS_SHOWN) -> None:
        self.registry = CollectorRegistry()
        self.by_adapter = AdapterMetrics(base_name, most_adapters)
        self.block_size_tokens = 0  # of KV, once it is known
        self._base_name = base_name
        # By engine: which life of it, and what that said last.
        self._last: dict[int, tuple[int, Stats]] = {}
        self._ops: tuple[OpInUse, ...] = ()
        self._num_restarts = 0
        self._make_request_metrics()
        self._make_engine_metrics()
        self._make_replica_metrics()
        self._tiers = TierMetrics(self.registry)

    def _make_request_metrics(self) -> None:
        registry = self.registry
        self.http_requests = Counter(
            "multilora_http_requests", "HTTP requests.", ("method", "route", "status"), registry=registry
        )
        self.requests = Counter(
            "multilora_all_requests",
            "Sequences that ended, by how: stop, length, abort or error.",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("stop", "length", "abort", "error"):
            self.requests.labels(outcome)
        self.grammars = Counter(
            "multilora_grammars",
            "Constraints of answers, by what came of them: known, compiled or refused.",
            ("outcome",),
            registry=registry,
        )
        self.prompt_tokens = Counter("multilora_all_prompt_tokens", "Prompt tokens.", registry=registry)
        self.generation_tokens = Counter("multilora_all_generation_tokens", "Tokens generated.", registry=registry)
        self.queue = Gauge("multilora_num_requests_open", "Sequences admitted and not ended.", registry=registry)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From admission to the first token.", _TO_FIRST_TOKEN_SECONDS
        )
        text = "Mean time between the tokens of a sequence after its first."
        self.time_per_output_token = self._histogram("time_per_output_token_seconds", text, _TOKEN_SECONDS)
        text = "Between two tokens of a sequence."
        self.inter_token = _TokenGaps("multilora_inter_token_seconds", text, _TOKEN_SECONDS)
        registry.register(self.inter_token)
        text = "From admission to the last token."
        self.request_seconds = self._histogram("request_seconds", text, _REQUEST_SECONDS)
        text = "From a sequence's arrival in the engine to its first step."
        self.queue_seconds = self._histogram("request_queue_seconds", text, _REQUEST_SECONDS)
        text = "From a sequence's first step to its first token."
        self.prefill_seconds = self._histogram("request_prefill_seconds", text, _REQUEST_SECONDS)
        text = "From a sequence's first token to its last."
        self.decode_seconds = self._histogram("request_decode_seconds", text, _REQUEST_SECONDS)
        text = "From a sequence's first step to its last token."
        self.inference_seconds = self._histogram("request_inference_seconds", text, _REQUEST_SECONDS)
        text = "Prompt tokens of a sequence."
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", text, _REQUEST_TOKENS)
        text = "Tokens generated for a sequence."
        self.request_generation_tokens = self._histogram("request_generation_tokens", text, _REQUEST_TOKENS)

    def _make_engine_metrics(self) -> None:
        self.engine_up = Gauge("multilora_engine_up", "1 while the engine is ready.", registry=self.registry)
        self.engine_restarts = Counter("multilora_engine_restarts", "Engines started again.", registry=self.registry)
        self.steps_eager = Counter(
            "multilora_engine_steps_eager",
            "Steps that were not replayed, and why.",
            ("reason",),
            registry=self.registry,
        )
        self.op_implementation = Gauge(
            "multilora_op_implementation",
            "1 for the implementation that serves an op, beside the one wished for on this kind of device.",
            ("op", "implementation", "wished"),
            registry=self.registry,
        )
        self.adapters = Gauge("multilora_adapters", "Adapters by where they are.", ("tier",), registry=self.registry)
        self.adapters_on_disk = Gauge(
            "multilora_adapters_on_disk",
            "Adapters whose files are on disk, by content, under a name or still in use by a request.",
            registry=self.registry,
        )
        self._gauges = {
            field: Gauge(f"multilora_{name}", text, registry=self.registry) for name, field, text in _STATS_GAUGES
        }
        self._counters = {
            field: Counter(f"multilora_{name}", text, registry=self.registry) for name, field, text in _STATS_COUNTERS
        }
        self.step_tokens = self._histogram("step_tokens", "Tokens of a step.", _COUNTS)
        self.step_sequences = self._histogram("step_sequences", "Sequences of a step: the batch size.", _COUNTS)
        self.step_adapters = self._histogram("step_adapters", "Distinct adapters of a step.", (0, *_COUNTS[:8]))
        self.step_seconds = self._histogram("step_seconds", "Duration of a step.", _SECONDS)

    def _make_replica_metrics(self) -> None:
        registry = self.registry
        # The counts of `show_replicas`, by engine and tier.
        self._sent: dict[tuple[str, str], int] = {}
        self._shown_replicas: set[str] = set()
        self.replica_up = Gauge(
            "multilora_replica_up",
            "1 while this engine takes requests, where there are several.",
            ("replica",),
            registry=registry,
        )
        self.replica_queued_tokens = Gauge(
            "multilora_replica_queued_tokens", "Tokens that an engine has to compute.", ("replica",), registry=registry
        )
        self.replica_requests_open = Gauge(
            "multilora_replica_requests_open", "Sequences an engine waits for or runs.", ("replica",), registry=registry
        )
        self.replica_adapters = Gauge(
            "multilora_replica_adapters", "Adapters that an engine holds.", ("replica", "tier"), registry=registry
        )
        self.replica_requests = Counter(
            "multilora_replica_requests",
            "Sequences with an adapter that were sent to an engine, by where that had the adapter.",
            ("replica", "tier"),
            registry=registry,
        )
        self.sent_again = Counter(
            "multilora_requests_sent_again",
            "Sequences that an engine lost before their first token, and another one got.",
            ("replica",),
            registry=registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"multilora_{name}", text, buckets=buckets, registry=self.registry)

    def take_stats(self, stats: Stats, engine_life: int, engine: int = 0) -> None:
        """Add what is new in `stats` against the last one of the same engine; each life of an engine counts from 0."""
        life, last = self._last.get(engine, (engine_life, None))
        if life != engine_life:
            last = None
        for field, counter in self._counters.items():
            counter.inc(getattr(stats, field) - (getattr(last, field) if last is not None else 0))
        for reason, count in stats.num_steps_eager.items():
            self.steps_eager.labels(reason).inc(
                count - (last.num_steps_eager.get(reason, 0) if last is not None else 0)
            )
        self._tiers.take_stats(stats, last)
        self._last[engine] = engine_life, stats
        for num_tokens, num_sequences, num_adapters, milliseconds in stats.steps:
            self.step_tokens.observe(num_tokens)
            self.step_sequences.observe(num_sequences)
            self.step_adapters.observe(num_adapters)
            self.step_seconds.observe(milliseconds / 1e3)

    def show_engine(self, stats: Stats | None, num_restarts: int) -> None:
        """Show the running engine's figures; None clears them, since a dead engine holds nothing. `num_restarts` is the
        client's count: an engine that never got ready has sent no Stats."""
        for field, gauge in self._gauges.items():
            gauge.set(0 if stats is None else getattr(stats, field))
        self.adapters.labels("device").set(0 if stats is None else stats.num_adapters_on_device)
        self.adapters.labels("host").set(0 if stats is None else stats.num_adapters_on_host)
        self._tiers.show(stats)
        self.engine_restarts.inc(num_restarts - self._num_restarts)
        self._num_restarts = num_restarts

    def show_replicas(self, replicas: Mapping[str, EngineStatus]) -> None:
        """Each engine by its name; nothing where there is one. Of those that have left the counters stay."""
        for name in self._shown_replicas - replicas.keys():
            for gauge in (self.replica_up, self.replica_queued_tokens, self.replica_requests_open):
                gauge.remove(name)
            for tier in ("device", "host"):
                self.replica_adapters.remove(name, tier)
        self._shown_replicas = set(replicas)
        for name, one in replicas.items():
            self.replica_up.labels(name).set(one.state == "ready")
            self.replica_queued_tokens.labels(name).set(one.queued_tokens)
            self.replica_requests_open.labels(name).set(one.num_open)
            for tier, field in (("device", "num_adapters_on_device"), ("host", "num_adapters_on_host")):
                self.replica_adapters.labels(name, tier).set(0 if one.stats is None else getattr(one.stats, field))
            for tier, count in one.num_sent.items():
                known = self._sent.get((name, tier), 0)
                self.replica_requests.labels(name, tier).inc(count - known)
                self._sent[name, tier] = count
            self.sent_again.labels(name).inc(one.num_sent_again - self._sent.get((name, ""), 0))
            self._sent[name, ""] = one.num_sent_again

    def show_ops(self, ops: Iterable[OpInUse]) -> None:
        """These ops and no others; a restarted engine may find another implementation to work."""
        ops = tuple(ops)
        if ops == self._ops:  # what another thread renders is left alone
            return
        self._ops = ops
        self.op_implementation.clear()
        for one in ops:
            self.op_implementation.labels(one.op, one.implementation, one.wished).set(1)

    def render(self, adapters: Collection[str] = ()) -> bytes:
        """The text exposition, with the series of these adapters, or else of the busiest. Any thread."""
        own = with_vllm_names(self.registry.collect(), self._base_name, self.block_size_tokens)
        return generate_latest(_Families(chain(own, self.by_adapter.collect(adapters))))


class _Families(Collector):
    """The metric families of one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """All of them, once."""
        return self._families


class _TokenGaps(Collector):
    """A histogram of every token, which the library's takes 2 µs for. One thread observes, any collects."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """As the library writes a histogram."""
        ends = (*map(floatToGoString, self._bounds), "+Inf")
        buckets = list(zip(ends, accumulate(list(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum_seconds)


class SequenceTimer:
    """Times of one sequence, observed when it ends. `outcome` is how it ended, None while it runs.

    By `time.perf_counter`: `started` at admission, `first` and `last` token, `ended`. `Tokens` has the others.
    """

    def __init__(self, metrics: Metrics, adapter: str, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._adapter = adapter
        self.started = time.perf_counter()
        self.first: float | None = None
        self.last = self.ended = self.started
        self.waited_seconds: float | None = None
        self.loads: Loads = ()
        self.outcome: str | None = None
        self.num_tokens = 0
        metrics.prompt_tokens.inc(num_prompt_tokens)
        metrics.request_prompt_tokens.observe(num_prompt_tokens)
        metrics.by_adapter.began(adapter, num_prompt_tokens)

    @property
    def first_token_seconds(self) -> float | None:
        """From admission to the first token."""
        return None if self.first is None else self.first - self.started

    def token(self, waited_seconds: float | None = None, num_cached: int = 0, loads: Loads = ()) -> None:
        """A token arrived; the rest as `Tokens` has it."""
        before, self.last = self.last, time.perf_counter()
        if self.first is not None:
            self._metrics.inter_token.observe(self.last - before)
        else:
            self.first, self.waited_seconds, self.loads = self.last, waited_seconds or 0.0, loads
            self._metrics.time_to_first_token.observe(self.first - self.started)
            self._metrics.by_adapter.first_token(self._adapter, num_cached)
        self.num_tokens += 1

    def begin_anew(self) -> None:
        """The tokens so far count for nothing: their engine was lost. Their time was spent, and stays."""
        self.num_tokens = 0

    def end(self, outcome: str) -> None:
        """The sequence ended: stop, length, abort or error. Only the first call counts."""
        if self.outcome is not None:
            return
        self.outcome, self.ended = outcome, time.perf_counter()
        metrics = self._metrics
        metrics.requests.labels(outcome).inc()
        metrics.generation_tokens.inc(self.num_tokens)
        metrics.request_generation_tokens.observe(self.num_tokens)
        metrics.by_adapter.ended(self._adapter, outcome, self.num_tokens, had_token=self.first is not None)
        if self.first is not None:
            to_first, to_last = self.first - self.started, self.last - self.first
            waited_seconds = self.waited_seconds or 0.0
            prefill_seconds = max(0.0, to_first - waited_seconds)
            metrics.queue_seconds.observe(waited_seconds)
            metrics.prefill_seconds.observe(prefill_seconds)
            metrics.decode_seconds.observe(to_last)
            metrics.inference_seconds.observe(prefill_seconds + to_last)
        if self.first is not None and self.num_tokens > 1:
            metrics.time_per_output_token.observe((self.last - self.first) / (self.num_tokens - 1))
        metrics.request_seconds.observe(self.last - self.started)
