"""HTTP/1.1 as uvicorn speaks it with h11, with this server's shape for the one error that uvicorn answers by itself,
and an end for connections whose client does not read."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.api.errors import BadRequest, error_body
from service.logs import LOGGER

# A client that takes less than this of what waits for it, over the limit of `Protocol.look`, counts as stalled.
MIN_BYTES_PER_SECOND = 1024

_NO_HTTP = BadRequest(
    "This is no HTTP/1.1 request, or its head is longer than the server takes; look at the client, or at the proxy "
    "before this server."
)


class _Mark(NamedTuple):
    """What was to be done on a connection at some time."""

    at_seconds: float
    num_bytes: int


class Protocol(H11Protocol):
    """One connection. The server calls `look` now and then."""

    _unsent: _Mark | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """What the kernel does not take waits alone: nothing is added to it before it is gone."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        """Something waits to be written."""
        super().pause_writing()
        self._unsent = _Mark(self.loop.time(), self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Nothing waits any more."""
        super().resume_writing()
        self._unsent = None

    def look(self, stall_limit_seconds: float) -> None:
        """End the connection if its client has been slower than MIN_BYTES_PER_SECOND for so long."""
        now = self.loop.time()
        if self._unsent is not None and now - self._unsent.at_seconds >= stall_limit_seconds:
            num_left = self.transport.get_write_buffer_size()
            if self._unsent.num_bytes - num_left < MIN_BYTES_PER_SECOND * stall_limit_seconds:
                LOGGER.info("A connection is closed: its client does not read.")
                self.transport.abort()
            self._unsent = _Mark(now, num_left)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer what h11 cannot read, and close. uvicorn has logged it; no application has seen it."""
        body = msgspec.json.encode(error_body(_NO_HTTP))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events = (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
