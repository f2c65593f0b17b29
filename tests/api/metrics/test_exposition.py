"""The text of metrics is the library's, whatever names, labels and values are."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from service.api.metrics.exposition import Exposition
from service.api.metrics.metrics import Metrics, SequenceTimer


def test_it_is_what_the_library_writes_each_time() -> None:
    registry, exposition = CollectorRegistry(), Exposition()
    awkward = Counter("awkward", 'Help with "quotes", a \\ and\na line.', ("zeta", "alpha"), registry=registry)
    gauge = Gauge("plain", "No labels.", registry=registry)
    seconds = Histogram("seconds", "Buckets.", ("of",), buckets=(0.5, 1.0, 2e6), registry=registry)
    for value in (0.0, 1.0, 1e-9, 12345678.5, 1e22, math.inf, -math.inf, math.nan):
        awkward.labels('a "b"\\\n', "ü {}=,").inc(0.1)
        awkward.labels("x y", "").inc(3)
        gauge.set(value)
        seconds.labels("one two").observe(abs(value))
        assert exposition.write(registry.collect()) == generate_latest(registry)


def test_series_of_one_name_and_other_labels_are_told_apart() -> None:
    family = GaugeMetricFamily("f", "Help.", labels=("a", "b"))
    for labels in (("x", "y"), ("y", "x"), ("x y", ""), ("", "x y")):
        family.add_metric(labels, 1)
    text = Exposition().write([family]).decode()
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'f{a="x",b="y"} 1.0',
        'f{a="y",b="x"} 1.0',
        'f{a="x y",b=""} 1.0',
        'f{a="",b="x y"} 1.0',
    ]


def test_all_metrics_of_a_server_are_written_so() -> None:
    metrics = Metrics("base")
    metrics.by_adapter.know("a-b.c")
    for outcome in ("stop", "error"):
        SequenceTimer(metrics, "a-b.c", 3).end(outcome)
    metrics.http_requests.labels("GET", "/v1/models", "200").inc()
    shown = generate_latest(metrics.registry)
    for _ in range(2):
        assert metrics.render().startswith(shown)
