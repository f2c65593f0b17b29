"""A fair lock around pieces of work that hold Python's lock (GIL), so that the event loop waits for one piece at most.

Work whose length a client decides is done in pieces of about a millisecond. One thread of the process at a time runs
such a piece, and waiting threads get the lock in the order of arrival. Without it a thread that asks for the GIL may
queue behind every thread that wants it too: an event loop asks several times per request and would wait for many
pieces each time.

A piece neither waits for anything nor takes this lock again. Work that releases the GIL does not need it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class FairGilLock:
    """A lock that threads get in the order of arrival; each `with` block is one piece of work.

    num_pieces   pieces begun so far
    num_waiting  threads that wait for the lock
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
        mine.acquire()  # released by the thread before this one

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


# One for the process.
GIL_LOCK = FairGilLock()
_ITEMS_OF_A_PIECE = 512


def locked_pieces(pieces: Iterable[T]) -> Iterator[T]:
    """The same items, each computed under the lock by itself."""
    left = iter(pieces)
    while True:
        with GIL_LOCK:
            try:
                piece = next(left)
            except StopIteration:
                return
        yield piece


def locked_batches(items: Iterable[T]) -> Iterator[T]:
    """The same items, computed under the lock several hundred at a time; for items that take microseconds."""
    left = iter(items)
    batches = iter(lambda: list(islice(left, _ITEMS_OF_A_PIECE)), [])
    return chain.from_iterable(locked_pieces(batches))
