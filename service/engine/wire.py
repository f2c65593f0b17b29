"""How messages cross the socket between the API process and the engine process; the only place that knows.

A frame is a 4-byte big-endian length and a msgpack array of messages, so that all output of a step is one write. The
first frame to the engine is its EngineOptions instead.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import msgspec

from service.engine.config import EngineOptions
from service.engine.messages import FromEngine, ToEngine

_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_options_decoder = msgspec.msgpack.Decoder(EngineOptions)
_to_engine_decoder = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine_decoder = msgspec.msgpack.Decoder(list[FromEngine])


def frame(content: Sequence[ToEngine] | Sequence[FromEngine] | EngineOptions) -> bytes:
    """The bytes of one frame."""
    payload = _encoder.encode(content)
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


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
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
        return None


async def read_from_engine(reader: asyncio.StreamReader) -> list[FromEngine] | None:
    """The engine's next messages; None if it has gone."""
    try:
        header = await reader.readexactly(_LENGTH_BYTES)
        return _from_engine_decoder.decode(await reader.readexactly(int.from_bytes(header, "big")))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
