"""The server, with an event loop that notes how long each callback keeps its thread: in the place of
`service.cli.main`.

Processor time of the loop's thread: other programs on the machine do not count, nor does waiting for Python's lock. The
file that LOOP_STRETCHES names gets a line for each callback of a millisecond or more: when it ended, on the clock of
`time.monotonic`, and its seconds.
"""

from __future__ import annotations

import os
import sys
import time
from asyncio import events
from pathlib import Path
from typing import Any

VARIABLE = "LOOP_STRETCHES"
_LEAST_SECONDS = 0.001


def longest_since(path: Path, begun: float) -> float:
    """Seconds of the longest stretch that has ended since then."""
    found = [0.0]
    for line in path.read_text().splitlines():
        ended, seconds = map(float, line.split())
        if ended >= begun:
            found.append(seconds)
    return max(found)


def _note_stretches(path: Path) -> None:
    file = path.open("w", buffering=1)
    handle: Any = events.Handle
    run = handle._run

    def timed(self: Any) -> None:
        started = time.thread_time()
        run(self)
        seconds = time.thread_time() - started
        if seconds >= _LEAST_SECONDS:
            file.write(f"{time.monotonic():.4f} {seconds:.4f}\n")

    handle._run = timed


if __name__ == "__main__":
    from service.cli.main import main

    _note_stretches(Path(os.environ[VARIABLE]))
    sys.exit(main(sys.argv[1:]))
