"""Threads for what would hold up the event loop: the clients take turns in them.

With asyncio's own, whoever sends many long texts has others' deletions and listings wait behind all of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from service.fairness.client_identity import CLIENT
from service.fairness.thread_pool import FairPool

T = TypeVar("T")

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
