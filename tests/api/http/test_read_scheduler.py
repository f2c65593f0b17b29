"""Whose sent bytes are read when: counted in passes of the event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from service.api.http.connection_limits import ConnectionShares
from service.api.http.protocol import Protocol
from service.api.http.read_scheduler import (
    LEAST_READ_BYTES,
    MOST_READ_BYTES,
    PAUSE_PER_SECOND,
    USUAL_SECONDS,
    ReadScheduler,
    next_read_bytes,
)
from tests.api.conftest import BASE
from tests.support.http.server import Server
from tests.support.limits import LIMIT_SECONDS


async def nothing(_scope: Any, _receive: Any, send: Any) -> None:
    """An application."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def connected(
    turns: ReadScheduler,
    application: Any = nothing,
    *,
    num_clients: int = 1,
    trusted: Sequence[str] = (),
    count: Callable[[int], None] = lambda status: pytest.fail(f"{status}"),
) -> AsyncIterator[tuple[list[socket.socket], list[Protocol]]]:
    """Clients, and the server's side of each.

    trusted  proxies
    count    told of answers that are no application's
    """
    config, made = uvicorn.Config(application, log_config=None, proxy_headers=False), list[Protocol]()
    shares = ConnectionShares(99, trusted)
    config.load()

    def make() -> Protocol:
        named: dict[str, Any] = {"config": config, "server_state": ServerState(), "app_state": {}}
        made.append(Protocol(shares, turns, count, **named))
        return made[-1]

    async with asyncio.timeout(LIMIT_SECONDS):
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        clients = [socket.create_connection(server.sockets[0].getsockname()) for _ in range(num_clients)]
        while len(made) < num_clients:
            await asyncio.sleep(0)
        yield clients, made
        for client in clients:
            client.close()
        server.close()
        for connection in made:
            connection.transport.abort()


def test_one_network_reads_once_in_each_pass_in_the_order_it_came() -> None:
    async def run() -> list[list[int]]:
        turns, now, passes = ReadScheduler(), list[int](), []
        for number in range(9):
            if turns.may_read("flood", lambda number=number: now.append(number)):
                now.append(number)
        while now:
            passes.append(now.copy())
            now.clear()
            await asyncio.sleep(0)
        return passes

    passes = asyncio.run(run())
    assert passes == [[number] for number in range(9)]


def test_others_read_at_once_whatever_waits() -> None:
    async def run() -> None:
        turns = ReadScheduler()
        taken = [turns.may_read("flood", lambda: None) for _ in range(1000)]
        assert taken.count(True) == 1
        assert turns.may_read("another", pytest.fail)

    asyncio.run(run())


def test_a_network_whose_reads_are_costly_pauses_and_no_other_does() -> None:
    async def run() -> None:
        turns, late = ReadScheduler(), list[str]()
        assert turns.may_read("costly", pytest.fail)
        turns.charge("costly", 1e6)
        assert turns.may_read("usual", pytest.fail)
        turns.charge("usual", USUAL_SECONDS)
        assert not turns.may_read("costly", pytest.fail)
        assert not turns.may_read("usual", lambda: late.append("usual"))
        for _ in range(9):
            await asyncio.sleep(0)
        assert late == ["usual"]
        assert turns.may_read("usual", pytest.fail)
        assert not turns.may_read("costly", pytest.fail)

    asyncio.run(run())


def test_who_paused_goes_on() -> None:
    async def run() -> None:
        turns, went_on = ReadScheduler(), asyncio.Event()
        turns.may_read("costly", pytest.fail)
        turns.charge("costly", 2 * USUAL_SECONDS)
        assert not turns.may_read("costly", went_on.set)
        await asyncio.wait_for(went_on.wait(), LIMIT_SECONDS)

    asyncio.run(run())


@pytest.mark.parametrize("pause_seconds", [0.5 + number for number in range(9)])
def test_nobody_is_forgotten_whose_pause_ends_at_any_moment(pause_seconds: float) -> None:
    """Each look at the clock is a second after the one before."""

    async def run() -> None:
        turns, went_on = ReadScheduler(), asyncio.Event()
        assert turns.may_read("one", pytest.fail)
        vars(asyncio.get_running_loop())["time"] = itertools.count(1e6).__next__
        turns.charge("one", USUAL_SECONDS + pause_seconds / PAUSE_PER_SECOND)
        assert not turns.may_read("one", went_on.set)
        for _ in range(30):
            await asyncio.sleep(0)
        assert went_on.is_set()

    asyncio.run(run())


def test_a_read_that_fails_takes_no_turn_but_its_own() -> None:
    async def run() -> list[str]:
        turns, went_on, failed = ReadScheduler(), asyncio.Event(), list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(str(context["exception"])))

        def fail() -> None:
            raise ValueError("a fault of ours")

        assert turns.may_read("one", pytest.fail)
        assert not turns.may_read("one", fail)
        assert not turns.may_read("one", went_on.set)
        await asyncio.wait_for(went_on.wait(), LIMIT_SECONDS)
        return failed

    assert asyncio.run(run()) == ["a fault of ours"]


def test_reads_of_costly_bytes_are_short() -> None:
    """Seconds for each byte, from those of large bodies to those of chunks of a byte and worse."""
    for byte_seconds in (1e-9, 1e-7, 1e-6, 1.5e-6, 4e-6):
        size = MOST_READ_BYTES
        for _ in range(4):  # it settles
            size = next_read_bytes(size, size * byte_seconds)
        seconds = size * byte_seconds
        assert size == MOST_READ_BYTES if byte_seconds < 1e-7 else LEAST_READ_BYTES <= size <= MOST_READ_BYTES
        assert seconds <= max(2 * USUAL_SECONDS, LEAST_READ_BYTES * byte_seconds) * 1.01
        assert next_read_bytes(size, size * 1e-9) == MOST_READ_BYTES
    assert next_read_bytes(1, 1.0) == LEAST_READ_BYTES


def test_who_waits_for_its_turn_is_not_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of hundreds of connections of one client may wait for longer than a client may."""

    async def run() -> None:
        loop, turns, statuses = asyncio.get_running_loop(), ReadScheduler(), list[int]()
        now = [loop.time()]
        monkeypatch.setattr(loop, "time", lambda: now[0])
        async with connected(turns, count=statuses.append) as ((client,), (connection,)):
            turns.may_read("127.0.0.1", lambda: None)
            turns.charge("127.0.0.1", USUAL_SECONDS + 50.0 / PAUSE_PER_SECOND)
            client.sendall(b"GET /version HTTP/1.1\r\n")
            while connection.transport is None or connection.transport.is_reading():
                await asyncio.sleep(0)
            now[0] += 40.0
            connection.look(30.0)
            now[0] += 20.0
            while not connection.conn.num_received:
                assert not connection.transport.is_closing()
                await asyncio.sleep(0)
            connection.look(30.0)
            assert not statuses
            now[0] += 30.0
            connection.look(30.0)
            assert statuses == [408]

    asyncio.run(run())


def test_a_body_that_waits_for_its_turn_is_not_too_slow() -> None:
    async def run() -> bytes:
        turns, got = ReadScheduler(), list[bytes]()

        async def application(_scope: Any, receive: Any, send: Any) -> None:
            while (message := await receive()).get("more_body"):
                got.append(message["body"])
            got.append(message["body"])
            await nothing(_scope, receive, send)

        async with connected(turns, application) as ((client,), (connection,)):
            client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\na")
            while not got:
                await asyncio.sleep(0)
            turns.may_read("127.0.0.1", lambda: None)
            turns.charge("127.0.0.1", USUAL_SECONDS + 0.1 / PAUSE_PER_SECOND)
            client.sendall(b"bcd")
            while connection.transport is None or connection.transport.is_reading():
                await asyncio.sleep(0)
            while not connection.transport.is_reading():
                connection.look(1e-9)
                await asyncio.sleep(0)
            while not connection.cycle.response_complete:
                await asyncio.sleep(0)
        return b"".join(got)

    assert asyncio.run(run()) == b"abcd"


def test_who_has_gone_while_it_waited_to_be_read_is_noticed_in_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel resets the connection where an answer is written, and that must end nothing else."""

    async def run() -> None:
        turns = ReadScheduler()
        async with connected(turns) as ((client,), (connection,)):
            turns.may_read("127.0.0.1", lambda: None)
            turns.charge("127.0.0.1", USUAL_SECONDS + 0.1 / PAUSE_PER_SECOND)
            client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            while connection.transport is None or connection.transport.is_reading():
                await asyncio.sleep(0)
            client.close()
            while not connection.transport.is_closing():
                connection.look(LIMIT_SECONDS)
                await asyncio.sleep(0)

    asyncio.run(run())
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_a_body_that_a_proxy_passes_on_has_the_turns_of_who_pays_for_it() -> None:
    """One of two clients behind a trusted proxy has to pause: its body waits, not the other's; and when the other has
    to pause as well, the next request on its connection, of whom nothing is known yet, does not wait for that."""

    async def run() -> None:
        read = {"hostile": b"", "other": b"", "nobody": b""}
        turns = ReadScheduler()

        async def application(scope: Any, receive: Any, send: Any) -> None:
            client = scope["path"].strip("/")
            if client != "nobody":
                scope["multilora.connection"].is_paid_by(client)
            more = True
            while more:
                message = await receive()
                read[client] += message["body"]
                more = message["more_body"]
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async with connected(turns, application, num_clients=2, trusted=["127.0.0.1"]) as (clients, connections):
            hostile, other = clients
            for name, client in (("hostile", hostile), ("other", other)):
                client.sendall(f"POST /{name} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\na".encode())
                while read[name] != b"a":
                    await asyncio.sleep(0)
            assert turns.may_read("hostile", pytest.fail)
            turns.charge("hostile", 1e6)
            hostile.sendall(b"b")
            while connections[0].transport.is_reading():
                await asyncio.sleep(0)
            other.sendall(b"bcd")
            while read["other"] != b"abcd":
                await asyncio.sleep(0)
            assert read["hostile"] == b"a"
            turns.may_read("other", lambda: None)
            turns.charge("other", 1e6)
            other.sendall(b"POST /nobody HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
            while read["nobody"] != b"a":
                await asyncio.sleep(0)
            other.sendall(b"b")
            while read["nobody"] != b"ab":
                await asyncio.sleep(0)

    asyncio.run(run())


async def served_behind_a_proxy(names: list[str], most: int) -> list[str]:
    """The first `most` requests that are served of clients of these names, who all send one at once by a proxy."""
    served = list[str]()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        name = scope["path"].strip("/")
        await scope["multilora.connection"].wait_to_be_read(name)
        served.append(name)
        await nothing(scope, receive, send)

    behind = connected(ReadScheduler(), application, num_clients=len(names), trusted=["127.0.0.1"])
    async with behind as (clients, _):
        for client, name in zip(clients, names, strict=True):
            client.sendall(f"GET /{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        while len(served) < most:
            await asyncio.sleep(0)
    return served


def test_requests_that_a_proxy_passes_on_are_served_in_the_turns_of_its_clients() -> None:
    names = [*["flood"] * 12, "other"]
    served = asyncio.run(served_behind_a_proxy(names, len(names)))
    assert sorted(served) == sorted(names)
    assert served.index("other") <= 1


def test_heads_that_a_proxy_passes_on_are_paid_by_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read takes a second of the loop's thread: the second one of the same client has to pause."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    served = asyncio.run(served_behind_a_proxy(["costly", "costly", "other"], 2))
    assert served == ["costly", "other"]


def test_requests_that_come_at_once_on_a_connection_have_a_turn_each() -> None:
    """Three on each of four connections: no pass of the loop serves two."""

    async def run() -> list[int]:
        passes = [0]

        async def application(scope: Any, receive: Any, send: Any) -> None:
            passes[-1] += 1
            await nothing(scope, receive, send)

        async with connected(ReadScheduler(), application, num_clients=4) as (clients, _):
            for client in clients:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
            while sum(passes) < 12:
                passes.append(0)
                await asyncio.sleep(0)
        return passes

    assert max(asyncio.run(run())) == 1


def test_the_beginning_of_a_head_that_came_together_with_a_request_is_timed() -> None:
    async def run() -> list[int]:
        statuses = list[int]()
        async with connected(ReadScheduler(), count=statuses.append) as ((client,), (connection,)):
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nG")
            while connection.cycle is None or not connection.cycle.response_complete:
                await asyncio.sleep(0)
            while not statuses:
                connection.look(0.0)
                await asyncio.sleep(0)
        return statuses

    assert asyncio.run(run()) == [408]


def test_a_request_that_waits_for_its_turn_is_not_cut_off_as_if_none_had_come() -> None:
    async def run() -> None:
        turns = ReadScheduler()
        async with connected(turns) as ((client,), (connection,)):
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while connection.timeout_keep_alive_task is None:
                await asyncio.sleep(0)
            turns.may_read("127.0.0.1", lambda: None)
            turns.charge("127.0.0.1", 1e6)
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while connection.transport.is_reading():
                await asyncio.sleep(0)
            assert connection.timeout_keep_alive_task is None

    asyncio.run(run())


def test_bodies_come_whole_from_many_connections_whose_reads_are_costly(server: Server) -> None:
    """In chunks of a few bytes, which take several reads: what was held back is read in its order, and once."""

    def ask(number: int) -> None:
        prompt = " ".join(str(number + at) for at in range(1_000))
        body = json.dumps({"model": BASE, "prompt": prompt}).encode()
        headers = {"Content-Type": "application/json"}
        whole, in_pieces = (
            httpx.post(f"{server.url}/tokenize", content=content, headers=headers, timeout=LIMIT_SECONDS).json()
            for content in (body, (body[at : at + 9] for at in range(0, len(body), 9)))
        )
        assert in_pieces == whole
        assert whole["count"] > 1_000

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
