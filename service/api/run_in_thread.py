"""Work that grows with a text, where it holds up no other request."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from service.api.threads import in_turn
from service.fairness.thread_pool import FairPool

# Longer texts are tokenised in a thread, so that they do not hold up the streams of other requests.
LONG_TEXT_CHARS = 20_000
# Even longer ones one after another, as tokenising takes two hundred times their memory.
_HUGE_TEXT_CHARS = 1 << 20
_huge_texts = FairPool(1, "huge-text")
# These compute without Python's lock: with a thread for each that came, one client's would have all processors. Of two
# threads it has one.
LONG_TEXTS = FairPool(max(2, (os.cpu_count() or 1) // 2), "long-text")

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], *, size_chars: int) -> T:
    """Run `work` here, in a thread if the text is long, or in the thread of the longest."""
    if size_chars < LONG_TEXT_CHARS:
        return work()
    if size_chars < _HUGE_TEXT_CHARS:
        return await in_turn(work, pool=LONG_TEXTS)
    return await in_turn(work, pool=_huge_texts)
