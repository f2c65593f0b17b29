"""Threads of the API: a payer that fills them keeps nobody else out."""

from __future__ import annotations

import asyncio
import threading

from service.api.threads import in_turn
from service.fair_pool import FairPool
from service.payer import PAYER


def test_another_payer_s_work_is_next_however_much_one_has_sent() -> None:
    """One thread, which the first payer's work has, and nine times as much of it waits."""
    go, done = threading.Event(), list[str]()
    pool = FairPool(1, "test")

    def work(name: str, *, waits: bool = False) -> str:
        if waits:
            assert go.wait(60)
        done.append(f"{name} {PAYER.get()}")
        return name

    async def run() -> None:
        PAYER.set("flood")
        first = asyncio.create_task(in_turn(work, "first", pool=pool, waits=True))
        rest = [asyncio.create_task(in_turn(work, str(number), pool=pool)) for number in range(9)]
        await asyncio.sleep(0)
        PAYER.set("other")
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
