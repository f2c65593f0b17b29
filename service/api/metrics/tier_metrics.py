"""How adapters come from disk to host memory and to the device, as the engine tells it: metrics by tier."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.engine.ipc.messages import Stats, Tier

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
