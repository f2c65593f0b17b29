"""Every answer to a hostile client is counted, however it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from socket import MSG_PEEK, create_server, socket

import pytest

from bench.hostile.target import NO_ANSWER, Attack, Target
from tests.support.limits import LIMIT_SECONDS

FAILED = b'{"error": {"message": "x", "type": "server_error", "code": "engine_failed"}}'
REFUSED = b'{"error": {"message": "x", "type": "invalid_request_error", "code": "bad_request"}}'


def http(status: int, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d Status\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body


@contextmanager
def answering(answer: bytes, num_connections: int = 1) -> Iterator[Target]:
    """A server that says this on each of so many connections, once the first of a request is there."""
    with create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(LIMIT_SECONDS)

        def serve() -> None:
            for _ in range(num_connections):
                connection, _address = listening.accept()
                with closing(connection), suppress(OSError):
                    connection.settimeout(LIMIT_SECONDS)
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Target(f"http://127.0.0.1:{listening.getsockname()[1]}", "base")
        thread.join()


def by_client(target: Target) -> Attack:
    return target.post("/v1/completions", {})


def by_socket(target: Target) -> Attack:
    return target.send(b"GET / HTTP/1.1\r\n\r\n", num_answers=2)


@pytest.mark.parametrize("way", [by_client, by_socket])
@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        (http(200), {200: 1}),
        (http(500), {500: 1}),
        (http(503, FAILED), {503: 1}),
        (http(400, REFUSED), {400: 1}),
        (http(200, b"data: " + FAILED + b"\n\n"), {200: 1, 500: 1}),
        (http(200, b"data: " + REFUSED + b"\n\n"), {200: 1}),
        (b"", {NO_ANSWER: 1}),
    ],
    ids=["good", "failure", "unavailable", "refusal", "failure in a stream", "refusal in a stream", "none"],
)
def test_an_answer_is_counted(way: type, answer: bytes, counted: dict[int, int]) -> None:
    with answering(answer) as target:
        way(target)()
    assert target.take_statuses() == counted
    assert target.take_statuses() == {}


def test_each_answer_on_a_connection_and_each_connection_counts() -> None:
    with answering(http(200) + http(500)) as target:
        by_socket(target)()
    assert target.take_statuses() == {200: 1, 500: 1}
    with answering(http(429), 3) as target:
        target.send(b"GET / HTTP/1.1\r\n\r\n", times=3)()
    assert target.take_statuses() == {429: 3}


def test_what_came_on_connections_that_are_held_is_counted() -> None:
    with answering(http(408), 3) as target, target.connections(3) as held:
        for connection in held:
            connection.sendall(b"x")
            connection.setblocking(True)
            assert connection.recv(1, MSG_PEEK)
    assert target.take_statuses() == {408: 3}


def test_nobody_there_is_no_answer() -> None:
    with socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        target = Target(f"http://127.0.0.1:{bound.getsockname()[1]}", "base")
        by_client(target)()
        by_socket(target)()
    assert target.take_statuses() == {NO_ANSWER: 2}
