"""A connection in the process of its server: what it has hold of."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from service.api.http.connection_limits import ConnectionShares
from service.api.http.protocol import Protocol
from service.api.http.read_scheduler import MOST_READ_BYTES, ReadScheduler
from tests.support.limits import LIMIT_SECONDS


class Thing:
    """What an application has of a request."""


async def some_passes() -> None:
    """Passes of the event loop: what is about to end needs fewer."""
    for _ in range(100):
        await asyncio.sleep(0)


async def started(
    application: Any, made: list[Protocol] | None = None, shares: ConnectionShares | None = None
) -> tuple[asyncio.Server, ServerState]:
    """The application, served on a port of its own. made: where its connections go."""
    config = uvicorn.Config(application, log_config=None, proxy_headers=False, timeout_keep_alive=3600)
    config.load()
    shares, turns, server_state = shares or ConnectionShares(4), ReadScheduler(), ServerState()

    def make() -> Protocol:
        named: dict[str, Any] = {"config": config, "server_state": server_state, "app_state": {}}
        protocol = Protocol(shares, turns, lambda _status: None, **named)
        if made is not None:
            made.append(protocol)
        return protocol

    return await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0), server_state


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
        server, server_state = await started(application)
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


def in_chunks(body: bytes, sizes: Sequence[int]) -> bytes:
    """A chunked body, whose chunks have these sizes in turn."""
    pieces, at = [], 0
    for size in itertools.cycle(sizes):
        piece = body[at : at + size]
        pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece))
        at += size
        if not piece:
            return b"".join(pieces)
    raise AssertionError("sizes has none")


@pytest.mark.parametrize("is_answered_first", [False, True])
@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
@pytest.mark.parametrize("chunk_sizes", [(), (65_536,), (300_000, 100, 5_000)])
def test_bodies_come_whole_however_they_are_cut_and_what_follows_is_the_next_request(
    is_answered_first: bool, expects: bytes, chunk_sizes: tuple[int, ...]
) -> None:
    """Also those of which nobody wants the rest, since the answer is out."""
    bodies = [random.Random(seed).randbytes(num) for seed, num in enumerate((0, 1, 3_000, 900_000, 65_536, 2_000_000))]
    received: list[bytes] = []

    async def application(_scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        answered = {"type": "http.response.body", "body": b"."}
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]}
        body, message = b"", {"more_body": True}
        while message.get("more_body") and not (is_answered_first and body):
            message = await receive()
            body += message.get("body", b"")
        received.append(body)
        await send(start)
        await send(answered)

    async def run() -> None:
        server, _ = await started(application)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        head = b"PUT / HTTP/1.1\r\nHost: x\r\n" + expects
        if chunk_sizes:
            chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
            sent = b"".join(chunked + in_chunks(body, chunk_sizes) for body in bodies)
        else:
            sent = b"".join(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)
        cuts = random.Random(0)

        async def write() -> None:
            at = 0
            while at < len(sent):
                num = cuts.choice((1, 7, 100, 5_000, 300_000))
                writer.write(sent[at : at + num])
                await writer.drain()
                at += num

        writing = asyncio.create_task(write())
        answers = b""
        while answers.count(b"HTTP/1.1 200 ") < len(bodies):
            answers += await reader.readuntil(b"\r\n\r\n")
        await writing
        writer.close()
        server.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
    if is_answered_first:
        assert all(whole.startswith(part) for part, whole in zip(received, bodies, strict=True))
    else:
        assert received == bodies


def test_a_large_chunk_is_read_in_large_pieces_and_small_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones cost much for each byte. All of the body has come to this machine before the server reads."""
    received, num_read = [], list[int]()
    read = Protocol.data_received

    def noted(connection: Protocol, data: bytes) -> None:
        num_read.append(len(data))
        read(connection, data)

    monkeypatch.setattr(Protocol, "data_received", noted)

    async def application(_scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        message = {"more_body": True}
        while message["more_body"]:
            message = await receive()
            received.append(message["body"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        server, server_state = await started(application)
        client = socket.create_connection(server.sockets[0].getsockname())
        head = b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head + in_chunks(bytes(70_000), (50_000, 10, *[10] * 2_000)))
        while not server_state.total_requests:
            await asyncio.sleep(0)
        client.close()
        server.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
    assert b"".join(received) == bytes(70_000)
    assert 40_000 < num_read[1] < 50_000 + MOST_READ_BYTES
    assert max(num_read[2:]) <= MOST_READ_BYTES + 10


def test_an_upload_is_read_in_larger_pieces_and_what_follows_is_not() -> None:
    """Many connections may have a piece each, and few are uploads."""
    connections: list[Protocol] = []
    received: list[bytes] = []

    async def application(scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["path"] == "/upload":
            scope["multilora.connection"].reads_upload()
        message = {"more_body": True}
        while message["more_body"]:
            message = await receive()
            received.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"."})

    async def run() -> list[int]:
        sizes = []
        server, _ = await started(application, connections)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for path in ("/upload", "/other"):
            writer.write(b"PUT /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na")  # all of which has come
            await reader.readuntil(b"\r\n\r\n.")
            received.clear()
            writer.write(b"PUT %b HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n" % path.encode())
            for num_bytes in (10, 10):
                writer.write(bytes(num_bytes))
                before = sum(map(len, received))
                while sum(map(len, received)) < before + num_bytes:
                    await asyncio.sleep(0)
            transport: Any = connections[0].transport
            sizes.append(transport.max_size)
            writer.write(bytes(5_000_000 - 20))
            await reader.readuntil(b"\r\n\r\n.")
        writer.close()
        server.close()
        return sizes

    of_upload, of_other = asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
    assert of_upload > 3 * of_other > 3 * MOST_READ_BYTES


def test_a_body_that_comes_after_its_answer_keeps_the_connection() -> None:
    """The answer began the wait for the next request; what comes of the body ends it, however it is read."""
    connections: list[Protocol] = []

    async def application(_scope: Any, _receive: Any, send: Callable[..., Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"."})

    async def run() -> None:
        server, _ = await started(application, connections)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n.")
        (connection,) = connections
        while connection.timeout_keep_alive_task is None:
            await asyncio.sleep(0)
        writer.write(b"a" * 1000)
        while connection.timeout_keep_alive_task is not None:
            await asyncio.sleep(0)
        writer.close()
        server.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


def test_a_request_that_came_before_the_end_of_the_wait_for_it_is_answered() -> None:
    """The loop has not read it when the timer runs; without one the connection is closed."""
    connections: list[Protocol] = []

    async def application(_scope: Any, _receive: Any, send: Callable[..., Any]) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        server, server_state = await started(application, connections)
        client = socket.create_connection(server.sockets[0].getsockname())
        for number in (1, 2, 3):
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            if number > 1:
                connections[0].timeout_keep_alive_handler()
                assert not connections[0].transport.is_closing()
            while server_state.total_requests < number:
                await asyncio.sleep(0)
        connections[0].timeout_keep_alive_handler()
        while server_state.connections:
            await asyncio.sleep(0)
        client.close()
        server.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


@pytest.mark.parametrize("is_unsent", [True, False])
def test_a_connection_with_an_answer_or_a_request_on_its_way_is_not_idle(is_unsent: bool) -> None:
    """A client that does not read its answer would keep a socket that is not counted; a proxy may have sent half a
    head."""
    connections: list[Protocol] = []
    body = b"." * (1 << 24 if is_unsent else 1)
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

    async def application(_scope: Any, _receive: Any, send: Callable[..., Any]) -> None:
        length = b"%d" % len(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})

    async def run() -> None:
        server, server_state = await started(application, connections, ConnectionShares(1, ["127.0.0.1"]))
        address = server.sockets[0].getsockname()
        client = socket.create_connection(address)
        client.sendall(get if is_unsent else get + get[:9])
        while not server_state.total_requests:
            await asyncio.sleep(0)
        for _ in range(1 + is_unsent):
            reader, writer = await asyncio.open_connection(*address)
            assert b" 429 " in await reader.readline()
            writer.close()
            if is_unsent:  # and after the wait for its next request, which closes it once all is sent
                connections[0].timeout_keep_alive_handler()
        if not is_unsent:
            client.sendall(get[9:])
        expected = len(body) if is_unsent else 2
        answers = b""
        while answers.count(b".") - answers.count(b"1.1") < expected:
            answers += await asyncio.to_thread(client.recv, 1 << 20)
        client.close()
        server.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
