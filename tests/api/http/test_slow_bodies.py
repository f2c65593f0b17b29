"""Bodies that another HTTP server reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.api.errors import RequestTimeout
from service.api.http.slow_bodies import BoundedBodies

STALL_LIMIT_SECONDS = 30.0


class _QuickLoop(asyncio.SelectorEventLoop):
    """Time passes only while everybody sleeps, and then at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now_seconds = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        look = selector.select

        def select(timeout: float | None = None) -> Any:
            self._now_seconds += timeout or 0.0
            return look(0)

        selector.select = select

    def time(self) -> float:
        return self._now_seconds


def _run(work: Coroutine[Any, Any, bytes]) -> bytes:
    with asyncio.Runner(loop_factory=_QuickLoop) as runner:
        return runner.run(work)


async def _read(pieces: AsyncIterator[Message], num_more: int = 0, busy_seconds: float = 0.0) -> bytes:
    """The body, as an application reads it that is busy after each piece, and asks `num_more` times for what comes
    after the last."""
    read = bytearray()

    async def application(_scope: Scope, receive: Receive, _send: Send) -> None:
        message: Message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            read.extend(message["body"])
            await asyncio.sleep(busy_seconds)
        for _ in range(num_more):
            await receive()

    async def send(_message: Message) -> None: ...

    came: asyncio.Queue[Message] = asyncio.Queue()

    async def come() -> None:
        async for piece in pieces:
            came.put_nowait(piece)

    coming = asyncio.create_task(come())
    try:
        await BoundedBodies(application, STALL_LIMIT_SECONDS)({"type": "http"}, came.get, send)
    finally:
        coming.cancel()
    return bytes(read)


def _piece(body: bytes, *, more_body: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


async def _silence() -> AsyncIterator[Message]:
    yield _piece(b"{")
    await asyncio.Event().wait()


async def _drip() -> AsyncIterator[Message]:
    while True:
        await asyncio.sleep(STALL_LIMIT_SECONDS / 5)
        yield _piece(b"a")


@pytest.mark.parametrize("pieces", [_silence, _drip])
def test_a_body_that_comes_too_slowly_is_refused(pieces: Callable[[], AsyncIterator[Message]]) -> None:
    with pytest.raises(RequestTimeout, match="body"):
        _run(_read(pieces()))


def test_one_that_is_slow_but_comes_is_read_however_long_it_takes() -> None:
    async def pieces() -> AsyncIterator[Message]:
        for _ in range(10):
            await asyncio.sleep(STALL_LIMIT_SECONDS / 2)
            yield _piece(b"a" * 100_000)
        yield _piece(b"", more_body=False)

    assert len(_run(_read(pieces()))) == 1_000_000


def test_what_the_application_does_meanwhile_is_no_fault_of_the_client() -> None:
    async def pieces() -> AsyncIterator[Message]:
        for index in range(5):
            yield _piece(b"a", more_body=index < 4)

    assert _run(_read(pieces(), busy_seconds=STALL_LIMIT_SECONDS)) == b"aaaaa"


def test_who_waits_for_its_answer_may_be_silent() -> None:
    async def pieces() -> AsyncIterator[Message]:
        yield _piece(b"all", more_body=False)
        await asyncio.sleep(STALL_LIMIT_SECONDS * 3)
        yield {"type": "http.disconnect"}

    assert _run(_read(pieces(), num_more=1)) == b"all"
