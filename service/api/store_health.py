"""Whether directories can be written: anybody may ask, and the disk takes as long as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from adapters.files.store_faults import WriteFault, write_fault

# Above what a disk that works takes, and below what whoever asks for /health waits.
ANSWER_SECONDS = 1.0
# A file server may take longer, where nobody waits.
_WATCH_ANSWER_SECONDS = 3.0
_WATCH_SECONDS = 2.0


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


class DiskWatch:
    """Calls `report` with "disk-full", "disk-read-only" or "disk-unreachable" where one of the directories cannot be
    written, and with None where all can, after each look. A directory that is not there is left out: it is not
    made yet, or missing for all."""

    def __init__(self, directories: Sequence[Path], report: Callable[[str | None], None]) -> None:
        self._directories, self._report = tuple(directories), report
        self._health = StoreHealth(_WATCH_ANSWER_SECONDS)

    async def look(self) -> None:
        """Check once."""
        fault = await self._health.fault(self._first_fault)
        self._report(None if fault is None else f"disk-{fault}")

    async def run(self) -> None:
        """Check until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_WATCH_SECONDS)

    def _first_fault(self) -> WriteFault | None:
        faults = (write_fault(one) for one in self._directories if one.is_dir())
        return next((fault for fault in faults if fault is not None), None)
