"""What the engine tells of the tiers, and what /metrics makes of it."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from service.api.metrics.metrics import Metrics
from service.engine.ipc.messages import Evict, Stats
from tests.support.engine.engine_mock import make_mock_engine


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """By name without the common start, and tier."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name.removeprefix("multilora_adapter_"), sample.labels.get("tier", "")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_hits_misses_bytes_and_waits_are_told_by_tier() -> None:
    mock, metrics = make_mock_engine(num_rows=2), Metrics("base")
    mock.host.memory.add("a1")
    for name, adapter in (("host", "a1"), ("device", "a1"), ("disk", "a2"), ("other", "a3")):
        mock.submit(name, adapter=adapter, max_tokens=2)
        mock.settle()
    first = mock.engine.stats()
    metrics.take_stats(first, 0)
    found = samples(metrics)
    assert [found["tier_hits_total", tier] for tier in ("device", "host", "disk")] == [1, 1, 2]
    assert {tier: found["tier_misses_total", tier] for tier in ("device", "host")} == {"device": 3, "host": 2}
    assert found["tier_evictions_total", "device"] == 1
    assert found["load_seconds_count", "device"] == 3
    assert found["load_seconds_count", "host"] == 2
    assert [found["first_token_seconds_count", tier] for tier in ("device", "host", "disk")] == [1, 1, 2]
    assert found["first_token_steps_sum", "device"] == found["first_token_steps_sum", "host"] == 1


def test_stats_tell_what_is_new_and_no_more() -> None:
    """Whatever the number of adapters: what has not moved is not told again."""
    mock, metrics = make_mock_engine(num_rows=20), Metrics("base")
    for i in range(12):
        mock.submit(f"r{i}", adapter=f"a{i}", max_tokens=1)
    mock.settle()
    assert mock.engine.stats().moved_adapters == {f"a{i}": "device" for i in range(12)}
    mock.submit("again", adapter="a3", max_tokens=1)
    mock.settle()
    stats = mock.engine.stats()
    assert (stats.moved_adapters, stats.adapter_load_seconds, len(stats.first_tokens)) == ({}, (), 1)
    mock.engine.handle(Evict("a4"))
    assert mock.engine.stats().moved_adapters == {"a4": "disk"}
    metrics.take_stats(stats, 0)
    metrics.take_stats(stats, 0)
    assert samples(metrics)["tier_hits_total", "device"] == 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=Stats) == stats
