"""A connection in the process of its server: what it has hold of."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from service.api.connections import ConnectionShares
from service.api.protocol import Protocol
from service.api.reading_turns import ReadingTurns
from tests.support.limits import LIMIT_SECONDS


class Thing:
    """What an application has of a request."""


async def some_passes() -> None:
    """Of the event loop: what is about to end needs fewer."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_a_connection_keeps_nothing_of_a_request_and_is_gone_when_it_is_closed() -> None:
    """Python's collector has nothing to do: of hundreds that are closed together it would make one long stretch."""
    things, connections = list[weakref.ref[Thing]](), list[weakref.ref[Protocol]]()

    async def application(scope: Any, _receive: object, send: Callable[..., Any]) -> None:
        scope["thing"] = Thing()
        things.append(weakref.ref(scope["thing"]))
        connections.append(weakref.ref(scope["multilora.connection"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        config = uvicorn.Config(application, log_config=None, proxy_headers=False)
        config.load()
        shares, turns, server_state = ConnectionShares(4), ReadingTurns(), ServerState()

        def make() -> Protocol:
            named: dict[str, Any] = {"config": config, "server_state": server_state, "app_state": {}}
            return Protocol(shares, turns, lambda _status: None, **named)

        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        client = socket.create_connection(server.sockets[0].getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while not server_state.total_requests:
            await asyncio.sleep(0)
        await some_passes()
        assert things[0]() is None
        assert connections[0]() is not None
        client.close()
        while server_state.connections:
            await asyncio.sleep(0)
        await some_passes()
        assert connections[0]() is None
        server.close()

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
    finally:
        gc.enable()
