"""Tunes the application's process (`multilora serve`, or a worker of Ray's) for latency and memory."""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import suppress

from service.logs import REFUSAL_LINES, RefusalLines
from service.models.heap import give_back_freed_memory, trim_heap

# How long a thread that computes may keep Python's lock when the event loop wants it. A small request asks for it
# several times, so that with Python's 5 ms one busy thread makes it wait for tens of milliseconds.
_SWITCH_SECONDS = 0.0005
# The lowest bound on an integer's digits that Python accepts: the time for one grows with their square, so that a
# body of the 4,300 digits that it allows takes seven times as long to read or write.
_MAX_DIGITS = sys.int_info.str_digits_check_threshold
_TELL_SECONDS = 1.0
# Memory that was freed goes back to the system, also from the middle of the heap: 0.1 to 3 ms of a thread that does
# not hold Python's lock.
_TELLS_PER_TRIM = 2


def prepare() -> None:
    """Call this before the application is built, and where that can be before other threads begin."""
    give_back_freed_memory()
    sys.setswitchinterval(_SWITCH_SECONDS)
    sys.set_int_max_str_digits(_MAX_DIGITS)


def freeze() -> None:
    """Exempt all living objects from the garbage collector, whose walk through them would stop everybody for 50 ms now
    and then. Call it once everything is loaded: in 10,000 uploads it walked for 17 ms through objects that had come
    after the application."""
    gc.collect()
    gc.freeze()


async def keep_up(lines: RefusalLines = REFUSAL_LINES) -> None:
    """As long as the application runs."""
    while True:
        for _ in range(_TELLS_PER_TRIM):
            await asyncio.sleep(_TELL_SECONDS)
            lines.report()
        with suppress(RuntimeError):  # where no thread can be started now
            await asyncio.to_thread(trim_heap)
