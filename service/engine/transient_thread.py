"""A worker thread that lives only while there is work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class TransientThread:
    """Runs submitted work, one piece after the other, in a thread that ends when nothing is left.

    A thread that has run a torch op keeps its team of OpenMP workers until it ends, and as long as a process has more
    of these than cores, libgomp lets every one of its barriers sleep in the kernel instead of spinning: on two cores a
    thread that waited for the next adapter made each step of the engine a fifth slower.
    """

    def __init__(self, name: str, stack_bytes: int = 0) -> None:
        """stack_bytes  stack of the thread; 0: the system's default"""
        self._name = name
        self._stack_bytes = stack_bytes
        self._lock = threading.Lock()
        self._work: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None  # set while it runs, or may still take work

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work`, which handles its own errors, after all work submitted before it. Raises RuntimeError, and does
        not queue it, where the system starts no thread."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                usual = threading.stack_size(self._stack_bytes)  # of all threads that start from now on
                try:
                    thread.start()
                finally:
                    threading.stack_size(usual)
                self._thread = thread
            self._work.append(work)

    def close(self) -> None:
        """Drop work that has not begun, and wait for the one that has."""
        with self._lock:
            self._work.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    self._thread = None
                    return
                work = self._work.popleft()
            work()
