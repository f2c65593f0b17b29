"""Answers that stream: what the sequences of a request bring, as events, to the last or until the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Protocol

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.api.errors import HANDLED, error_body
from service.api.generation.job import GenerationJob
from service.api.generation.logprobs import cost_chars
from service.api.generation.sequence import OutputChunk
from service.api.http.sse import DONE, encode_event
from service.fairness.thread_pool import run_in_thread
from service.logs import LOGGER

# Of a stream with pings, how long a client that waits for the first token hears nothing.
PING_SECONDS = 10.0


class Chunks(Protocol):
    """The chunks of a stream: plain data, one event each, or an event's bytes."""

    def first(self) -> Iterable[Any]:
        """The chunks before any output."""

    def added(self, index: int, piece: OutputChunk) -> Iterable[Any]:
        """The chunks for new output of the choice `index`; their cost grows with its log probabilities."""

    def last(self) -> Iterable[Any]:
        """The chunks behind the end of all choices."""


class Connection(Protocol):
    """The stream's view of `service.api.http.protocol.Protocol`."""

    @property
    def can_write_pieces(self) -> bool:
        """Whether `write_pieces` may be called now."""

    def write_pieces(self, pieces: Iterable[bytes]) -> None:
        """Write pieces of the answer's body at once."""


class EventStream(Response):
    """The chunks of a job, then `last`; an error becomes an event of its own, since the status is sent by then.

    The job is closed exactly once, however the stream ends; also if it never starts.

    What the engine says is written by who brings it, without a turn of the response's task. The task does what may have
    to wait: the beginning, the end, what is long, and all that comes while the client has not read what was written.

    encode  a chunk, or the body of an error, to an event
    body_of  the body of an error
    settle  awaited once before the last event, with the error that ends the stream, or None; also if the client goes
    ping    an event for every `PING_SECONDS` in which nothing else came by the task; none where it is empty
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        job: GenerationJob,
        chunks: Chunks,
        *,
        encode: Callable[[Any], bytes] = encode_event,
        body_of: Callable[[Exception], Any] = error_body,
        settle: Callable[[Exception | None], Awaitable[None]] | None = None,
        last: bytes = DONE,
        ping: bytes = b"",
    ) -> None:
        self._job, self._chunks = job, chunks
        self._encode, self._body_of, self._last, self._ping = encode, body_of, last, ping
        self._unsettled = settle
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache"})
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._is_gone = self._is_idle = False
        # For the task: polled output that is too long for the listener, and the error that polling raised.
        self._long: tuple[int, OutputChunk] | None = None
        self._failure: Exception | None = None
        self._connection: Connection | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. ClientDisconnect where what is sent says that the client has gone."""
        self._connection = scope.get("multilora.connection")
        watching = asyncio.create_task(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_all(send)
            if not self._is_gone:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._is_idle = False
            watching.cancel()
            self._job.close()
            await self._settle(None)
            if self._error is not None:
                scope["multilora.notes"].failed(self._error)
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, receive: Receive) -> None:
        """Until the client goes."""
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            self._is_gone = True
            self._news.set()

    async def _send_all(self, send: Send) -> None:
        try:
            await self._send_chunks(send, self._chunks.first())
            self._job.listen(self._note_news)
            while not self._is_gone and not (self._job.is_finished and self._long is None):
                self._news.clear()
                while not self._is_gone and (news := self._poll()) is not None:
                    await self._send_chunks(send, await self._added(*news))
                if not self._job.is_finished:
                    await self._wait(send)
            await self._settle(None)
            await self._end(send, self._chunks.last())
        except ClientDisconnect:
            raise
        except Exception as error:
            if not isinstance(error, HANDLED):
                LOGGER.exception("A stream failed unexpectedly.")
            self._error = error
            await self._settle(error)
            await self._end(send, [self._body_of(error)])

    async def _settle(self, error: Exception | None) -> None:
        settle, self._unsettled = self._unsettled, None
        if settle is not None:
            await settle(error)

    async def _wait(self, send: Send) -> None:
        """Until there is news for the task, which the listener writes meanwhile. A ping is the task's own to write."""
        while not self._news.is_set():
            self._is_idle = True
            try:
                async with asyncio.timeout(PING_SECONDS if self._ping else None):
                    await self._news.wait()
            except TimeoutError:
                self._is_idle = False
                await self._write(send, self._ping)
        self._is_idle = False

    def _note_news(self) -> None:
        """Write what is new if that can be done at once; leave it to the task otherwise."""
        connection = self._connection
        if connection is None or not self._is_idle:
            self._news.set()
            return
        self._is_idle = False
        try:
            self._is_idle = self._write_news(connection)
        except Exception as error:
            self._failure = error
        if not self._is_idle:
            self._news.set()

    def _write_news(self, connection: Connection) -> bool:
        """Whether all that is new has been written, and more is to come."""
        has_news = True
        while has_news:
            if not connection.can_write_pieces:
                return False
            if (news := self._job.poll()) is not None:
                index, piece = news
                if piece.logprobs or piece.prompt_logprobs:
                    self._long = news
                    return False
                connection.write_pieces(map(self._event, self._chunks.added(index, piece)))
            has_news = self._job.has_news
        return not self._job.is_finished

    def _poll(self) -> tuple[int, OutputChunk] | None:
        if self._failure is not None:
            raise self._failure
        if self._long is None:
            return self._job.poll()
        news, self._long = self._long, None
        return news

    async def _added(self, index: int, piece: OutputChunk) -> Iterable[Any]:
        chunks = self._chunks.added(index, piece)
        size_chars = cost_chars([piece])
        return await run_in_thread(partial(list, chunks), size_chars=size_chars) if size_chars else chunks

    async def _send_chunks(self, send: Send, chunks: Iterable[Any]) -> None:
        for chunk in chunks:
            await self._write(send, self._event(chunk))

    async def _end(self, send: Send, chunks: Iterable[Any]) -> None:
        """Send the last chunks and that there are no more, in one write if that can be done at once."""
        events = [*map(self._event, chunks), *filter(None, [self._last])]
        if not self._is_gone and self._connection is not None and self._connection.can_write_pieces:
            self._connection.write_pieces(events)
            return
        for event in events:
            await self._write(send, event)

    def _event(self, chunk: Any) -> bytes:
        return chunk if isinstance(chunk, bytes) else self._encode(chunk)

    async def _write(self, send: Send, event: bytes) -> None:
        if self._is_gone:
            return
        try:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError as error:
            raise ClientDisconnect from error
