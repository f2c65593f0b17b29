"""Uploads that take long, or never end, and who must not wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import Unsupported
from adapters.store.store import AdapterStore, StoreLimits, UploadPart
from service.api.errors import BadRequest, QueueFull
from service.api.uploads.multipart import in_upload_thread
from service.api.uploads.receive import receive_upload
from service.api.uploads.slots import CONTENDED_BYTES_PER_SECOND, WINDOW_SECONDS, UploadSlot, UploadSlots
from service.fairness.client_identity import CLIENT
from tests.support.adapter_files import config_bytes, small_layout
from tests.support.limits import LIMIT_SECONDS


class SilentRequest:
    """A client that sends the beginning of a body, and then nothing more."""

    headers = {"content-type": "multipart/form-data; boundary=x"}  # noqa: RUF012
    scope: dict[str, Any] = {}  # noqa: RUF012

    async def stream(self) -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="adapter_config"\r\n\r\n{'
        await asyncio.Event().wait()


def test_an_upload_that_falls_silent_ends_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.uploads.receive.MAX_SILENCE_SECONDS", 0.05)
    store = AdapterStore(tmp_path, small_layout(), StoreLimits(free_disk_floor_bytes=0), base_name="base")

    async def drive() -> None:
        request: Any = SilentRequest()
        with store.begin() as upload, pytest.raises(BadRequest, match="Nothing of the upload has come"):
            await receive_upload(request, store.check_name, upload, UploadSlot("slow"))

    asyncio.run(asyncio.wait_for(drive(), LIMIT_SECONDS))
    assert list(tmp_path.glob("*/staging/*")) == []
    store.close()


def test_whoever_uploads_takes_no_thread_from_the_others() -> None:
    async def drive() -> None:
        release = threading.Event()
        uploads = [asyncio.create_task(in_upload_thread(release.wait)) for _ in range(40)]
        await asyncio.sleep(0)  # they have all been handed over
        assert await asyncio.to_thread(lambda: "listed") == "listed"
        release.set()
        assert all(await asyncio.gather(*uploads))

    asyncio.run(asyncio.wait_for(drive(), LIMIT_SECONDS))


class Clock:
    """Seconds, which pass when the test says so."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@contextlib.contextmanager
def paid_by(client: str) -> Iterator[None]:
    token = CLIENT.set(client)
    try:
        yield
    finally:
        CLIENT.reset(token)


@pytest.mark.parametrize(
    ("bytes_per_second", "is_taken_back"), [(1024, True), (CONTENDED_BYTES_PER_SECOND, False)], ids=["slow", "fast"]
)
def test_a_slow_upload_of_who_has_most_ends_when_another_wants_its_place(
    bytes_per_second: int, is_taken_back: bool
) -> None:
    clock = Clock()
    slots = UploadSlots(8, clock)
    with contextlib.ExitStack() as opened:
        with paid_by("hog"):
            slow = [opened.enter_context(slots.holding()) for _ in range(4)]
        with paid_by("other"):
            held = [opened.enter_context(slots.holding()) for _ in range(2)]
        for slot in (*slow, *held):
            with slot.waiting():
                clock.seconds += WINDOW_SECONDS
            slot.came(int(bytes_per_second * WINDOW_SECONDS))
        for slot in (*slow, *held):
            opened.enter_context(slot.waiting())
            slot.check()
        with paid_by("other"), pytest.raises(QueueFull, match="of which you have 2;"), slots.holding():
            pass
        for slot in held:
            slot.check()
        if is_taken_back:
            with pytest.raises(QueueFull, match="less than 65536 bytes a second"):
                slow[0].check()
        for slot in slow[is_taken_back:]:
            slot.check()
        with paid_by("hog"), pytest.raises(QueueFull, match="of which you have 4;"), slots.holding():
            pass
        for slot in held:  # who has most takes nothing from others
            slot.check()
    assert slots.num_open == 0


def test_an_upload_whose_place_is_taken_back_is_told_why(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, small_layout(), StoreLimits(free_disk_floor_bytes=0), base_name="base")

    async def drive() -> None:
        slot, waits = UploadSlot("slow"), asyncio.Event()

        class Request(SilentRequest):
            async def stream(self) -> AsyncIterator[bytes]:
                yield b"--x"
                waits.set()
                await asyncio.Event().wait()

        async def receive() -> None:
            request: Any = Request()
            with store.begin() as upload, pytest.raises(QueueFull, match="Others wait to upload"):
                await receive_upload(request, store.check_name, upload, slot)

        receiving = asyncio.create_task(receive())
        await waits.wait()
        slot.revoke()
        await receiving

    asyncio.run(asyncio.wait_for(drive(), LIMIT_SECONDS))
    assert list(tmp_path.glob("*/staging/*")) == []
    store.close()


HEAD = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n'
PIECE = bytes(2 << 20)  # more than is collected before it is written


def test_a_refused_configuration_ends_an_upload_whose_client_says_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused was being written when the client fell silent."""
    monkeypatch.setattr("service.api.uploads.receive.MAX_SILENCE_SECONDS", 2 * LIMIT_SECONDS)
    store = AdapterStore(tmp_path, small_layout(), StoreLimits(free_disk_floor_bytes=0), base_name="base")

    class Request(SilentRequest):
        async def stream(self) -> AsyncIterator[bytes]:
            yield HEAD % b"adapter_config" + config_bytes(layer_replication=[[0, 1]])
            yield b"\r\n" + HEAD % b"adapter_model" + PIECE
            await asyncio.Event().wait()

    async def drive() -> None:
        request: Any = Request()
        with store.begin() as upload, pytest.raises(Unsupported, match="layer_replication"):
            await receive_upload(request, store.check_name, upload, UploadSlot("slow"))

    asyncio.run(asyncio.wait_for(drive(), LIMIT_SECONDS))
    assert list(tmp_path.glob("*/staging/*")) == []
    store.close()


def test_an_upload_comes_while_what_came_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AdapterStore(tmp_path, small_layout(), StoreLimits(free_disk_floor_bytes=0), base_name="base")
    has_come, write = threading.Event(), UploadPart.write

    def write_late(part: UploadPart, data: bytes) -> int:
        assert has_come.wait(LIMIT_SECONDS)
        return write(part, data)

    monkeypatch.setattr(UploadPart, "write", write_late)

    class Request(SilentRequest):
        async def stream(self) -> AsyncIterator[bytes]:
            yield HEAD % b"adapter_model" + PIECE
            has_come.set()
            yield PIECE + b"\r\n--x--\r\n"

    async def drive() -> None:
        request: Any = Request()
        with store.begin() as upload:
            await receive_upload(request, store.check_name, upload, UploadSlot("fast"))
            (staged,) = tmp_path.glob("*/staging/*/*")
            assert staged.stat().st_size == 2 * len(PIECE)

    asyncio.run(asyncio.wait_for(drive(), LIMIT_SECONDS))
    store.close()
