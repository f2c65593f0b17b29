"""Turns for what keeps Python's lock: work that a client can make long is done in pieces of a millisecond or so, and of
all threads of the process one at a time is at such a piece.

Who wants the lock waits until the piece that runs is done, and may then be behind all threads that want it too: an
event loop that asks for it several times for each small request would wait for many pieces each time. With turns it
waits for one. Threads have them in the order in which they came.

A piece neither waits for anything nor takes a turn inside of it. What runs without Python's lock needs none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """A lock that is handed on in the order of arrival: `with` it, a thread is at a piece.

    num_pieces   that have begun so far
    num_waiting  threads that wait for a turn
    """

    def __init__(self) -> None:
        self.num_pieces = 0
        self._guard = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._guard:
            self.num_pieces += 1
            if not self._is_taken:
                self._is_taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()  # until whose turn it was hands it on

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


# Of this process.
TURNS = Turns()
_ITEMS_OF_A_PIECE = 512


def in_turns(pieces: Iterable[T]) -> Iterator[T]:
    """The same items, each made in a turn of its own."""
    left = iter(pieces)
    while True:
        with TURNS:
            try:
                piece = next(left)
            except StopIteration:
                return
        yield piece


def each_in_turns(items: Iterable[T]) -> Iterator[T]:
    """The same items, several hundred of them made in each turn: for what takes a few microseconds each."""
    left = iter(items)
    batches = iter(lambda: list(islice(left, _ITEMS_OF_A_PIECE)), [])
    return chain.from_iterable(in_turns(batches))
