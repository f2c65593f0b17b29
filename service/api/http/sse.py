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
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_LARGE_ANSWER_BYTES = 1 << 16


def encode_event(data: Any) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class TextEvent:
    """An event that comes again and again with another text: what stands around the text is encoded once.

    make    the event with a text
    encode  as for `service.api.generation.stream.EventStream`
    """

    def __init__(self, make: Callable[[str], Any], encode: Callable[[Any], bytes] = encode_event) -> None:
        mark = uuid4().hex  # which nobody can have written anywhere else in the event
        self._before, self._behind = encode(make(mark)).split(msgspec.json.encode(mark))

    def __call__(self, text: str) -> bytes:
        """The bytes that `encode` makes of the event with this text."""
        return self._before + msgspec.json.encode(text) + self._behind


def encode_typed_event(data: Any) -> bytes:
    """One event that is named by its `type`."""
    return b"event: " + data["type"].encode() + b"\n" + encode_event(data)


class JsonResponse(Response):
    """A JSON body from plain data, without FastAPI's second validation."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class _HeldAnswer(JsonResponse):
    """An answer that holds something until it has been sent."""

    def __init__(self, content: Any, close: Callable[[], None]) -> None:
        super().__init__(content)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_wait(message: Message) -> None:
            # The server waits for what is unsent before the next message, and for nothing after the last one.
            if message["type"] == "http.response.body" and len(self.body) > _LARGE_ANSWER_BYTES:
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            await super().__call__(scope, receive, send_and_wait)
        finally:
            self._close()


def json_answer(content: Any, close: Callable[[], None]) -> Response:
    """Plain data as JSON. `close` is called exactly once: when the answer has been sent, or its client has gone."""
    try:
        return _HeldAnswer(content, close)
    except BaseException:
        close()
        raise


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled, and ClientDisconnect raised, if the client goes before that.

    It runs in the caller's task: what need not wait is done without a turn of the event loop, so that of many requests
    that come at once the first is not held up by the beginnings of all others.
    """
    task = asyncio.current_task()
    assert task is not None
    watching = asyncio.create_task(_cancel_at_disconnect(request, task))
    try:
        return await work
    except asyncio.CancelledError:
        if not watching.done() or watching.cancelled() or task.uncancel():  # somebody else wants its end
            raise
        raise ClientDisconnect from None
    finally:
        watching.cancel()


async def _cancel_at_disconnect(request: Request, task: asyncio.Task[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()
