"""Uploads that take long, or never end, and who must not wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from adapters.store import AdapterStore, StoreLimits
from service.api.errors import BadRequest
from service.api.upload import in_upload_thread, receive_upload
from tests.support.adapter_files import small_layout
from tests.support.limits import LIMIT_SECONDS


class SilentRequest:
    """A client that sends the beginning of a body, and then nothing more."""

    headers = {"content-type": "multipart/form-data; boundary=x"}  # noqa: RUF012

    async def stream(self) -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="adapter_config"\r\n\r\n{'
        await asyncio.Event().wait()


def test_an_upload_that_falls_silent_ends_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.upload.MAX_SILENCE_SECONDS", 0.05)
    store = AdapterStore(tmp_path, small_layout(), StoreLimits(free_disk_floor_bytes=0), base_name="base")

    async def drive() -> None:
        request: Any = SilentRequest()
        with store.begin() as upload, pytest.raises(BadRequest, match="Nothing of the upload has come"):
            await receive_upload(request, store.check_name, upload)

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
