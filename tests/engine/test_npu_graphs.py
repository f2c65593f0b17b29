"""NPU graphs on streams that run late and in any order: each replay works with its own step's lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.engine.npu_graphs import NpuGraph, NpuGraphs
from tests.support.made_up_npu import ORDERS, run_steps


@pytest.mark.parametrize("order", ORDERS)
def test_each_replay_works_with_the_lengths_of_its_step(order: str) -> None:
    steps, results = run_steps(ORDERS[order])
    assert results == steps


def no_wait_for_the_replay_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NpuGraphs, "note_replay", lambda _self: None)


def an_event_before_the_replay(patch: pytest.MonkeyPatch) -> None:
    def replay(self: Any) -> None:
        self._graphs.note_replay()
        self._graph.replay()

    patch.setattr(NpuGraph, "replay", replay)


def an_event_of_this_graph_s_own_replays_alone(patch: pytest.MonkeyPatch) -> None:
    """Which overtakes nothing: that test below shows that not every change is called a fault."""
    update = NpuGraph.update

    def own(self: Any, batch: Any) -> None:
        shared, self._graphs.replayed = self._graphs.replayed, getattr(self, "own", None)
        update(self, batch)
        self._graphs.replayed = shared

    def replay(self: Any) -> None:
        self._graph.replay()
        self._graphs.note_replay()
        self.own = self._graphs.replayed

    patch.setattr(NpuGraph, "update", own)
    patch.setattr(NpuGraph, "replay", replay)


def a_replay_without_its_update(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NpuGraph, "update", lambda _self, _batch: None)


def the_lengths_of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    first: list[Any] = []
    update = NpuGraph.update

    def stale(self: Any, batch: Any) -> None:
        first.append(batch)
        update(self, first[0])

    patch.setattr(NpuGraph, "update", stale)


def a_replay_twice(patch: pytest.MonkeyPatch) -> None:
    replay = NpuGraph.replay

    def twice(self: Any) -> None:
        replay(self)
        replay(self)

    patch.setattr(NpuGraph, "replay", twice)


@pytest.mark.parametrize(
    "fault",
    [
        no_wait_for_the_replay_before,
        an_event_before_the_replay,
        a_replay_without_its_update,
        the_lengths_of_the_first_step,
        a_replay_twice,
    ],
)
def test_a_fault_in_the_order_is_noticed(fault: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of the orders at least that the device may choose."""
    fault(monkeypatch)
    assert any(_is_noticed(order) for order in ORDERS)


def test_what_is_right_is_not_called_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    an_event_of_this_graph_s_own_replays_alone(monkeypatch)
    assert not any(_is_noticed(order) for order in ORDERS)


def _is_noticed(order: str) -> bool:
    try:
        steps, results = run_steps(ORDERS[order])
    except AssertionError:
        return True
    return results != steps
