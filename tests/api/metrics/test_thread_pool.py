"""Who runs when several owners want the same few threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest

from service.fairness.client_identity import client_of
from service.fairness.thread_pool import FairPool
from tests.support.limits import LIMIT_SECONDS


class Work:
    """Something that runs until it is let go, and notes that it has begun."""

    def __init__(self, order: list[str], name: str) -> None:
        self.begun, self._go, self._order, self.name = threading.Event(), threading.Event(), order, name

    def __call__(self) -> str:
        self._order.append(self.name)
        self.begun.set()
        assert self._go.wait(LIMIT_SECONDS)
        return self.name

    def end(self) -> None:
        self._go.set()


@pytest.fixture
def pool() -> Iterator[FairPool]:
    made = FairPool(2, "fair", lambda: None)
    yield made
    made.close()


def submitted(pool: FairPool, order: list[str], names: str) -> tuple[list[Work], list[Future[str]]]:
    """One piece of work for each name; the owner is its first letter."""
    works = [Work(order, name) for name in names.split()]
    return works, [pool.submit(work.name[0], work) for work in works]


def test_one_owner_leaves_a_thread_for_the_others(pool: FairPool) -> None:
    order: list[str] = []
    works, results = submitted(pool, order, "a1 a2 a3")
    assert works[0].begun.wait(LIMIT_SECONDS)
    others, other_results = submitted(pool, order, "b1")
    assert others[0].begun.wait(LIMIT_SECONDS)
    assert order == ["a1", "b1"]  # a2 came before b1, and a thread was free
    for work in (*works, *others):
        work.end()
    assert [result.result(LIMIT_SECONDS) for result in (*results, *other_results)] == ["a1", "a2", "a3", "b1"]


def test_owners_take_turns_however_much_one_has_sent() -> None:
    pool, order = FairPool(1, "single", lambda: None), list[str]()
    works, results = submitted(pool, order, "a1 a2 a3 a4 b1 b2 c1")
    for work in works:
        work.end()
    wait(results, LIMIT_SECONDS)
    pool.close()
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


def test_what_is_cancelled_never_runs_and_what_fails_says_so(pool: FairPool) -> None:
    order: list[str] = []
    works, results = submitted(pool, order, "a1 a2 a3")
    assert works[0].begun.wait(LIMIT_SECONDS)
    assert results[1].cancel()
    works[0].end()
    works[2].end()
    assert results[2].result(LIMIT_SECONDS) == "a3"
    assert order == ["a1", "a3"]

    def fail() -> None:
        raise KeyError("broken")

    assert isinstance(pool.submit("a", fail).exception(LIMIT_SECONDS), KeyError)


def test_a_failure_is_gone_with_its_future() -> None:
    """Its traceback leads to all that the work had in hand, which Python's collector may leave for minutes."""
    pool, held = FairPool(1, "forgetful"), []

    class Failure(Exception):
        pass

    def fail() -> None:
        failure = Failure()
        held.append(weakref.ref(failure))
        try:
            raise failure
        finally:
            del failure

    gc.disable()
    try:
        assert isinstance(pool.submit("a", fail).exception(LIMIT_SECONDS), Failure)
        pool.close()
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_payer_is_a_key_or_else_a_network() -> None:
    assert client_of("acme", "1.2.3.4") == "acme"
    assert client_of("", "1.2.3.4") == "1.2.3.4"
    same, other = ("2001:db8::1", "2001:db8:0:0:ffff::2"), "2001:db8:0:1::1"
    assert len({client_of("", address) for address in same}) == 1
    assert client_of("", other) != client_of("", same[0])
    # As a proxy writes addresses of IPv4 that listens to both.
    assert [client_of("", f"::ffff:1.2.3.{host}") for host in (4, 5)] == ["1.2.3.4", "1.2.3.5"]
    assert client_of("", "") == ""
