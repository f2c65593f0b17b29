"""Adapters that run stand in the rows of the shortest window that holds them; see
`service.engine.step.launcher`.
"""

from __future__ import annotations

import pytest

from adapters.memory.row_pool import RowPool
from kernels.lora_window.ops import window_for
from service.engine.step.launcher import MAX_ADAPTERS_A_STEP, RowCompaction
from tests.adapters.memory.test_row_pool import budget_for, churn_layout, make_host_adapter

LAYOUT = churn_layout()


def full_pool(num_adapters: int) -> RowPool:
    """With d0, d1, ... of 16 rows each, from the first row to the last."""
    pool = RowPool(LAYOUT, budget_for(LAYOUT, 16 * num_adapters, 16))
    for index in range(num_adapters):
        assert pool.load(f"d{index}", make_host_adapter(LAYOUT, f"d{index}", {"q": 16}))
    return pool


def run(pool: RowPool, compaction: RowCompaction, *indices: int, num_tokens: int = 8) -> int | None:
    """Of the window that a step with these, which are pinned for it, has in the end."""
    adapters = frozenset(f"d{index}" for index in indices)
    for digest in adapters:
        pool.pin(digest)
    window = step(pool, compaction, adapters, num_tokens)
    for digest in adapters:
        pool.unpin(digest)
    return window


def step(pool: RowPool, compaction: RowCompaction, adapters: frozenset[str], num_tokens: int = 8) -> int | None:
    compaction.bring(adapters, num_tokens)
    pool.check_integrity()
    return window_for(pool.rows_end(adapters), num_tokens)


def test_the_window_is_as_short_as_it_can_be_wherever_adapters_came() -> None:
    pool = full_pool(80)
    compaction = RowCompaction(pool)
    assert window_for(pool.rows_end(["d79"]), 8) is None, "past the longest window"
    assert run(pool, compaction, 79) == 16
    assert run(pool, compaction, 79, 70, 60) == 64
    assert run(pool, compaction, 70) == 16
    assert pool.usage().num_evictions == 0


def test_a_burst_of_newcomers_is_spread_over_steps() -> None:
    pool = full_pool(80)
    compaction = RowCompaction(pool)
    newcomers = frozenset(f"d{index}" for index in range(80 - 2 * MAX_ADAPTERS_A_STEP - 1, 80))
    for digest in newcomers:
        pool.pin(digest)
    assert [step(pool, compaction, newcomers, 32) for _ in range(3)] == [None, None, 256]


def test_a_step_that_is_better_off_without_a_window_moves_nobody() -> None:
    pool = full_pool(80)
    compaction = RowCompaction(pool)
    run(pool, compaction, 79, num_tokens=512)
    assert pool.usage().num_moves == 0


def test_nothing_is_looked_for_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the adapters of the last one costs a comparison, until somebody in the way is pinned no more."""
    pool = full_pool(80)
    compaction = RowCompaction(pool)
    for index in range(80):
        pool.pin(f"d{index}")
    adapters = frozenset({"d79"})
    assert step(pool, compaction, adapters) is None
    with monkeypatch.context() as patch:
        patch.setattr(RowPool, "rows_needed", None)
        assert step(pool, compaction, adapters) is None
    pool.unpin("d40")
    assert step(pool, compaction, adapters) is None, "not low enough: nothing below row 16 is free"
    pool.unpin("d0")
    assert step(pool, compaction, adapters) == 16
