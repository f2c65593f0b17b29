"""The body of an upload as it comes: while a piece is parsed and written, the next one is received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from queue import SimpleQueue
from typing import Protocol

from fastapi import Request
from python_multipart.multipart import parse_options_header

from adapters.store.store import Upload
from service.api.errors import BadRequest
from service.api.uploads.multipart import MultipartUpload, Sent, in_upload_thread
from service.api.uploads.slots import UploadSlot
from service.api.uploads.tensors_json import MAX_BESIDE_BYTES

# The parser is fed at least so much at a time, so that small network reads do not cost a thread switch each.
_FEED_BYTES = 1 << 19
# Batches of that which may wait while one is written.
_MOST_UNWRITTEN = 2
# Pieces of less are joined: each is an object.
_LONE_BYTES = 1 << 14
MAX_SILENCE_SECONDS = 60.0


class Parts(Protocol):
    """A body that is fed into an `Upload`; see `MultipartUpload`."""

    def feed_all(self, pieces: Iterable[bytes | bytearray]) -> None: ...
    def finish(self) -> Sent: ...
    def close(self) -> None: ...


# The body's parts for a request, what checks a name, and the upload. Raises BadRequest.
MakeParts = Callable[[Request, Callable[[str], object], Upload], Parts]


def is_multipart(request: Request) -> bool:
    """Whether the request says so of its body."""
    return parse_options_header(request.headers.get("content-type"))[0] == b"multipart/form-data"


def announced_bytes(request: Request) -> int:
    """Fewest bytes that the files have in a body of the announced Content-Length; 0 where there is none."""
    announced = max(0, int(request.headers.get("content-length", 0)) - MAX_BESIDE_BYTES)
    # Base64 takes four bytes for three, and some writers escape each `+` or `/`.
    return announced if is_multipart(request) else announced * 2 // 3


def multipart(request: Request, check_name: Callable[[str], object], upload: Upload) -> MultipartUpload:
    """The parts of a multipart body. Raises BadRequest for another one."""
    _, options = parse_options_header(request.headers.get("content-type"))
    if not is_multipart(request) or not options.get(b"boundary"):
        raise BadRequest("Send the adapter as multipart/form-data, for example with curl -F.")
    return MultipartUpload(check_name, upload, options[b"boundary"])


async def receive_upload(
    request: Request,
    check_name: Callable[[str], object],
    upload: Upload,
    slot: UploadSlot,
    make_parts: MakeParts = multipart,
) -> Sent:
    """Read the request's body into `upload`; its text parts. Raises BadRequest, QueueFull when its slot is revoked,
    what `check_name` raises, and the errors of the store."""
    parts = make_parts(request, check_name, upload)
    feeding = _Feeding(parts, slot)
    if (connection := request.scope.get("multilora.connection")) is not None:  # another HTTP server has none
        connection.reads_upload()
    try:
        async for chunk in _chunks(request, slot, feeding.check):
            await feeding.add(chunk)
        await feeding.end()
        return parts.finish()
    finally:
        try:
            await feeding.settle()
        finally:
            parts.close()


class _Feeding:
    """Has what comes parsed and written in one thread, which is at most `_MOST_UNWRITTEN` batches behind."""

    def __init__(self, parts: Parts, slot: UploadSlot) -> None:
        self._parts, self._slot = parts, slot
        self._pieces: list[bytes | bytearray] = []
        self._num_bytes = 0
        self._batches: SimpleQueue[list[bytes | bytearray] | None] = SimpleQueue()
        self._num_unwritten = 0
        self._has_room = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._written: asyncio.Future[None] | None = asyncio.ensure_future(in_upload_thread(self._write_all))
        self._written.add_done_callback(self._wake_if_refused)

    async def add(self, chunk: bytes) -> None:
        """More of the body; waits while there is too much. Raises what `Parts.feed_all` does."""
        if len(chunk) >= _LONE_BYTES:
            self._pieces.append(chunk)  # and nobody copies it
        elif self._pieces and isinstance(self._pieces[-1], bytearray):
            self._pieces[-1] += chunk
        else:
            self._pieces.append(bytearray(chunk))
        self._num_bytes += len(chunk)
        if self._num_bytes >= _FEED_BYTES:
            self._hand_over()
            while self._num_unwritten > _MOST_UNWRITTEN and self._written is not None and not self._written.done():
                self._has_room.clear()
                await self._has_room.wait()
            self.check()

    async def end(self) -> None:
        """All has come; returns when it is written. Raises as `add` does."""
        self._hand_over()
        await self.settle()
        self.check()

    def check(self) -> None:
        """Raise what the thread has raised, if it has ended."""
        if self._written is not None and self._written.done():
            written, self._written = self._written, None
            try:
                written.result()
            finally:
                del written  # the error's traceback leads here: with it, it would go round in a circle

    async def settle(self) -> None:
        """The thread has written what it was given, and has ended."""
        self._batches.put(None)
        if self._written is not None:
            await asyncio.wait((self._written,))  # which a cancellation of ours does not cancel

    def _hand_over(self) -> None:
        self._num_unwritten += 1
        self._batches.put(self._pieces)
        self._pieces, self._num_bytes = [], 0

    def _write_all(self) -> None:
        """Runs in the thread."""
        for batch in iter(self._batches.get, None):
            self._parts.feed_all(batch)
            self._loop.call_soon_threadsafe(self._note_written)

    def _note_written(self) -> None:
        self._num_unwritten -= 1
        self._has_room.set()

    def _wake_if_refused(self, written: asyncio.Future[None]) -> None:
        self._has_room.set()
        if not written.cancelled() and written.exception() is not None:
            self._slot.wake()


async def _chunks(request: Request, slot: UploadSlot, check: Callable[[], None]) -> AsyncIterator[bytes]:
    """The body, as it comes. BadRequest when nothing has come for too long: a client that lost its network says
    nothing, and its bytes would stay in the store's staging directory. QueueFull when its slot is revoked, and what
    `check` raises, which is called after each wait."""
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(MAX_SILENCE_SECONDS) as timeout:
                with slot.waiting(timeout):
                    chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            check()
            slot.check()
            raise BadRequest(
                f"Nothing of the upload has come for {MAX_SILENCE_SECONDS:g} seconds; send it again."
            ) from None
        slot.came(len(chunk))
        check()
        slot.check()
        yield chunk
