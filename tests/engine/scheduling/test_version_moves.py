"""Requests that go on with another version of their adapter, over the mock model: each token is of the version that is
told for it, nothing is lost, and the prefix cache never has keys of two versions.

The mock's logits are of the adapter whose rows the step's maps point at, and it fails when a sequence reads keys and
values that were computed for another one (`engine_mock.py`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.engine.ipc.messages import Abort, Evict, Move
from tests.support.engine.engine_mock import (
    LruHost,
    MockEngine,
    MockWeights,
    SlowMarks,
    adapter_number,
    make_mock_engine,
    next_logits,
)
from tests.support.tiers import examples


def move(mock: MockEngine, name: str, adapter: str) -> None:
    mock.engine.handle(Move(name, adapter, {**MockWeights(adapter).rows}))
    mock.engine.check_integrity()


def versions_of(mock: MockEngine, name: str, prompt: tuple[int, ...], adapter: str) -> list[str]:
    """The version of each token, as told; each token must be that version's, behind all before it."""
    history, versions = list(prompt), []
    for message in mock.messages.get(name, []):
        adapter = message.adapter or adapter
        for token in message.token_ids:
            assert token == int(next_logits(history, adapter_number(adapter)).argmax()), f"not of {adapter}"
            history.append(token)
            versions.append(adapter)
    return versions


def running(mock: MockEngine, name: str, num_tokens: int = 3, adapter: str = "a1", **fields: Any) -> None:
    mock.submit(name, (1, 2, 3), adapter, max_tokens=12, **fields)
    mock.step_until(lambda: len(mock.output.get(name, [])) == num_tokens)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("has_conv", [False, True])
def test_a_running_request_goes_on_with_the_new_version_once_that_is_there(overlap: bool, has_conv: bool) -> None:
    mock = make_mock_engine(overlap=overlap, has_conv=has_conv)
    running(mock, "r")
    move(mock, "r", "a2")
    mock.step()
    mock.step()
    mock.step()
    num_before = len(mock.output["r"]) + overlap  # it has gone on meanwhile; a token may be in flight
    assert num_before >= 5
    mock.load()
    mock.settle()
    assert versions_of(mock, "r", (1, 2, 3), "a1") == ["a1"] * num_before + ["a2"] * (12 - num_before)
    assert mock.engine.scheduler.num_preemptions == 0
    assert not any(mock.rows.pins.values())


def test_a_request_that_has_not_begun_has_the_newest_version_alone() -> None:
    mock = make_mock_engine(max_sequences=1)
    running(mock, "first")
    mock.submit("r", (4, 5), "a1", max_tokens=3)
    for adapter in ("a2", "a3"):
        move(mock, "r", adapter)
    mock.settle()
    assert versions_of(mock, "r", (4, 5), "a1") == ["a3"] * 3
    assert versions_of(mock, "first", (1, 2, 3), "a1") == ["a1"] * 12
    assert "a2" not in mock.host.reads


def test_a_prompt_is_computed_with_one_version() -> None:
    mock = make_mock_engine(token_budget=8)
    mock.host.memory.add("a2")
    prompt = tuple(range(20))
    mock.submit("r", prompt, "a1", max_tokens=4, prompt_logprobs=0)
    mock.step_until(lambda: mock.runner.batches)
    move(mock, "r", "a2")
    mock.settle()
    assert versions_of(mock, "r", prompt, "a1") == ["a1", "a2", "a2", "a2"]


def test_a_preempted_request_is_computed_again_with_the_new_version_alone() -> None:
    mock = make_mock_engine()
    running(mock, "r")
    move(mock, "r", "a2")
    mock.engine.scheduler.preempt(mock.engine.scheduler.running[0])
    mock.settle()
    assert versions_of(mock, "r", (1, 2, 3), "a1") == ["a1"] * 3 + ["a2"] * 9
    computed_by = next(iter(mock.runner.computed_by.values()))
    assert set(computed_by) == {"a2"}


def test_a_request_whose_new_version_finds_no_rows_is_preempted_for_it() -> None:
    mock = make_mock_engine(num_rows=4, max_steps_waiting_for_rows=3)
    running(mock, "r", adapter="a1-3")
    move(mock, "r", "a2-4")
    mock.settle()
    versions = versions_of(mock, "r", (1, 2, 3), "a1-3")
    assert versions[:5] == ["a1-3"] * 5
    assert versions[-1] == "a2-4"
    assert mock.engine.scheduler.num_preemptions == 1


@pytest.mark.parametrize("adapter", ["a5", "a6-99"], ids=["damaged", "too large"])
def test_a_version_that_cannot_be_loaded_leaves_requests_as_they_are(adapter: str) -> None:
    mock = make_mock_engine()
    mock.host.broken.add("a5")
    running(mock, "r")
    move(mock, "r", adapter)
    mock.settle()
    assert versions_of(mock, "r", (1, 2, 3), "a1") == ["a1"] * 12
    assert mock.finished["r"].reason == "length"


def test_a_move_back_before_the_step_changes_nothing() -> None:
    mock = make_mock_engine()
    running(mock, "r")
    move(mock, "r", "a2")
    move(mock, "r", "a1")
    mock.settle()
    assert versions_of(mock, "r", (1, 2, 3), "a1") == ["a1"] * 12


@pytest.mark.parametrize("overlap", [False, True])
def test_keys_of_two_versions_are_found_by_nobody(overlap: bool) -> None:
    mock = make_mock_engine(overlap=overlap, has_conv=False, num_blocks=100)
    prompt = tuple(range(30))
    mock.host.memory.add("a2")
    mock.submit("r", prompt, "a1", max_tokens=30)
    mock.step_until(lambda: len(mock.output.get("r", [])) == 10)
    move(mock, "r", "a2")
    mock.settle()
    versions = versions_of(mock, "r", prompt, "a1")
    whole = (*prompt, *mock.output["r"])
    for adapter, most in (("a1", 30 + versions.count("a1")), ("a2", 0)):
        mock.submit(adapter, (*whole, 7), adapter, max_tokens=2)
        mock.settle()
        num_cached = mock.messages[adapter][0].num_cached
        assert num_cached <= most
        assert num_cached >= most - 5  # what one version has computed is found
        versions_of(mock, adapter, (*whole, 7), adapter)


def test_a_pause_of_mode_wait_holds_a_request_with_the_newest_version() -> None:
    mock = make_mock_engine()
    mock.engine.scheduler.pause("wait")
    mock.submit("r", (1, 2), "a1", max_tokens=3)
    move(mock, "r", "a2")
    mock.step()
    mock.engine.scheduler.resume()
    mock.settle()
    assert versions_of(mock, "r", (1, 2), "a1") == ["a2"] * 3


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_random_moves_lose_nothing(seed: int) -> None:
    """Moves among submits, aborts, evictions, failures, preemptions and copies that take time."""
    rng = random.Random(seed)
    mock = make_mock_engine(
        num_blocks=rng.randint(12, 30),
        num_rows=rng.randint(2, 6),
        max_sequences=rng.randint(1, 6),
        token_budget=rng.randint(6, 20),
        has_conv=rng.random() < 0.5,
        max_steps_waiting_for_rows=rng.randint(1, 6),
        max_loads_ahead=rng.randint(1, 3),
        overlap=rng.random() < 0.5,
        host=LruHost(rng.randint(1, 3)) if rng.random() < 0.5 else None,
    )
    marks = SlowMarks()
    if rng.random() < 0.5:
        mock.rows.new_mark = marks
    mock.host.broken.add("a5")
    requests: dict[str, tuple[tuple[int, ...], str, int]] = {}
    aborted: set[str] = set()
    stem = tuple(rng.randrange(90) for _ in range(12))
    for i in range(80):
        match rng.choice(
            ("submit", "step", "step", "step", "read", "abort", "evict", "preempt", "copy", "move", "move")
        ):
            case "submit":
                prompt = (*stem[: rng.randint(1, 12)], *(rng.randrange(90) for _ in range(rng.randint(0, 6))))
                requests[f"r{i}"] = (prompt, rng.choice(("a1", "a2-2", "a3")), rng.randint(1, 16))
                prompt, adapter, num_tokens = requests[f"r{i}"]
                logprobs = {"prompt_logprobs": 0} if rng.random() < 0.2 else {}
                tenant = rng.choice(("", "x"))
                mock.submit(f"r{i}", prompt, adapter, max_tokens=num_tokens, tenant=tenant, **logprobs)
            case "step":
                mock.step()
            case "read":
                mock.loader.do_next()
            case "abort" if requests and rng.random() < 0.5:
                name = rng.choice(list(requests))
                mock.engine.handle(Abort(name))
                aborted.add(name)
            case "evict":
                mock.engine.handle(Evict(rng.choice(("a1", "a2-2", "a5", "a9"))))
            case "preempt" if mock.engine.scheduler.running:
                mock.engine.scheduler.preempt(rng.choice(mock.engine.scheduler.running))
            case "copy":
                marks.num_reached = rng.randint(marks.num_reached, marks.num_made)
            case "move" if requests:
                move(mock, rng.choice(list(requests)), rng.choice(("a1", "a2-2", "a3", "a4-2", "a5", "a6-7")))
            case _:
                continue
        mock.engine.check_integrity()
    mock.settle()
    while mock.loader.do_all() or mock.step():  # reads whose users have gone
        pass
    mock.step()
    mock.engine.close()
    assert not any(mock.rows.pins.values())
    assert not mock.engine.adapter_loads.num_wanted
    for name, (prompt, adapter, num_tokens) in requests.items():
        num_told = len(versions_of(mock, name, prompt, adapter))
        if name not in aborted or name in mock.finished:
            reason = mock.finished[name].reason
            assert (reason, num_told) == ("length", num_tokens) or reason == "error"
