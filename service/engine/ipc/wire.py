"""Frames of messages on the socket between the API process and the engine process; the only module that knows them.

A frame is a 4-byte big-endian length and a msgpack array of messages, so that all output of a step is one write, and
all requests that came at the same time are there for one step. The first frame to the engine is its EngineOptions
instead.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from service.engine.ipc.config import EngineOptions
from service.engine.ipc.messages import FromEngine, ToEngine

_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_options_decoder = msgspec.msgpack.Decoder(EngineOptions)
_to_engine_decoder = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine_decoder = msgspec.msgpack.Decoder(list[FromEngine])


def frame(content: Sequence[ToEngine] | Sequence[FromEngine] | EngineOptions) -> bytes:
    """The bytes of one frame."""
    return _framed(_encoder.encode(content))


def _framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


_Message = TypeVar("_Message", ToEngine, FromEngine)


class Outbox(Generic[_Message]):
    """The messages that one connection sends: all of one iteration of the event loop are one frame, in their order. An
    engine reads messages between two steps, and requests that come together are computed together.

    Who owns: messages belong to their connection, and go with it. Everything is in the event loop that makes it.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        self._unsent: list[msgspec.Raw] = []

    def send(self, message: _Message) -> None:
        """Queue a message; never waits. A message that msgpack cannot express raises here and harms no other one."""
        encoded = msgspec.Raw(_encoder.encode(message))
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(encoded)

    def write(self, data: bytes) -> None:
        """Write bytes that are no message at once, before any message. A connection may have just ended: uvloop, which
        Ray uses, raises on a write to it, and asyncio's own loop does not."""
        if not self._writer.is_closing():
            self._writer.write(data)

    @property
    def num_unread_bytes(self) -> int:
        """Bytes that are written and not sent yet."""
        return self._writer.transport.get_write_buffer_size()

    def close(self) -> None:
        """Close after the queued messages."""
        self._flush()
        self._writer.close()

    def abort(self) -> None:
        """Close now, and drop unsent messages."""
        self._unsent.clear()
        self._writer.transport.abort()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent:
            self.write(_framed(_encoder.encode(unsent)))


class EngineSide:
    """The engine's end of the socket; blocking. One thread may read while another writes."""

    def __init__(self, file_descriptor: int) -> None:
        self._socket = socket.socket(fileno=file_descriptor)
        self._socket.setblocking(True)

    def read_options(self) -> EngineOptions | None:
        """The first frame; None if the other side has gone."""
        payload = self._read_payload()
        return None if payload is None else _options_decoder.decode(payload)

    def read(self) -> list[ToEngine] | None:
        """The next messages, waiting for them; None if the other side has gone."""
        payload = self._read_payload()
        return None if payload is None else _to_engine_decoder.decode(payload)

    def write(self, messages: Sequence[FromEngine]) -> None:
        self._socket.sendall(frame(messages))

    def _read_payload(self) -> bytes | None:
        header = self._read_exactly(_LENGTH_BYTES)
        return None if header is None else self._read_exactly(int.from_bytes(header, "big"))

    def _read_exactly(self, num_bytes: int) -> bytes | None:
        parts: list[bytes] = []
        while num_bytes:
            try:
                part = self._socket.recv(min(num_bytes, 2**20))
            except ConnectionError:
                return None
            if not part:
                return None
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


async def read_to_engine(reader: asyncio.StreamReader) -> list[ToEngine] | None:
    """The next messages of a client of the engine; None if it has gone, or does not send frames."""
    try:
        header = await reader.readexactly(_LENGTH_BYTES)
        return _to_engine_decoder.decode(await reader.readexactly(int.from_bytes(header, "big")))
    except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
        return None


async def read_from_engine(reader: asyncio.StreamReader) -> list[FromEngine] | None:
    """The engine's next messages; None if it has gone, or speaks otherwise, as what has its port after it may."""
    try:
        header = await reader.readexactly(_LENGTH_BYTES)
        return _from_engine_decoder.decode(await reader.readexactly(int.from_bytes(header, "big")))
    except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
        return None
