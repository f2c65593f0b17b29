"""An engine for servers in other processes, on other machines: the messages of `service.engine.ipc.messages` over TCP.

Who connects says a token first, and gets Ready, where the engine holds adapters, and what the engine says of the
requests that came by this connection. A connection lasts as long as the engine's life: it begins when the engine is
ready, and when that ends the reason is the last message. Requests of a connection that breaks are aborted; it breaks
too when the other host says nothing any more.

The bytes are not encrypted; anyone who knows the token, or reads along, can use the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import msgspec

from service.cluster.dispatch import RemainingWork
from service.engine.ipc.client import EngineClient
from service.engine.ipc.link import EngineDied, TokenStream
from service.engine.ipc.messages import (
    Abort,
    Cordon,
    Drain,
    Evict,
    Fatal,
    FromEngine,
    Load,
    Move,
    Pause,
    Pin,
    Ping,
    ResetPrefixCache,
    Resume,
    Sleep,
    Stats,
    Submit,
    ToEngine,
    Tokens,
)
from service.engine.ipc.wire import Outbox, read_to_engine
from service.ray_serve.tcp_keepalive import end_when_vanished

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
TOKEN_SECONDS = 5.0
# A server with so many unread bytes stands still: far more than a few thousand sequences produce in a minute.
MOST_UNREAD_BYTES = 1 << 26


@dataclass(eq=False)
class _Connection:
    """A server that uses the engine.

    left  remaining work of its requests, by id
    """

    outbox: Outbox[FromEngine]
    left: dict[str, RemainingWork] = field(default_factory=dict)

    def send(self, message: FromEngine) -> None:
        self.outbox.send(message)
        if self.outbox.num_unread_bytes > MOST_UNREAD_BYTES:
            log.error("a server that reads nothing is let go")
            self.outbox.abort()

    def end(self, error: str) -> None:
        self.send(Fatal(error))
        self.outbox.close()


class Relay:
    """Serves an engine to servers that know `token`, 32 random bytes. Everything is in the engine client's loop.

    port  that it listens on, 0 before `start`
    """

    def __init__(self, client: EngineClient) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.port = 0
        self._client = client
        self._cordoned: str | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._nobody = asyncio.Event()
        client.on_stats(self._forward_stats)
        client.on_end(self._end_all)

    @property
    def queued_tokens(self) -> int:
        """Tokens of remaining work of all open requests."""
        return sum(left.expected_tokens for one in self._connections for left in one.left.values())

    async def start(self, host: str) -> None:
        """Listen on this address, on a free port. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cordon(self, reason: str | None) -> None:
        """Make servers send no new requests, for a reason that is one word, while they know another engine; None ends
        that. Requests that were sent go on."""
        if reason != self._cordoned:
            self._cordoned = reason
            for one in self._connections:
                one.send(Cordon(reason))

    async def close(self, limit_seconds: float) -> None:
        """Wait until no server is connected, at most for this time, and end."""
        if self._connections:
            self._nobody.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nobody.wait(), limit_seconds)
        if self._server is not None:
            self._server.close()
        self._end_all("The engine is shutting down.")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end_when_vanished(writer)
        connection = _Connection(Outbox(writer))
        try:
            if not await self._knows_token(reader):
                return
            try:
                ready = await self._client.wait_ready()
            except EngineDied as error:
                connection.end(str(error))
                return
            connection.send(ready)
            if self._cordoned is not None:
                connection.send(Cordon(self._cordoned))
            if self._client.stats is not None:
                connection.send(msgspec.structs.replace(self._client.stats, moved_adapters=dict(self._client.tiers)))
            self._connections.add(connection)
            while (messages := await read_to_engine(reader)) is not None:
                for message in messages:
                    self._take(connection, message)
        finally:
            self._leave(connection)

    async def _knows_token(self, reader: asyncio.StreamReader) -> bool:
        try:
            said = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), TOKEN_SECONDS)
        except (asyncio.IncompleteReadError, OSError):
            return False
        return hmac.compare_digest(said, self.token)

    def _take(self, connection: _Connection, message: ToEngine) -> None:
        match message:
            case Submit() | Pause() | Resume():  # a pause is one for all the engine's servers
                if isinstance(message, Submit):
                    connection.left[message.request_id] = RemainingWork.of(message)
                stream = self._client.submit(message)
                stream.listen(partial(self._forward, connection, message.request_id, stream))
            case Abort():
                connection.left.pop(message.request_id, None)
                self._client.abort(message.request_id)
            case Move():
                self._client.move(message.request_id, message.adapter, message.adapter_rows)
            case Load():
                self._client.load(message.adapter)
            case Evict():
                self._client.evict(message.adapter)
            case Pin():  # the pins of the store, which are the same for all its servers
                self._client.pin(message.adapters)
            case ResetPrefixCache():
                self._client.reset_prefix_cache()
            case Ping():
                self._client.ping()
            case Drain() | Sleep():
                log.error("a server that may not has asked for the engine's end or sleep")
            case _:
                assert_never(message)

    def _forward(self, connection: _Connection, request_id: str, stream: TokenStream) -> None:
        # The end of the connection reports an engine that died.
        with contextlib.suppress(EngineDied):
            while (message := stream.poll()) is not None:
                if isinstance(message, Tokens):
                    left = connection.left.get(request_id)
                    if left is not None:
                        left.take(len(message.token_ids))
                else:
                    connection.left.pop(request_id, None)
                connection.send(message)

    def _forward_stats(self, stats: Stats) -> None:
        for one in self._connections:
            one.send(stats)

    def _end_all(self, error: str) -> None:
        for one in list(self._connections):
            one.end(error)

    def _leave(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        for request_id in connection.left:
            self._client.abort(request_id)
        connection.left.clear()
        connection.outbox.close()
        if not self._connections:
            self._nobody.set()
