"""NPU graphs on streams that run late and in any order: each replay works with its own step's lengths."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.model.npu_graphs import NpuGraph, NpuGraphs
from tests.support.npu.fake_npu import ORDERS, run_steps


@pytest.mark.parametrize("order", ORDERS)
def test_each_replay_works_with_the_lengths_of_its_step(order: str) -> None:
    steps, results = run_steps(ORDERS[order])
    assert results == steps


def no_wait_for_the_replay_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NpuGraphs, "note_replay", lambda _self: None)


def around(patch: pytest.MonkeyPatch, wrap: Callable[[Any, NpuGraphs], Any]) -> None:
    """Have each captured graph be what `wrap` makes of it."""
    capture = NpuGraphs.capture
    patch.setattr(NpuGraphs, "capture", lambda graphs, work: wrap(capture(graphs, work), graphs))


def an_event_before_the_replay(patch: pytest.MonkeyPatch) -> None:
    def wrap(graph: Any, graphs: NpuGraphs) -> Any:
        def replay() -> None:
            graphs.note_replay()
            before = graphs.replayed
            graph.replay()
            graphs.replayed = before

        return SimpleNamespace(update=graph.update, replay=replay)

    around(patch, wrap)


def an_event_of_this_graph_s_own_replays_alone(patch: pytest.MonkeyPatch) -> None:
    """Which overtakes nothing: that test below shows that not every change is called a fault."""

    def wrap(graph: Any, graphs: NpuGraphs) -> Any:
        own: list[Any] = [None]

        def update(batch: Any) -> None:
            shared, graphs.replayed = graphs.replayed, own[-1]
            graph.update(batch)
            graphs.replayed = shared

        def replay() -> None:
            graph.replay()
            own.append(graphs.replayed)

        return SimpleNamespace(update=update, replay=replay)

    around(patch, wrap)


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
