"""FairGilLock: one thread at a time is at a piece, and who came first is next."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from adapters.gil_lock import GIL_LOCK, FairGilLock, locked_batches, locked_pieces
from tests.support.http.server import wait_for


def test_those_that_wait_are_served_in_the_order_in_which_they_came() -> None:
    turns, served = FairGilLock(), list[int]()

    def work(number: int) -> None:
        with turns:
            served.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            wait_for(lambda number=number: turns.num_waiting == number + 1, "a thread that waits")
        assert not served
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3]
    assert (turns.num_pieces, turns.num_waiting) == (5, 0)


def test_who_goes_on_at_once_is_behind_those_that_wait() -> None:
    turns, served = FairGilLock(), list[str]()

    def other() -> None:
        with turns:
            served.append("other")

    thread = threading.Thread(target=other)
    with turns:
        thread.start()
        wait_for(lambda: turns.num_waiting, "a thread that waits")
        served.append("first")
    with turns:
        served.append("first again")
    thread.join()
    assert served == ["first", "other", "first again"]


def test_an_error_ends_the_turn() -> None:
    turns = FairGilLock()
    with pytest.raises(ZeroDivisionError), turns:
        raise ZeroDivisionError
    with turns:
        assert turns.num_waiting == 0


def test_each_item_is_made_in_a_turn_and_used_outside_of_it() -> None:
    def items() -> Iterator[int]:
        yield from range(3)

    before, seen = GIL_LOCK.num_pieces, list[int]()
    for item in locked_pieces(items()):
        with GIL_LOCK:  # would wait for ever inside of another turn
            seen.append(item)
    assert seen == [0, 1, 2]
    assert GIL_LOCK.num_pieces - before == 3 + 3 + 1  # one found out that there is no more


def test_cheap_items_are_made_hundreds_in_a_turn() -> None:
    before = GIL_LOCK.num_pieces
    assert list(locked_batches(iter(range(2000)))) == list(range(2000))
    assert 4 <= GIL_LOCK.num_pieces - before <= 8
