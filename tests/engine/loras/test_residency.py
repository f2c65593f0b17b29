"""The way of an adapter between disk, host memory and device, stepped without a thread and without a device."""

from __future__ import annotations

import pytest

from service.engine.ipc.messages import Abort, Evict, Pause
from service.engine.loras.residency import AdapterState
from tests.support.engine.engine_mock import MockEngine, MockWeights, SlowMarks, expected_tokens, make_mock_engine
from tests.support.engine.step_counts import first_token_steps


def with_slow_copies(**sizes: int) -> tuple[MockEngine, SlowMarks]:
    mock, marks = make_mock_engine(**sizes), SlowMarks()  # type: ignore[arg-type]
    mock.rows.new_mark = marks
    return mock, marks


def state_of(mock: MockEngine, digest: str) -> AdapterState:
    assert mock.engine.adapter_loads.residency is not None
    return mock.engine.adapter_loads.residency.state_of(digest)


def test_an_adapter_goes_from_the_disk_to_the_device_in_three_steps_where_copies_take_time() -> None:
    mock, marks = with_slow_copies()
    mock.submit("base", max_tokens=60)
    mock.step()
    assert state_of(mock, "a1") is AdapterState.ABSENT
    mock.submit("r", adapter="a1", max_tokens=2)
    assert state_of(mock, "a1") is AdapterState.READING, "from the arrival on, not from the next step"
    mock.load()
    mock.step()
    assert state_of(mock, "a1") is AdapterState.COPYING
    assert "r" not in mock.output
    marks.num_reached = 1
    mock.step()
    assert state_of(mock, "a1") is AdapterState.DEVICE
    assert len(mock.output["r"]) == 1
    mock.settle()
    assert mock.output["r"] == expected_tokens((1, 2, 3), "a1", 2)


def test_bytes_are_counted_where_they_have_come() -> None:
    mock, marks = with_slow_copies()
    mock.submit("r", adapter="a1", max_tokens=2)
    mock.load()
    mock.step()
    assert mock.engine.stats().loaded_bytes == {"host": 1000}
    marks.num_reached = 1
    mock.step()
    assert mock.engine.stats().loaded_bytes == {"host": 1000, "device": 1000}
    mock.engine.close()


def test_what_the_host_tier_has_is_copied_in_the_next_step_whatever_is_being_read() -> None:
    mock, marks = with_slow_copies()
    mock.host.memory.add("a9")
    for i in range(8):
        mock.submit(f"r{i}", adapter=f"a{i}")
    mock.submit("kept", adapter="a9")
    mock.step()
    assert state_of(mock, "a9") is AdapterState.COPYING
    marks.num_reached = 1
    mock.step()
    assert "kept" in mock.output
    mock.engine.close()


def test_a_pause_holds_no_rows_for_one_that_is_gone() -> None:
    mock, _ = with_slow_copies()
    mock.host.memory.add("a1")
    mock.submit("runs", max_tokens=9)
    mock.step()
    mock.submit("gone", adapter="a1")
    mock.step()
    mock.engine.handle(Abort("gone"))
    mock.engine.pauses.begin(Pause("pause", "keep", 60.0))
    mock.step()
    assert state_of(mock, "a1") is AdapterState.DEVICE and not mock.rows.held
    mock.engine.pauses.end()
    mock.settle()
    assert mock.output["runs"] == expected_tokens((1, 2, 3), None, 9)


def test_nobody_has_the_rows_of_one_on_its_way_and_nobody_runs_with_it() -> None:
    mock, _ = with_slow_copies(num_rows=4)
    mock.host.memory.update(("a1-4", "a2-4"))
    mock.submit("one", adapter="a1-4", max_tokens=2)
    mock.step()
    assert state_of(mock, "a1-4") is AdapterState.COPYING
    mock.submit("two", adapter="a2-4", max_tokens=2)
    assert mock.rows.held == {"a1-4"}
    assert not mock.rows.has_room(MockWeights("a2-4").rows)
    mock.settle()
    assert mock.output["one"] == expected_tokens((1, 2, 3), "a1-4", 2)
    assert mock.output["two"] == expected_tokens((1, 2, 3), "a2-4", 2)


def test_a_copy_is_waited_for_by_the_device_when_nothing_else_could_run() -> None:
    """Else nothing would ever say that it has ended."""
    mock, marks = with_slow_copies()
    mock.host.memory.add("a1")
    mock.submit("r", adapter="a1", max_tokens=2)
    mock.engine.wake.clear()
    mock.step()
    assert mock.engine.wake.is_set(), "a step is due"
    assert marks.num_reached == 0
    mock.step()
    assert mock.output["r"]
    mock.settle()


def test_what_is_replaced_on_its_way_to_the_device_is_read_again() -> None:
    mock, _ = with_slow_copies()
    mock.submit("base", max_tokens=30)
    mock.submit("r", adapter="a1", max_tokens=2)
    mock.load()
    mock.step()
    mock.engine.handle(Evict("a1"))
    assert state_of(mock, "a1") is AdapterState.ABSENT
    mock.settle()
    assert mock.host.reads == ["a1", "a1"]
    assert mock.output["r"] == expected_tokens((1, 2, 3), "a1", 2)


def test_what_is_replaced_while_requests_run_with_it_is_stale_until_they_end() -> None:
    mock = make_mock_engine()
    mock.submit("before", adapter="a1", max_tokens=4)
    mock.step_until(lambda: mock.output.get("before"))
    mock.engine.handle(Evict("a1"))
    assert state_of(mock, "a1") is AdapterState.STALE
    mock.submit("after", adapter="a1", max_tokens=2)
    mock.step_until(lambda: "before" in mock.finished)
    assert "after" not in mock.output
    mock.settle()
    assert mock.host.reads == ["a1", "a1"]


def test_an_operator_keeps_adapters_on_the_device_against_those_that_are_asked_for() -> None:
    mock = make_mock_engine(num_rows=3)
    mock.submit("first", adapter="a5", max_tokens=1)
    mock.submit("second", adapter="a6-2", max_tokens=1)
    mock.settle()
    mock.engine.adapter_loads.pin(["a7-2"])
    mock.step_until(lambda: state_of(mock, "a7-2") is AdapterState.DEVICE)
    for i in range(8, 20):
        mock.submit(f"r{i}", adapter=f"a{i}", max_tokens=2)
    mock.settle()
    assert state_of(mock, "a7-2") is AdapterState.DEVICE
    mock.engine.adapter_loads.pin([])
    mock.submit("large", adapter="a20-3", max_tokens=2)
    mock.settle()
    assert state_of(mock, "a7-2") is AdapterState.ABSENT
    assert mock.output["large"] == expected_tokens((1, 2, 3), "a20-3", 2)


def test_what_an_operator_keeps_yields_to_one_that_has_no_room_beside_it_and_comes_back() -> None:
    mock = make_mock_engine(num_rows=4)
    mock.engine.adapter_loads.pin(["a1-2", "a2"])
    mock.submit("base", max_tokens=1)
    mock.step_until(lambda: {state_of(mock, one) for one in ("a1-2", "a2")} == {AdapterState.DEVICE})
    mock.submit("large", adapter="a3-3", max_tokens=2)
    mock.submit("small", adapter="a4", max_tokens=2)
    mock.step_until(lambda: {"large", "small"} <= mock.finished.keys())
    assert mock.output["large"] == expected_tokens((1, 2, 3), "a3-3", 2)
    mock.submit("later", adapter="a5", max_tokens=8)
    mock.settle()
    assert {state_of(mock, one) for one in ("a1-2", "a2")} == {AdapterState.DEVICE}


def test_one_that_cannot_be_kept_is_not_tried_for_ever() -> None:
    mock = make_mock_engine(num_rows=2)
    mock.host.broken.add("a1")
    mock.engine.adapter_loads.pin(["a1", "a2-2"])
    mock.submit("r", adapter="a3", max_tokens=6)
    mock.settle()
    for _ in range(10):
        mock.step_and_load()
    assert mock.host.reads.count("a1") == 1
    assert mock.host.reads.count("a2-2") <= 3
    assert state_of(mock, "a2-2") is AdapterState.DEVICE


@pytest.mark.parametrize("are_slow", [False, True])
def test_first_tokens_come_in_one_step_from_the_device_two_from_the_host_and_three_from_disk(are_slow: bool) -> None:
    """64 of 300 adapters fit, uniform traffic of half as many requests; reads, and copies if they are slow, take as
    long as a step."""
    waits = first_token_steps(num_requests=3000, seed=0, are_copies_slow=are_slow)
    assert min(map(len, waits.values())) > 300, {tier: len(found) for tier, found in waits.items()}
    p99 = {tier: sorted(found)[len(found) * 99 // 100] for tier, found in waits.items()}
    assert p99 == {"device": 1, "host": 2 if are_slow else 1, "disk": 3 if are_slow else 2}
