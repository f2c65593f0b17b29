"""Threads of the API: a client that fills them keeps nobody else out."""

from __future__ import annotations

import asyncio
import os
import threading

from service.fairness.client_identity import CLIENT
from service.fairness.thread_pool import LONG_TEXT_CHARS, FairPool, in_turn, run_in_thread
from tests.support.limits import LIMIT_SECONDS


def test_another_payer_s_work_is_next_however_much_one_has_sent() -> None:
    """One thread, which the first client's work has, and nine times as much of it waits."""
    go, done = threading.Event(), list[str]()
    pool = FairPool(1, "test")

    def work(name: str, *, waits: bool = False) -> str:
        if waits:
            assert go.wait(LIMIT_SECONDS)
        done.append(f"{name} {CLIENT.get()}")
        return name

    async def run() -> None:
        CLIENT.set("flood")
        first = asyncio.create_task(in_turn(work, "first", pool=pool, waits=True))
        rest = [asyncio.create_task(in_turn(work, str(number), pool=pool)) for number in range(9)]
        await asyncio.sleep(0)
        CLIENT.set("other")
        other = asyncio.create_task(in_turn(work, "late", pool=pool))
        await asyncio.sleep(0)
        rest.pop().cancel()
        await asyncio.sleep(0)
        go.set()
        assert await other == "late"
        await asyncio.gather(first, *rest)

    asyncio.run(run())
    assert done == ["first flood", "0 flood", "late other", *(f"{number} flood" for number in range(1, 8))]
    pool.close()


def test_errors_come_out_as_they_were_raised() -> None:
    def fail() -> None:
        raise KeyError("what")

    async def run() -> str:
        try:
            await in_turn(fail)
        except KeyError as error:
            return str(error)
        return "nothing"

    assert asyncio.run(run()) == "'what'"


def test_long_texts_of_one_payer_leave_processors_to_others() -> None:
    """However many it sends: half of the processors at most have them, and another's text waits for none of them."""
    go, lock, num_begun = threading.Event(), threading.Lock(), 0
    most = max(1, (os.cpu_count() or 1) // 2)

    def work() -> None:
        nonlocal num_begun
        with lock:
            num_begun += 1
        assert go.wait(LIMIT_SECONDS)

    async def run() -> int:
        CLIENT.set("flood")
        flood = [asyncio.create_task(run_in_thread(work, size_chars=LONG_TEXT_CHARS)) for _ in range(most + 8)]
        await asyncio.sleep(0)
        CLIENT.set("other")
        assert await run_in_thread(lambda: "other's", size_chars=LONG_TEXT_CHARS) == "other's"
        # All threads of the usual pool but for one would have begun before this, had they been given the texts.
        num_before = num_begun
        go.set()
        await asyncio.gather(*flood)
        return num_before

    assert asyncio.run(run()) <= most
    assert num_begun == most + 8
