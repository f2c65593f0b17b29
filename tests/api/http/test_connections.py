"""Connections whose client means harm, on raw sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from service.api.errors import QueueFull
from service.api.http.connection_limits import ConnectionShares
from service.api.http.h11_bounds import MAX_HEADERS
from service.server.serve import make_server
from service.settings import Settings, SettingsError, load_settings
from tests.api.conftest import BASE, Checkpoints
from tests.api.http.test_unread import UNREAD, send_and_read_nothing
from tests.support.http.server import Server, running_server, standing_still, wait_for
from tests.support.limits import LIMIT_SECONDS

GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a"}'
MAX_CONNECTIONS = 8


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the connection is closed, or reset."""
    read = bytearray()
    try:
        while piece := connection.recv(1 << 16):
            read += piece
    except ConnectionResetError:
        pass
    return bytes(read)


def exchange(server: Server, *pieces: bytes) -> bytes:
    """Everything that is answered until the server closes the connection."""
    with closing(connect(server)) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read_all(connection)


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return error


@pytest.fixture(scope="module")
def hasty(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Waits a second for its clients."""
    settings: dict[str, Any] = {"stall_limit_seconds": 1, "max_connections": MAX_CONNECTIONS, "model_name": BASE}
    settings |= {"kv_bytes": "32MiB"}  # for all of UNREAD at once
    with running_server(checkpoints.base, tmp_path_factory.mktemp("hasty"), **settings) as running:
        yield running


class TestFraming:
    @pytest.mark.parametrize("order", [1, -1])
    def test_two_lengths_are_one_too_many(self, server: Server, order: int) -> None:
        """A proxy that goes by the other one takes what follows for a request of somebody else."""
        lengths = [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"][::order]
        smuggled = b"0\r\n\r\n" + GET + b"\r\n"
        answer = exchange(server, POST + b"".join(lengths) + b"\r\n" + smuggled)
        assert statuses(answer) == [400]
        assert "both Content-Length and Transfer-Encoding" in error_of(answer)["message"]
        head = b"HEAD /version HTTP/1.1\r\nHost: x\r\n" + b"".join(lengths) + b"\r\n" + smuggled
        answer = exchange(server, head)
        assert statuses(answer) == [400]
        assert answer.endswith(b"\r\n\r\n")

    @pytest.mark.parametrize(
        "headers",
        [
            b"Content-Length: 15\r\nContent-Length: 16\r\n",
            b"Content-Length: +15\r\n",
            b"Content-Length: 15, 16\r\n",
            b"Content-Length: 1e1\r\n",
            b"Content-Length: " + b"9" * 30 + b"\r\n",
            b"Transfer-Encoding: identity\r\n",
            b"Transfer-Encoding: chunked, chunked\r\n",
            b"Transfer-Encoding : chunked\r\n",
            b"Content-Length\r\n",
            b" folded: x\r\n",
            b"X: a\x00b\r\n",
            b"X\xff: a\r\n",
        ],
    )
    def test_what_can_be_read_in_two_ways_is_refused_and_the_connection_closed(
        self, server: Server, headers: bytes
    ) -> None:
        first = b"POST /tokenize HTTP/1.1\r\n" if headers.startswith(b" ") else POST
        assert statuses(exchange(server, first + headers + b"\r\n" + BODY + GET + b"\r\n")) == [400]

    @pytest.mark.parametrize(
        "headers",
        [b"X: a\r\n b\r\n", b"Content-Length:\r\n\t15\r\n", b"Transfer-Encoding:\r\n chunked\r\n"],
        ids=["header", "length", "coding"],
    )
    def test_folded_lines_are_refused_and_the_connection_closed(self, server: Server, headers: bytes) -> None:
        assert statuses(exchange(server, POST + headers + b"\r\n" + BODY + GET + b"\r\n")) == [400]

    def test_a_folded_line_is_refused_with_a_sentence_in_trailers_too(self, server: Server) -> None:
        answer = exchange(server, POST + b"X: a\r\n\tContent-Length: 15\r\n\r\n" + BODY)
        assert statuses(answer) == [400]
        assert "in one line" in error_of(answer)["message"]
        chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
        assert statuses(exchange(server, POST + chunked + b"X: a\r\n b\r\n\r\n" + GET + b"\r\n")) == [400]

    def test_http_1_0_has_no_chunks(self, server: Server) -> None:
        """Who goes by that version takes the body for what comes after the request."""
        head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n"
        answer = exchange(server, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert statuses(answer) == [400]
        assert "Transfer-Encoding" in error_of(answer)["message"]

    @pytest.mark.parametrize(
        "chunk", [b"-1\r\na\r\n", b"1\r\nab\r\n", b"g\r\na\r\n", b"1" * 40 + b"\r\n", b"0x1\r\na\r\n"]
    )
    def test_a_broken_chunk_ends_the_connection(self, server: Server, chunk: bytes) -> None:
        assert statuses(exchange(server, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)) == [400]

    @pytest.mark.parametrize("chunk", [b"1\r\n \r\n", b"1;" + b"x" * 4000 + b"\r\n \r\n"], ids=["small", "extension"])
    def test_chunks_that_are_mostly_framing_are_refused(self, server: Server, chunk: bytes) -> None:
        with closing(connect(server)) as connection:
            connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            try:
                for _ in range((2 << 20) // len(chunk)):
                    connection.sendall(chunk)
            except (ConnectionResetError, BrokenPipeError):
                pass  # refused long ago
            answer = read_all(connection)
        if answer:
            assert statuses(answer) == [400]
            assert "chunks" in error_of(answer)["message"]

    def test_chunks_of_any_sensible_size_are_taken(self, server: Server) -> None:
        text = json.dumps({"prompt": "word " * 40_000}).encode()
        for size in (200, 4096, 1 << 20):
            chunks = (text[at : at + size] for at in range(0, len(text), size))
            answer = server.post("/tokenize", content=chunks, headers={"Content-Type": "application/json"})
            assert answer.status_code == 200


class TestHeads:
    @pytest.mark.parametrize(
        ("head", "word"),
        [
            (GET + b"X: a\r\n" * MAX_HEADERS + b"\r\n", "headers"),
            (GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n", "longer"),
            (GET + b"a:\r\n" * 50_000 + b"\r\n", "longer"),
            (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", "longer"),
            (b"\r\n" * 50_000, "HTTP/1.1"),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10, "HTTP/1.1"),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1"),
        ],
        ids=["many", "long", "many and long", "path", "blank", "TLS", "HTTP/2"],
    )
    def test_absurd_ones_are_refused(self, server: Server, head: bytes, word: str) -> None:
        with closing(connect(server)) as connection:
            try:
                connection.sendall(head)
            except (ConnectionResetError, BrokenPipeError):
                return  # refused before all of it was there
            answer = read_all(connection)
        if answer:
            assert statuses(answer) == [400]
            assert word in error_of(answer)["message"]

    def test_a_path_may_hold_anything(self, server: Server) -> None:
        for path in (b"/%00", b"/v1/adapters/%2e%2e%2f", b"/v1/models/%ff", b"//", b"/v1/../metrics", b"*"):
            answer = exchange(server, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert statuses(answer)[0] in (400, 404), path

    @pytest.mark.parametrize("line", [b"A" * 9_000 + b" /version", b"GET /" + b"a" * 9_000], ids=["method", "path"])
    def test_what_is_refused_is_quoted_in_brief(self, server: Server, line: bytes) -> None:
        """In the answer and in the log, neither of which grows with the request."""
        name = f"brief-{line[:1].decode()}"
        head = line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: " + name.encode() + b"\r\n\r\n"
        answer = exchange(server, head)
        assert statuses(answer)[0] in (404, 405)
        assert len(answer) < 1_000
        (logged,) = wait_for(lambda: server.log_lines(name), "the line")
        assert len(json.dumps(logged)) < 1_500


class TestPipelining:
    def test_answers_come_one_after_the_other(self, server: Server) -> None:
        whole = POST + b"Content-Length: 15\r\n\r\n" + BODY
        last = GET + b"Connection: close\r\n\r\n"
        assert statuses(exchange(server, (whole + GET + b"\r\n") * 20 + last)) == [200] * 41

    def test_what_follows_a_request_is_no_part_of_it(self, server: Server) -> None:
        """The second is refused by itself: the first one's answer stands."""
        answer = exchange(server, POST + b"Content-Length: 15\r\n\r\n" + BODY + b"\x00\x01\r\n\r\n")
        assert statuses(answer) == [200, 400]

    def test_a_flood_of_them_delays_no_other_connection_for_long(self, server: Server) -> None:
        with closing(connect(server)) as connection:
            connection.sendall((GET + b"\r\n") * 2000)
            assert server.get("/health").status_code == 200
            with closing(connection.makefile("rb")) as answers:
                assert answers.readline() == b"HTTP/1.1 200 OK\r\n"


class TestGoing:
    @pytest.mark.parametrize("how", [socket.SHUT_WR, None], ids=["half", "whole"])
    def test_a_closed_socket_ends_the_work_half_closed_too(self, server: Server, how: int | None) -> None:
        body = json.dumps({"model": BASE, "prompt": "the", "max_tokens": 480, "n": 8, "ignore_eos": True}).encode()
        aborted = server.metric("requests_total", outcome="abort")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with standing_still(*server.engine_pids()), closing(connect(server)) as connection:
            connection.sendall(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_for(lambda: server.metric("num_requests_open") == 8, "the request to be taken")
            if how is None:
                connection.close()
            else:
                connection.shutdown(how)
            wait_for(lambda: server.metric("requests_total", outcome="abort") == aborted + 8, "it to be given up")
            wait_for(lambda: server.metric("num_requests_open") == 0, "its places to be free")

    def test_half_a_request_leaves_nothing(self, server: Server) -> None:
        for part in (GET, POST + b"Content-Length: 1000\r\n\r\n" + BODY, b""):
            with closing(connect(server)) as connection:
                connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
                assert b"HTTP/1.1 2" not in read_all(connection)


class TestTime:
    @pytest.mark.parametrize(
        ("part", "what"),
        [
            (GET, "head"),
            (POST + b"Content-Length: 1000\r\n\r\n" + BODY, "body"),
            (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", "body"),
            # More than proxies wait for.
            (POST + b"Content-Length: 1000000\r\n\r\n" + BODY, "body"),
        ],
    )
    def test_what_does_not_come_is_not_waited_for(self, hasty: Server, part: bytes, what: str) -> None:
        answer = exchange(hasty, part)
        assert statuses(answer) == [408]
        assert error_of(answer)["code"] == "request_timeout"
        assert what in error_of(answer)["message"]

    def test_a_head_that_drips_is_not_waited_for(self, hasty: Server) -> None:
        with closing(connect(hasty)) as connection:
            try:
                for char in GET * 100:
                    connection.sendall(bytes([char]))
                    connection.settimeout(0.02)
                    try:
                        if not connection.recv(1 << 16):
                            break
                    except TimeoutError:
                        continue
                    break
                else:
                    pytest.fail("it was waited for")
            except (ConnectionResetError, BrokenPipeError):
                pass

    def test_who_sends_nothing_at_all_is_let_go(self, hasty: Server) -> None:
        assert exchange(hasty) == b""

    def test_a_second_request_has_no_more_time(self, hasty: Server) -> None:
        with closing(connect(hasty)) as connection:
            connection.sendall(POST + b"Content-Length: 15\r\n\r\n" + BODY)
            first = connection.recv(1 << 16)
            connection.sendall(GET)
            assert statuses(first + read_all(connection)) == [200, 408]

    def test_a_reader_that_stalls_loses_its_connection(self, hasty: Server) -> None:
        ended = hasty.metric("http_requests_total", route="/v1/completions")
        connection = send_and_read_nothing(hasty, {**UNREAD, "stream": True})
        wait_for(lambda: "its client does not read" in hasty.log, "the connection to be closed")
        wait_for(lambda: hasty.metric("num_requests_open") == 0, "all places to be free")
        with closing(connection):
            assert b"[DONE]" not in read_all(connection)
        wait_for(
            lambda: hasty.metric("http_requests_total", route="/v1/completions") == ended + 1, "the request to end"
        )

    def test_a_long_answer_is_no_stall(self, hasty: Server) -> None:
        """Nothing is to be sent while the engine works."""
        body = {"model": BASE, "prompt": "the", "max_tokens": 480, "n": 16, "ignore_eos": True}
        assert hasty.post("/v1/completions", json=body).status_code == 200


PROXY = "127.0.0.9"


@pytest.fixture(scope="module")
def guarded(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With keys, each of which is a tenant to connections, and with a proxy."""
    settings: dict[str, Any] = {"max_connections": MAX_CONNECTIONS, "api_keys": "one,two", "trusted_proxies": PROXY}
    with running_server(checkpoints.base, tmp_path_factory.mktemp("guarded"), **settings) as running:
        running.http.close()
        yield running


def get_from(server: Server, address: str) -> bytes:
    """The answer to a small request from this address, by a connection of its own."""
    host, port = server.url.removeprefix("http://").split(":")
    source = (address, 0)
    with closing(socket.create_connection((host, int(port)), LIMIT_SECONDS, source_address=source)) as connection:
        connection.sendall(GET + b"Connection: close\r\n\r\n")
        return read_all(connection)


def test_of_one_address_half_of_them_are_taken() -> None:
    """But of this machine's own all, and of a proxy's."""
    for address, others, most in (
        ("192.0.2.1", "192.0.2.2", MAX_CONNECTIONS // 2),
        ("2001:db8::1", "2001:db8:1::1", MAX_CONNECTIONS // 2),
        ("127.0.0.1", "192.0.2.2", MAX_CONNECTIONS),
        ("::1", "192.0.2.2", MAX_CONNECTIONS),
        ("::ffff:127.0.0.1", "192.0.2.2", MAX_CONNECTIONS),
        ("198.51.100.1", "192.0.2.2", MAX_CONNECTIONS),
    ):
        shares = ConnectionShares(MAX_CONNECTIONS, ["198.51.100.0/24"])
        opened = [shares.open(address) for _ in range(MAX_CONNECTIONS)]
        assert [one is not None for one in opened] == [True] * most + [False] * (MAX_CONNECTIONS - most), address
        assert (shares.open(others) is not None) == (most < MAX_CONNECTIONS)


class Idle:
    """A connection between two requests."""

    def __init__(self, shares: ConnectionShares, address: str, tenant: str = "", *, has_input: bool = False) -> None:
        network = shares.open(address)
        assert network is not None, address
        self.network, self.tenant, self.has_input, self.is_closed = network, "", has_input, False
        self._shares = shares
        if tenant:
            shares.belong("", tenant)
            self.tenant = tenant
        shares.rest(self)

    def close_if_idle(self) -> bool:
        if not self.has_input:
            self.is_closed = True
            self._shares.wake(self)
            self._shares.close(self.network, self.tenant)
        return not self.has_input


def test_where_a_share_is_full_what_is_idle_longest_is_closed() -> None:
    shares = ConnectionShares(8)
    one, two, three, four = "192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4"
    kept = [Idle(shares, one, has_input=index == 0) for index in range(4)]
    assert shares.open(one) is not None
    assert [idle.is_closed for idle in kept] == [False, True, False, False]
    shares.wake(kept[2])
    kept[0].has_input = False
    shares.wake(kept[0])
    shares.rest(kept[0])
    assert shares.open(one) is not None
    assert [idle.is_closed for idle in kept] == [False, True, False, True]
    few = [Idle(shares, two), Idle(shares, two), Idle(shares, three), Idle(shares, four)]
    assert shares.open(one) is not None, "full, and its share is: one of its own is closed"
    assert kept[0].is_closed
    assert shares.open(one) is None, "its others are at work"
    assert shares.open(four) is not None, "the larger network's one that is idle is closed"
    assert [idle.is_closed for idle in few] == [True, False, False, False]
    assert shares.open(two) is not None, "its own"
    assert shares.open(four) is not None, "it has two now, and no other network that has more is idle: its own"
    assert [idle.is_closed for idle in few] == [True, True, False, True]
    assert shares.open(four) is None, "a network with fewer keeps its own"
    assert not few[2].is_closed


def test_an_idle_connection_of_a_tenant_is_closed_for_its_next_one() -> None:
    shares = ConnectionShares(4)
    kept = [Idle(shares, "192.0.2.1", "a"), Idle(shares, "192.0.2.2", "a"), Idle(shares, "192.0.2.3", "b")]
    assert shares.open("192.0.2.4") is not None
    shares.belong("", "a")
    assert [idle.is_closed for idle in kept] == [True, False, False]
    shares.wake(kept[1])
    with pytest.raises(QueueFull):
        shares.belong("", "a")


def test_many_at_once_from_here(server: Server) -> None:
    """As load tests open them: each has its answer."""
    with ExitStack() as opened:
        held = [opened.enter_context(closing(connect(server))) for _ in range(600)]
        for connection in held:
            connection.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert {status for connection in held for status in statuses(read_all(connection))} == {200}


def test_connections_are_counted(guarded: Server) -> None:
    """They are taken for as long as they are held."""
    held = [connect(guarded) for _ in range(MAX_CONNECTIONS + 2)]
    for connection in held[MAX_CONNECTIONS:]:
        answer = read_all(connection)
        assert statuses(answer) == [429]
        assert error_of(answer)["code"] == "queue_full"
        assert b"retry-after: 1" in answer.lower()
    for connection in held:
        connection.close()
    wait_for(lambda: statuses(get_from(guarded, "127.0.0.1")) == [200], "what was held to be free")


class Kept:
    """A connection from an address that is kept open over its requests."""

    def __init__(self, server: Server, address: str) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS, source_address=(address, 0))

    def ask(self, key: str) -> bytes:
        """The answer to a small request with this key."""
        self.socket.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key.encode() + b"\r\n\r\n"
        )
        return self.answer()

    def answer(self) -> bytes:
        """The next answer, with a body of JSON."""
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
            piece = self.socket.recv(1 << 16)
            assert piece, answer
            answer += piece
        return answer


def test_a_tenant_has_half_of_the_connections_from_wherever_they_come(guarded: Server) -> None:
    with ExitStack() as stack:

        def opened(address: str) -> Kept:
            one = Kept(guarded, address)
            stack.enter_context(closing(one.socket))
            return one

        busy = [opened(f"127.0.0.{2 + index // 2}") for index in range(MAX_CONNECTIONS // 2)]
        for one in busy:
            assert statuses(one.ask("one")) == [200]
            one.socket.sendall(POST + b"Authorization: Bearer one\r\nContent-Length: %d\r\n\r\n{" % len(BODY))
        one_too_many = opened("127.0.0.7")
        refused = one_too_many.ask("one")
        assert statuses(refused) == [429]
        assert error_of(refused)["code"] == "queue_full"
        assert one_too_many.socket.recv(1) == b"", "it is closed"
        other = opened("127.0.0.8")
        assert statuses(other.ask("two")) == [200]
        busy[0].socket.sendall(BODY[1:])
        assert statuses(busy[0].answer()) == [200]
        assert statuses(busy[0].ask("one")) == [200]  # one that it has
        assert statuses(busy[0].ask("two")) == [200]  # from now on this one is the other's
        assert statuses(other.ask("one")) == [200]


def test_connections_that_are_idle_longest_are_closed_for_new_ones(guarded: Server) -> None:
    """One of the same tenant goes where its half is full, one of anybody where all are."""
    with ExitStack() as stack:

        def kept(key: str) -> Kept:
            one = Kept(guarded, "127.0.0.5")
            stack.enter_context(closing(one.socket))
            assert statuses(one.ask(key)) == [200]
            return one

        ones = [kept("one") for _ in range(MAX_CONNECTIONS // 2)]
        assert statuses(ones[0].ask("one")) == [200]
        ones.append(kept("one"))
        assert ones[1].socket.recv(1) == b"", "the first was asked since"
        twos = [kept("two") for _ in range(MAX_CONNECTIONS // 2 + 1)]
        assert twos[0].socket.recv(1) == b""
        assert statuses(get_from(guarded, "127.0.0.6")) == [200]
        assert ones[2].socket.recv(1) == b""
        assert [statuses(one.ask("one")) for one in (ones[0], *ones[3:])] == [[200]] * 3


def test_a_trusted_proxy_has_as_many_connections_as_there_are(guarded: Server) -> None:
    def are_all_served() -> bool:
        with ExitStack() as stack:
            answers = []
            for index in range(MAX_CONNECTIONS - 1):
                one = Kept(guarded, PROXY)
                stack.enter_context(closing(one.socket))
                with suppress(ConnectionError):
                    answers += statuses(one.ask(("one", "two")[index % 2]))
        return answers == [200] * (MAX_CONNECTIONS - 1)

    wait_for(are_all_served, "connections of earlier tests to be closed, and all to be served")


def test_only_trusted_proxies_say_who_the_client_is() -> None:
    app = SimpleNamespace(state=SimpleNamespace(services=None, engine=None))
    assert not make_server(app, Settings()).config.proxy_headers
    config = make_server(app, Settings(trusted_proxies="10.0.0.7, 10.1.0.0/16")).config
    assert (config.proxy_headers, config.forwarded_allow_ips) == (True, ["10.0.0.7", "10.1.0.0/16"])
    for wrong in ("proxy.example", "fe80::1%eth0"):
        with pytest.raises(SettingsError, match="write addresses or networks"):
            load_settings(trusted_proxies=wrong)


def test_proxies_and_pools_of_clients_close_idle_connections_before_the_server_does() -> None:
    """The other way round a request is lost that is on its way: with httpx's pool (5 s), aiohttp's (15), nginx's and
    those of AWS's balancers (60)."""
    app = SimpleNamespace(state=SimpleNamespace(services=None, engine=None))
    assert make_server(app, Settings()).config.timeout_keep_alive > 60


def test_a_fault_with_one_connection_is_that_one_s_end_alone() -> None:
    app, ended, looked_at = SimpleNamespace(state=SimpleNamespace(services=None, engine=None)), list[str](), list[str]()

    class Connection:
        def __init__(self, name: str) -> None:
            self._name, self.transport = name, SimpleNamespace(abort=lambda: ended.append(name))

        def look(self, _stall_limit_seconds: float) -> None:
            looked_at.append(self._name)
            if self._name == "strange":
                raise OSError(107, "Transport endpoint is not connected")

    server = make_server(app, Settings())
    server.config.load()
    server.server_state.connections.update(map(Connection, ("usual", "strange", "another")))
    assert not asyncio.run(server.on_tick(0))
    assert (sorted(looked_at), ended) == (["another", "strange", "usual"], ["strange"])
