"""Grammars of one tenant that take long hold up no other tenant's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.sequences import grammar_budget
from service.engine.sequences.constraint import SHARE, USUAL_SECONDS
from service.engine.sequences.grammar_budget import MAX_NEW, MAX_SECONDS_OWED, GrammarBudget
from tests.engine.scheduling.test_grammars import best, regex
from tests.support.engine.engine_mock import MockEngine, expected_tokens, make_mock_engine

NUM_BOUND = 3 * MAX_NEW


@pytest.fixture(params=[False, True], ids=["one after another", "overlap"])
def mock(request: pytest.FixtureRequest) -> Iterator[MockEngine]:
    made = make_mock_engine(overlap=request.param, max_sequences=NUM_BOUND + 1)
    yield made
    made.engine.close()


def submit_all(mock: MockEngine, tenant_of_free: str) -> None:
    mock.submit("free", (5, 6), max_tokens=20, tenant=tenant_of_free)
    for index in range(NUM_BOUND):
        mock.submit(f"bound-{index}", (7, index), max_tokens=9, grammar=regex("[a-h]{5}"), tenant="a")
    mock.load()  # all grammars are compiled


def assert_all_is_told(mock: MockEngine) -> None:
    mock.settle()
    assert mock.output["free"] == expected_tokens((5, 6), None, 20)
    for index in range(NUM_BOUND):
        assert mock.output[f"bound-{index}"] == best(["abcdefgh"] * 5, None, (7, index))


def num_begun(mock: MockEngine) -> int:
    return sum(bool(mock.output.get(f"bound-{index}")) for index in range(NUM_BOUND))


def test_few_of_a_tenant_begin_in_a_step_beside_another_tenant(mock: MockEngine) -> None:
    submit_all(mock, "b")
    before = 0
    while (begun := num_begun(mock)) < NUM_BOUND:
        assert begun - before <= MAX_NEW
        before = begun
        mock.step_and_load()
    assert_all_is_told(mock)


def test_a_tenant_alone_waits_until_one_of_a_grammar_has_begun(mock: MockEngine) -> None:
    submit_all(mock, "a")
    begun = [num_begun(mock)]
    while begun[-1] < NUM_BOUND:
        mock.step_and_load()
        if num_begun(mock) > begun[-1]:
            begun.append(num_begun(mock))
    assert begun[:2] == [0, MAX_NEW]
    assert begun[2] > 2 * MAX_NEW
    assert_all_is_told(mock)


def test_nobody_waits_where_all_follow_grammars_of_one_tenant(mock: MockEngine) -> None:
    for index in range(NUM_BOUND):
        mock.submit(f"bound-{index}", (7, index), max_tokens=9, grammar=regex("[a-h]{5}"), tenant="a")
    mock.load()
    while not num_begun(mock):
        mock.step_and_load()
    assert num_begun(mock) > MAX_NEW
    mock.settle()


def test_one_in_debt_goes_on_when_the_others_have_ended(mock: MockEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_budget, "MAX_SECONDS_OWED", -1.0)
    submit_all(mock, "b")
    while "free" not in mock.finished:
        assert not num_begun(mock)
        mock.step_and_load()
        mock.engine.check_integrity()
    assert_all_is_told(mock)


def sequence(
    tenant: str, turns: GrammarBudget | None = None, *, num_masks: int = 1, grammar: str = "", is_costly: bool = False
) -> Any:
    """Follows a grammar, if there are turns."""
    constraint = None
    if turns is not None:
        constraint = SimpleNamespace(
            account=turns.account(tenant), num_masks=num_masks, grammar=grammar, is_costly=is_costly
        )
    return _Sequence(request=SimpleNamespace(tenant=tenant), constraint=constraint)


class _Sequence(SimpleNamespace):
    __hash__ = object.__hash__


def test_what_is_owed_is_forgiven_at_a_share_of_the_time() -> None:
    now = [100.0]
    turns = GrammarBudget(lambda: now[0])
    running = [sequence("a", turns), sequence("b", turns), sequence("c")]
    for _ in range(1000):
        turns.account("a").spend(USUAL_SECONDS)
        turns.account("b").spend(USUAL_SECONDS)
    assert not turns.deferred(running), "usual grammars"
    turns.account("a").spend(3 * MAX_SECONDS_OWED)
    assert turns.deferred(running) == {running[0]}
    now[0] += 1.9 * MAX_SECONDS_OWED / SHARE
    assert turns.deferred(running) == {running[0]}
    now[0] += 0.2 * MAX_SECONDS_OWED / SHARE
    assert not turns.deferred(running)
    now[0] += 1000  # no claim is built up
    turns.account("a").spend(3 * MAX_SECONDS_OWED)
    assert turns.deferred(running) == {running[0]}
    assert not turns.deferred(running[:2]) - {running[0]}


def test_new_ones_that_wait_have_their_turn_behind_those_that_came_before() -> None:
    turns = GrammarBudget()
    new = [sequence("a", turns, num_masks=0) for _ in range(MAX_NEW + 2)]
    assert turns.deferred([*new, sequence("b")]) == set(new[MAX_NEW:])
    assert not turns.deferred(new), "nobody else runs"
    known = [sequence("a", turns) for _ in range(9)]
    assert turns.deferred([*known, *new, sequence("b")]) == set(new[MAX_NEW:])


def test_two_in_debt_do_not_stop_the_engine() -> None:
    turns = GrammarBudget(lambda: 0.0)
    for tenant in "ab":
        turns.account(tenant).spend(10.0)
    assert not turns.deferred([sequence("a", turns), sequence("b", turns)])


def test_of_one_tenant_those_sit_out_whose_masks_may_be_costly() -> None:
    now = [100.0]
    turns = GrammarBudget(lambda: now[0])
    free, usual = sequence("a"), [sequence("a", turns, grammar="usual") for _ in range(9)]
    fresh = [sequence("a", turns, num_masks=0, grammar="usual") for _ in range(9)]
    unknown = [sequence("a", turns, num_masks=0, grammar="unknown") for _ in range(MAX_NEW + 2)]
    costly = [sequence("a", turns, grammar="costly", is_costly=True) for _ in range(MAX_NEW + 2)]
    doubted = sequence("a", turns, num_masks=0, grammar="costly")
    calmed = sequence("a", turns, grammar="costly")
    assert not turns.deferred([*usual, *fresh, free])
    assert turns.deferred([*unknown, *usual]) == set(unknown[MAX_NEW:])
    assert turns.deferred([*costly, doubted, calmed]) == {*costly[MAX_NEW:], doubted}
    assert not turns.deferred([*costly, doubted, *unknown]), "nothing else runs"
    turns.account("a").spend(3 * MAX_SECONDS_OWED)
    assert turns.deferred([*usual, *fresh, *costly, *unknown]) == {*costly, *unknown}
    assert turns.deferred([free, *usual]) == set()
    now[0] += 3.1 * MAX_SECONDS_OWED / SHARE
    assert turns.deferred([free, *costly]) == set(costly[MAX_NEW:])
