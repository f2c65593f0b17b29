"""Whether the store can be written, as /health tells it: anybody may ask, and the disk takes as long as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from adapters.files.store_faults import WriteFault

# Above what a disk that works takes, and below what whoever asks for /health waits.
ANSWER_SECONDS = 1.0


class StoreHealth:
    """Looks in a thread of its own, one look at a time, however many ask: those who come during one share the next, so
    that what they are told is not older than their question. A look may stick in the system's call.

    answer_seconds  how long a look is waited for
    """

    def __init__(self, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._answer_seconds = answer_seconds
        self._thread = ThreadPoolExecutor(1, "store-look")
        self._next: Future[WriteFault | None] | None = None

    async def fault(self, look: Callable[[], WriteFault | None]) -> WriteFault | None:
        """The fault that `look` returns; "unreachable" if that takes too long."""
        if self._next is None or self._next.running() or self._next.done():
            self._next = self._thread.submit(look)
        answer = asyncio.wrap_future(self._next)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), self._answer_seconds)
        except TimeoutError:
            return "unreachable"
