"""/health asks the disk, and holds up nobody for that."""

from __future__ import annotations

import asyncio
import threading

from adapters.files.durable_files import StoreHealth, WriteFault
from tests.support.limits import LIMIT_SECONDS


class Disk:
    """Looks end when they are let go, with what is the matter then."""

    def __init__(self) -> None:
        self.num_looks, self.begun = 0, threading.Event()
        self.go = threading.Semaphore(0)
        self.fault: WriteFault | None = None

    def look(self) -> WriteFault | None:
        self.num_looks += 1
        self.begun.set()
        assert self.go.acquire(timeout=LIMIT_SECONDS)
        return self.fault


async def begun(disk: Disk) -> None:
    while not disk.begun.is_set():
        await asyncio.sleep(0)
    disk.begun.clear()


def test_those_who_come_during_a_look_share_the_next() -> None:
    async def run() -> None:
        disk, looks = Disk(), StoreHealth(LIMIT_SECONDS)
        first = asyncio.create_task(looks.fault(disk.look))
        await begun(disk)
        others = [asyncio.create_task(looks.fault(disk.look)) for _ in range(1000)]
        await asyncio.sleep(0)  # they have all asked, and the loop goes on
        gone = others.pop()
        gone.cancel()
        disk.go.release()
        assert await first is None
        await begun(disk)
        disk.fault = "full"
        disk.go.release()
        assert set(await asyncio.gather(*others)) == {"full"}
        assert (disk.num_looks, gone.cancelled()) == (2, True)

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


def test_a_disk_that_does_not_answer_is_waited_for_once() -> None:
    async def run() -> None:
        disk, looks = Disk(), StoreHealth(0.0)
        assert [await looks.fault(disk.look) for _ in range(99)] == ["unreachable"] * 99
        await begun(disk)
        assert [await looks.fault(disk.look) for _ in range(99)] == ["unreachable"] * 99
        assert disk.num_looks == 1
        disk.go.release(2)

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
