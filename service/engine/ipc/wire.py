"""How messages cross the socket between the API process and the engine process; the only place that knows.

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
    """What is said by one connection: all of one turn of the event loop is one frame, in the order in which it was
    said. An engine looks for news between two steps, and what comes together is computed together.

    Who owns: messages belong to their connection, and go with it. Everything is in the event loop that makes it.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        self._unsent: list[msgspec.Raw] = []

    def send(self, message: _Message) -> None:
        """Never waits. What msgpack cannot express is raised to who says it, and harms nobody else's message."""
        encoded = msgspec.Raw(_encoder.encode(message))
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(encoded)

    def write(self, data: bytes) -> None:
        """Bytes that are no message, at once, before anything is said. Of a connection that has just ended nobody may
        know yet: uvloop, which Ray's loops are, raises when one is written to, where asyncio's own loop does not
        mind."""
        if not self._writer.is_closing():
            self._writer.write(data)

    @property
    def num_unread_bytes(self) -> int:
        """What the system has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    def close(self) -> None:
        """After what has been said."""
        self._flush()
        self._writer.close()

    def abort(self) -> None:
        """Now, whatever is still to be written."""
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
    """What somebody who may use the engine says next; None if they have gone, or speak otherwise."""
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
