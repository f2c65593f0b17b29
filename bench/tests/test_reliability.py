"""What the five's times beside the hostile client are told of."""

from __future__ import annotations

import pytest

from bench.http.reliability import SEVERAL, beside_each
from bench.http.reliability_traffic import Seen


def test_a_request_counts_for_what_it_lies_wholly_inside_of() -> None:
    alone = Seen()
    alone.seconds["chat"] = [1.0] * 10
    hostile = Seen(spans=[("idle", 0.0, 10.0), ("flood", 10.0, 30.0), ("idle", 40.0, 50.0)])
    waits_of_the_flood = [("chat", 9.0, 29.0)] * 2  # begun beside idle connections
    beside = [*waits_of_the_flood, *[("chat", 1.0, 2.0), ("chat", 40.0, 43.0)], *[("chat", 11.0, 16.0)] * 3]
    rows = beside_each({"alone": alone, "beside": Seen(spans=beside)}, hostile)
    assert [row[:2] for row in rows] == [(SEVERAL, 2), ("flood", 3), ("idle", 2)]
    assert [row[2] for row in rows] == pytest.approx([20.0, 5.0, 2.0])
    assert [row[3] for row in rows] == pytest.approx([20.0, 5.0, 2.98])
    assert sum(row[1] for row in rows) == len(beside), "each of them once"


def test_waits_where_nothing_was_done_are_told_too() -> None:
    alone = Seen()
    alone.seconds["chat"] = [2.0] * 10
    beside = Seen(spans=[("chat", 0.0, 8.0)] * 2)
    rows = beside_each({"alone": alone, "beside": beside}, Seen(spans=[("idle", 2.0, 3.0)]))
    assert rows == [(SEVERAL, 2, 4.0, 4.0)]
