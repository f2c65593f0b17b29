"""JSON and server-sent events as bytes, and work that stops when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def encode_event(data: Any) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class TextEvent:
    """An event that comes again and again with another text: what stands around the text is encoded once.

    make  the event with a text
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        mark = uuid4().hex  # which nobody can have written anywhere else in the event
        self._before, self._behind = encode_event(make(mark)).split(msgspec.json.encode(mark))

    def __call__(self, text: str) -> bytes:
        """The bytes that `encode_event` makes of the event with this text."""
        return self._before + msgspec.json.encode(text) + self._behind


def encode_typed_event(data: Any) -> bytes:
    """One event that is named by its `type`."""
    return b"event: " + data["type"].encode() + b"\n" + encode_event(data)


class JsonResponse(Response):
    """A JSON body from plain data, without FastAPI's second validation."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


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
