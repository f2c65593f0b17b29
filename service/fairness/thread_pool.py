"""Threads for work that its owners can make long: no owner has all of them, and owners take turns. In the API the
owners are the clients: with asyncio's own threads, whoever sends many long texts has others' deletions and listings
wait behind all of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from service.fairness.client_identity import CLIENT

T = TypeVar("T")


class FairPool:
    """One owner's work runs in all threads but one at most, or in the only one there is. Of the owners that wait, the
    one that has waited longest since its last turn is next; work of one owner runs in the order it came.

    initializer  called in each thread, as it starts; None: nothing
    """

    def __init__(self, num_threads: int, name: str, initializer: Callable[[], None] | None = None) -> None:
        self._num_threads = num_threads
        self._most_of_one = max(1, num_threads - 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=initializer)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # whose turn is next comes first
        self._ready: deque[tuple[str, Future[Any], Callable[[], Any]]] = deque()  # one for each thread that is to begin
        self._num_running: Counter[str] = Counter()

    def submit(self, owner: str, work: Callable[[], T]) -> Future[T]:
        """The result to be; a future that is cancelled before its turn never runs."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, work))
            self._start()
        return future

    def close(self) -> None:
        """Wait for what runs; what waits is cancelled."""
        with self._lock:
            for queue in self._waiting.values():
                for future, _ in queue:
                    future.cancel()
            self._waiting.clear()
        self._threads.shutdown()

    def _start(self) -> None:
        """As many as may run. Under the lock."""
        while self._num_running.total() < self._num_threads:
            may_run = (owner for owner in self._waiting if self._num_running[owner] < self._most_of_one)
            owner = next(may_run, None)
            if owner is None:
                return
            queue = self._waiting.pop(owner)
            future, work = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind all others
            self._num_running[owner] += 1
            self._ready.append((owner, future, work))
            self._threads.submit(self._run)

    def _run(self) -> None:
        """Run the ready work. It is no argument: an error's traceback leads here and to the caller, and arguments would
        close a reference cycle that holds everything the work had until Python's collector runs."""
        owner, future, work = self._ready.popleft()
        try:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
        finally:
            del future, work
            with self._lock:
                self._num_running[owner] -= 1
                if not self._num_running[owner]:
                    del self._num_running[owner]
                self._start()


# As many as asyncio would have.
NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)
_USUAL = FairPool(NUM_THREADS, "api")


async def in_turn(work: Callable[..., T], *arguments: Any, pool: FairPool = _USUAL, **named: Any) -> T:
    """Run `work` in a thread, clients in turn, and return or raise its result. The thread has the request's context. A
    call that is cancelled while it waits never runs."""
    here = copy_context()
    return await asyncio.wrap_future(pool.submit(CLIENT.get(), partial(here.run, work, *arguments, **named)))


# Longer texts are tokenised in a thread, so that they do not hold up the streams of other requests.
LONG_TEXT_CHARS = 20_000
# Even longer ones one after another, as tokenising takes two hundred times their memory.
_HUGE_TEXT_CHARS = 1 << 20
_huge_texts = FairPool(1, "huge-text")
# These compute without Python's lock: with a thread for each that came, one client's would have all processors. Of two
# threads it has one.
LONG_TEXTS = FairPool(max(2, (os.cpu_count() or 1) // 2), "long-text")


async def run_in_thread(work: Callable[[], T], *, size_chars: int) -> T:
    """Run `work` here, in a thread if the text is long, or in the thread of the longest."""
    if size_chars < LONG_TEXT_CHARS:
        return work()
    if size_chars < _HUGE_TEXT_CHARS:
        return await in_turn(work, pool=LONG_TEXTS)
    return await in_turn(work, pool=_huge_texts)
