"""Checks, repeated, whether the disks that a replica writes to can be written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adapters.files.store_faults import write_fault

LOOK_SECONDS = 2.0
# A file server that has not answered for so long counts as unreachable; the check goes on waiting.
ANSWER_SECONDS = 3.0


class DiskWatch:
    """Calls `report` with "disk-full", "disk-read-only" or "disk-unreachable" where one of the directories cannot be
    written, and with None where all can, after each look. A directory that is not there is left out: it is not
    made yet, or missing for all."""

    def __init__(self, directories: Sequence[Path], report: Callable[[str | None], None]) -> None:
        self._directories, self._report = tuple(directories), report
        # A look may stick in the system's call; nobody waits for this thread, and no second one is begun.
        self._thread = ThreadPoolExecutor(1, "disk-watch")
        self._looking: asyncio.Future[str | None] | None = None

    async def look(self) -> None:
        """Check once; waits no longer than ANSWER_SECONDS."""
        loop = asyncio.get_running_loop()
        if self._looking is None or self._looking.done():
            self._looking = loop.run_in_executor(self._thread, _fault_of_any, self._directories)
        reason: str | None = "disk-unreachable"
        with contextlib.suppress(TimeoutError):
            reason = await asyncio.wait_for(asyncio.shield(self._looking), ANSWER_SECONDS)
        self._report(reason)

    async def run(self) -> None:
        """Check until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)


def _fault_of_any(directories: Sequence[Path]) -> str | None:
    faults = (write_fault(one) for one in directories if one.is_dir())
    return next((f"disk-{fault}" for fault in faults if fault is not None), None)
