"""Server-sent events that stop working when the client goes, and requests that do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.api.errors import HANDLED, error_body
from service.logs import LOGGER

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def encode_event(data: Any) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def encode_typed_event(data: Any) -> bytes:
    """One event that is named by its `type`."""
    return b"event: " + data["type"].encode() + b"\n" + encode_event(data)


class JsonResponse(Response):
    """A JSON body from plain data, without FastAPI's second validation."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class EventStream(StreamingResponse):
    """Events of `chunks`, then `last`; an error becomes an event of its own, since the status is sent by then.

    `close` is called exactly once, however the stream ends; also if it never starts.

    encode  a chunk, or what was told of an error, to an event
    told    what is said of an error
    """

    def __init__(
        self,
        chunks: AsyncIterator[Any],
        close: Callable[[], None],
        *,
        encode: Callable[[Any], bytes] = encode_event,
        told: Callable[[Exception], Any] = error_body,
        last: bytes = DONE,
    ) -> None:
        self._encode, self._told, self._last = encode, told, last
        super().__init__(self._events(chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close
        self._error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
            if self._error is not None:
                scope["multilora.notes"].failed(self._error)

    async def _events(self, chunks: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield self._encode(chunk)
        except Exception as error:
            if not isinstance(error, HANDLED):
                LOGGER.exception("A stream failed unexpectedly.")
            self._error = error
            yield self._encode(self._told(error))
        if self._last:
            yield self._last


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled, and ClientDisconnect raised, if the client goes before that."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
