"""HAProxy with our lines in a configuration of the form of Ray's, before servers that end. Ray has an environment: make
clients."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from service.ray_serve.haproxy import (
    _BODY_SECONDS,
    STALL_LIMIT_SECONDS,
    extended,
)
from service.ray_serve.tcp_keepalive import VANISHED_SECONDS
from service.settings import Settings
from tests.support.blocks import ROOT
from tests.support.http.client_environments import environment
from tests.support.http.server import standing_still, wait_for
from tests.support.limits import LIMIT_SECONDS
from tests.support.on_ray.vanished import vanished

pytestmark = pytest.mark.wide

_CONFIGURATION = """\
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    option redispatch 1
    retry-on conn-failure
    errorfile 502 {error_file}
    errorfile 503 {error_file}
    balance roundrobin
frontend http_frontend
    bind fd@{descriptor}
    http-request return status 200 content-type text/plain lf-string "%[nbsrv(app)]" if {{ path /servers-up }}
    acl is_app path_beg /
    use_backend app if is_app
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain string "none"
backend app
    log global
    http-reuse always
{checks}    # Servers in this backend
{servers}
backend other
    http-request return status 404 content-type text/plain string "none"
"""
# In place of Ray's five seconds: of one that stands still nothing is seen by these.
_CHECKS = """\
    option httpchk GET /
    default-server fastinter 250ms downinter 250ms fall 2 rise 2 inter 1h check
"""
# As Ray writes it first for a HAProxy that takes the place of one that has died.
_WITHOUT_APPLICATION = re.sub(
    "    (acl|use_backend|http-request return .*nbsrv).*\n", "", _CONFIGURATION.partition("backend app\n")[0]
)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\ndone"


class _Server(threading.Thread):
    """Answers every request with `answer`, which may be nothing, and ends its connection. `received` is what came."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.received: list[bytes] = []

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                data = _request(connection)
                if data:
                    self.received.append(data)
                    with suppress(OSError):
                        connection.sendall(self._answer)

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join(LIMIT_SECONDS)


def _request(connection: socket.socket) -> bytes:
    """One whole request."""
    data = b""
    while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < _length(data):
        part = connection.recv(1 << 16)
        if not part:
            break
        data += part
    return data


def _length(head: bytes) -> int:
    lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lines[0].split(b":")[1]) if lines else 0


def _written(text: str, descriptor: int, error_file: str, servers: str, checks: str = "") -> str:
    return text.format(descriptor=descriptor, error_file=error_file, servers=servers, checks=checks)


@contextmanager
def _haproxy(
    tmp_path: Path, *ports: int, checks: str = "", is_told_sources: bool = False, **own: str
) -> Iterator[httpx.Client]:
    """One before servers at these ports, with `own` in its environment. is_told_sources: connections are `_from`s."""
    python = environment("ray") / "bin" / "python"
    error_file = tmp_path / "error"
    error_file.write_text("HTTP/1.0 500 Internal Server Error\r\n\r\nRay's")
    servers = "\n".join(f"    server s{n} 127.0.0.1:{one}" for n, one in enumerate(ports))
    path, text = tmp_path / "haproxy.cfg", _CONFIGURATION if ports else _WITHOUT_APPLICATION
    whole = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_SERVE_HAPROXY_BINARY_PATH": "/this/program", **own}
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        path.write_text(_written(text, listener.fileno(), str(error_file), servers, checks))
        if is_told_sources:
            _have_sources_told(path, whole)
        process = subprocess.Popen(
            [str(python), "-m", "service.ray_serve.haproxy", "-db", "-f", str(path)],
            env=whole,
            pass_fds=[listener.fileno()],
            stdout=sys.stderr,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield stack.enter_context(httpx.Client(base_url=url, timeout=LIMIT_SECONDS))


def _have_sources_told(path: Path, whole: dict[str, str]) -> None:
    """Let each connection begin with a line that says from where it comes. Rules for connections come before that line:
    they become rules for sessions, which come after it and are the same else."""
    code = "import sys; from service.ray_serve.haproxy import extend_files; extend_files(sys.argv)"
    subprocess.run([sys.executable, "-c", code, "-f", str(path)], env=whole, check=True, timeout=LIMIT_SECONDS)
    text = path.read_text().replace("tcp-request connection ", "tcp-request session ")
    path.write_text(re.sub("    bind .*", r"\g<0> accept-proxy", text))


@pytest.fixture
def servers() -> Iterator[tuple[_Server, _Server]]:
    """One that ends under whatever it gets, and one that answers."""
    both = _Server(b""), _Server(_ANSWER)
    for one in both:
        one.start()
    yield both
    for one in both:
        one.end()


def _halves(body: bytes) -> Iterator[bytes]:
    yield body[:20]
    yield body[20:]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize")]
)
def test_a_request_that_changes_nothing_is_sent_again(
    tmp_path: Path, servers: tuple[_Server, _Server], method: str, path: str
) -> None:
    ends, answers = servers
    body = b'{"model": "base", "prompt": "' + b"the " * 1000 + b'"}' if method == "POST" else b""
    with _haproxy(tmp_path, ends.port, answers.port) as http:
        # Its body comes in pieces, apart from its head, as with most clients.
        answer = http.request(method, path, content=_halves(body), headers={"Content-Length": str(len(body))})
    assert (answer.status_code, answer.text) == (200, "done")
    assert len(ends.received) == len(answers.received) == 1
    assert all(one.endswith(body) for one in (*ends.received, *answers.received))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/adapters/a/rollback"),
        ("POST", "/v1/load_lora_adapter"),
        ("PUT", "/v1/adapters/a"),
        ("DELETE", "/v1/adapters/a"),
    ],
)
def test_a_change_is_not_made_twice_and_the_client_is_told(
    tmp_path: Path, servers: tuple[_Server, _Server], method: str, path: str
) -> None:
    ends, answers = servers
    with _haproxy(tmp_path, ends.port) as http:
        lost = http.request(method, path, content=b"{}")
    assert lost.status_code == 502
    assert lost.headers["retry-after"] == "1"
    assert lost.json()["error"]["code"] == "ingress_lost"
    assert len(ends.received) == 1 and not answers.received


def test_without_a_server_that_takes_it_a_request_is_refused_in_our_words(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with _haproxy(tmp_path, nobody.getsockname()[1]) as http:
            refused = http.get("/v1/models")
    assert refused.status_code == 503
    assert (refused.headers["content-type"], refused.headers["retry-after"]) == ("application/json", "1")
    assert refused.json()["error"]["type"] == "service_unavailable_error"


def test_one_that_has_just_started_says_so_until_it_knows_the_application(tmp_path: Path) -> None:
    with _haproxy(tmp_path) as http:
        refused = http.get("/v1/models")
    assert refused.status_code == 503
    assert (refused.headers["content-type"], refused.headers["retry-after"]) == ("application/json", "1")
    assert refused.json()["error"]["code"] == "not_ready"


@pytest.mark.parametrize(
    ("method", "path", "is_used_again"),
    [("POST", "/v1/completions", False), ("POST", "/v1/completions", True), ("PUT", "/v1/adapters/a", False)],
)
def test_a_server_whose_host_has_vanished_is_not_waited_for(
    tmp_path: Path, servers: tuple[_Server, _Server], method: str, path: str, is_used_again: bool
) -> None:
    """It has the request, or HAProxy sends it by a connection that is still open."""
    _, answers = servers
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        _haproxy(tmp_path, listener.getsockname()[1], answers.port) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        answering = pool.submit(http.request, method, path, content=b"{}")
        connection, _ = listener.accept()
        with connection:
            assert _request(connection)
            if is_used_again:
                connection.sendall(_ANSWER.replace(b"Connection: close\r\n", b""))
                assert answering.result().text == http.get("/v1/models").text == "done"
            with vanished(listener, connection):
                if is_used_again:
                    answering = pool.submit(http.request, method, path, content=b"{}")
                answer = answering.result()
    assert answer.status_code == (502 if method == "PUT" else 200)


@pytest.mark.parametrize("given", ["mine 7f/3", "", "x" * 201, "a\tb", b"\x80", None])
def test_a_request_has_one_name_which_is_the_client_s_where_it_is_fit(
    tmp_path: Path, given: str | bytes | None
) -> None:
    """Ray says the name that it was given after the one that the answer has."""
    names = b"X-Request-Id: first\r\nX-Request-Id: second\r\n"
    server = _Server(_ANSWER.replace(b"Connection", names + b"Connection"))
    server.start()
    try:
        with _haproxy(tmp_path, server.port) as http:
            answer = http.get("/health", headers={} if given is None else {"X-Request-Id": given})
    finally:
        server.end()
    assert answer.headers.get_list("X-Request-Id") == ["first"]
    (name,) = re.findall(rb"(?i)x-request-id: ?(.*)\r\n", server.received[0])
    assert name == b"mine 7f/3" if given == "mine 7f/3" else re.fullmatch(rb"[0-9a-f]{32}", name), name


@pytest.mark.parametrize(("first", "second"), [(b"mine", b"\x80"), (b"\x80", b"mine"), (b"mine", b"other")])
def test_of_several_names_the_first_one_counts(tmp_path: Path, first: bytes, second: bytes) -> None:
    server = _Server(_ANSWER)
    server.start()
    try:
        with _haproxy(tmp_path, server.port) as http:
            http.get("/health", headers=[(b"X-Request-Id", first), (b"X-Request-Id", second)])
    finally:
        server.end()
    (name,) = re.findall(rb"(?i)x-request-id: ?(.*)\r\n", server.received[0])
    assert name == b"mine" if first == b"mine" else re.fullmatch(rb"[0-9a-f]{32}", name), name


def test_no_client_says_from_where_it_comes(tmp_path: Path) -> None:
    """Who has no key is told from others by that."""
    server = _Server(_ANSWER)
    server.start()
    try:
        with _haproxy(tmp_path, server.port) as http:
            http.get("/health", headers=[("X-Forwarded-For", "192.0.2.1"), ("X-Forwarded-For", "192.0.2.2")])
    finally:
        server.end()
    assert re.findall(rb"(?i)x-forwarded-for: (.*)\r\n", server.received[0]) == [b"127.0.0.1"]


@pytest.mark.parametrize(("kind", "is_ours"), [(b"application/json", True), (b"text/plain; charset=utf-8", False)])
def test_what_uvicorn_says_of_a_head_gets_the_shape_of_our_errors(tmp_path: Path, kind: bytes, is_ours: bool) -> None:
    server = _Server(b"HTTP/1.1 400 Bad Request\r\nContent-Type: " + kind + b"\r\nConnection: close\r\n\r\nInvalid.")
    server.start()
    try:
        with _haproxy(tmp_path, server.port) as http:
            answer = http.request("BREW", "/v1/models")
    finally:
        server.end()
    assert answer.status_code == 400
    assert (answer.text == "Invalid.") is is_ours
    assert is_ours or answer.json()["error"]["code"] == "bad_request"


def test_a_body_that_fits_no_buffer_is_not_waited_for(tmp_path: Path) -> None:
    """Who refuses it need not read it."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener, _haproxy(tmp_path, listener.getsockname()[1]) as http:
        address = http.base_url.host, http.base_url.port
        with socket.create_connection(address, timeout=_BODY_SECONDS / 2) as client:
            client.sendall(head)
            listener.settimeout(_BODY_SECONDS / 2)
            connection, _ = listener.accept()
            with connection:
                connection.sendall(_ANSWER)
                assert client.recv(1000).endswith(b"done")


def _connect(http: httpx.Client, source: str = "127.0.0.1") -> socket.socket:
    address = http.base_url.host, http.base_url.port
    return socket.create_connection(address, timeout=LIMIT_SECONDS, source_address=(source, 0))


def _from(http: httpx.Client, source: str) -> socket.socket:
    """A connection from any address, where HAProxy is told of them."""
    connection = _connect(http)
    kind, target = ("TCP6", "::1") if ":" in source else ("TCP4", "127.0.0.1")
    connection.sendall(f"PROXY {kind} {source} {target} 1000 80\r\n".encode())
    return connection


def _ask(connection: socket.socket, headers: bytes = b"") -> bytes:
    """The head and, where it has come with it, the body of an answer."""
    connection.sendall(_GET + headers + b"\r\n")
    return connection.recv(10_000)


def _read_all(connection: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    with connection.makefile("rb") as file:
        return file.read()


_GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
_POST = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\nabc"


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (b"", b""),
        (_GET, b" 408 "),
        (_POST % (b"/v1/completions", 1_000), b" 408 "),
        (_POST % (b"/v1/completions", 1_000_000), b" 400 "),  # where the ingress has not refused it sooner
        (_POST % (b"/v1/adapters/a/rollback", 1_000), b" 400 "),
    ],
    ids=["nothing", "head", "body", "long body", "change"],
)
def test_what_does_not_come_is_not_waited_for(
    tmp_path: Path, servers: tuple[_Server, _Server], part: bytes, status: bytes
) -> None:
    _, reads = servers
    with (
        _haproxy(tmp_path, reads.port, MULTILORA_STALL_LIMIT_SECONDS="0.5") as http,
        _connect(http) as client,
    ):
        client.sendall(part)
        answer = _read_all(client)
    assert status in answer.partition(b"\r\n")[0]
    assert bool(answer) == bool(part)
    assert part[:4] != b"POST" or b'"type": "invalid_request_error"' in answer


def _trickled(connection: socket.socket, rest: bytes, beyond_seconds: float) -> bytes:
    """The answer to a request whose rest comes byte by byte, ten a second, and after that time at once."""
    started_seconds = time.monotonic()
    connection.settimeout(0.1)
    for sent in range(len(rest)):
        with suppress(TimeoutError):
            return connection.recv(10_000)
        if time.monotonic() - started_seconds > beyond_seconds:
            break
        connection.sendall(rest[sent : sent + 1])
    connection.settimeout(LIMIT_SECONDS)
    connection.sendall(rest[sent:])
    return connection.recv(10_000)


def test_a_body_that_trickles_is_waited_for_as_long_as_the_slowest_that_fits(
    tmp_path: Path, servers: tuple[_Server, _Server]
) -> None:
    """Half a second and what 512 bytes may take, where its client is never silent for long."""
    _, reads = servers
    own = {"MULTILORA_STALL_LIMIT_SECONDS": "0.5", "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "512"}
    with _haproxy(tmp_path, reads.port, **own) as http, _connect(http) as client:
        client.sendall(_POST % (b"/v1/completions", 503))
        answer = _trickled(client, b"x" * 500, LIMIT_SECONDS)
    assert b" 408 " in answer.partition(b"\r\n")[0]
    assert b'"code": "request_timeout"' in answer
    assert not reads.received


def test_a_body_that_trickles_may_take_longer_than_a_head(tmp_path: Path, servers: tuple[_Server, _Server]) -> None:
    _, reads = servers
    with _haproxy(tmp_path, reads.port, MULTILORA_STALL_LIMIT_SECONDS="2") as http, _connect(http) as client:
        client.sendall(_POST % (b"/v1/completions", 503))
        assert _trickled(client, b"x" * 500, 2.5).endswith(b"done")
    assert reads.received[0].endswith(b"x" * 500)


@pytest.mark.parametrize("num_sent_first", [0, -1], ids=["all of it", "its end"])
def test_who_waits_for_its_answer_may_be_silent(num_sent_first: int, tmp_path: Path) -> None:
    """Also in the middle of a stream."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with _haproxy(tmp_path, port, MULTILORA_STALL_LIMIT_SECONDS="0.2") as http, _connect(http) as client:
            client.sendall(_POST % (b"/v1/completions", 3))
            connection, _ = listener.accept()
            client.settimeout(LIMIT_SECONDS)
            with connection:
                connection.sendall(_ANSWER[:num_sent_first])
                if num_sent_first:
                    assert client.recv(1000).endswith(b"don")
                # Six times as long as it may be silent that owes something: nothing comes from either side.
                client.settimeout(1.8)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                connection.sendall(_ANSWER[num_sent_first:])
            client.settimeout(LIMIT_SECONDS)
            assert client.recv(1000).endswith(b"done"[num_sent_first:])


def test_who_does_not_read_its_answer_loses_its_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with _haproxy(tmp_path, port, MULTILORA_STALL_LIMIT_SECONDS="0.5") as http, _connect(http) as client:
            client.sendall(_GET + b"\r\n")
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(LIMIT_SECONDS)
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                with pytest.raises(OSError, match=r"Broken pipe|reset"):
                    connection.sendall(b"x" * (1 << 28))


def test_an_address_has_half_of_the_connections(tmp_path: Path, servers: tuple[_Server, _Server]) -> None:
    _, answers = servers
    with ExitStack() as stack:
        http = stack.enter_context(_haproxy(tmp_path, answers.port, RAY_SERVE_HAPROXY_MAXCONN="16"))

        def connected(source: str = "127.0.0.1") -> socket.socket:
            return stack.enter_context(_connect(http, source))

        def ask(connection: socket.socket) -> None:
            assert _ask(connection).endswith(b"done")

        held = [connected() for _ in range(8)]
        for one in held:
            ask(one)
        refused = connected()
        refused.sendall(_GET + b"\r\n")
        answer = _read_all(refused)
        assert b" 429 " in answer.partition(b"\r\n")[0]
        assert b"retry-after: 1\r\n" in answer and b'"code": "queue_full"' in answer
        # What it has may be used, and others come in.
        ask(held[0])
        ask(connected("127.0.0.2"))
        # Beyond those that are told so, of which there is one, they are closed at once.
        beyond = []
        for _ in range(4):
            with suppress(ConnectionError):
                beyond.append(connected())
        wait_for(lambda: sum(not _is_open(one) for one in beyond) + 4 - len(beyond) >= 3, "three to be closed")


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_a_trusted_proxy_has_no_share_and_says_who_the_client_is(tmp_path: Path) -> None:
    server = _Server(_ANSWER)
    server.start()
    trusted = {"MULTILORA_TRUSTED_PROXIES": "127.0.0.9, 10.0.0.0/8", "RAY_SERVE_HAPROXY_MAXCONN": "4"}
    try:
        with ExitStack() as stack:
            http = stack.enter_context(_haproxy(tmp_path, server.port, **trusted))
            proxy = [stack.enter_context(_connect(http, "127.0.0.9")) for _ in range(3)][-1]
            assert _ask(proxy, b"X-Forwarded-For: 192.0.2.1\r\n").endswith(b"done")
            assert _ask(proxy).endswith(b"done")
            stranger = stack.enter_context(_connect(http, "127.0.0.8"))
            assert _ask(stranger, b"X-Forwarded-For: 192.0.2.1\r\n").endswith(b"done")
    finally:
        server.end()
    said = [re.findall(rb"(?i)x-forwarded-for: (.*)\r\n", one) for one in server.received]
    assert said == [[b"192.0.2.1"], [b"127.0.0.9"], [b"127.0.0.8"]]


def test_a_trusted_network_is_trusted_and_no_other_that_is_spelt_with_its_numbers(tmp_path: Path) -> None:
    """6to4 addresses have an IPv4 address in them, and so had IPv4-compatible ones. Both can be anybody's."""
    trusted = ["10.1.2.3", "::ffff:10.1.2.3", "192.0.2.7", "2001:db8::7"]
    others = ["2002:a01:203:1::1", "::10.1.2.3", "11.1.2.3", "192.0.2.6", "2002:c000:207::1", "2001:db9::7"]
    server = _Server(_ANSWER)
    server.start()
    try:
        proxies = "10.0.0.0/8, 192.0.2.7,2001:db8::/32"
        with _haproxy(tmp_path, server.port, is_told_sources=True, MULTILORA_TRUSTED_PROXIES=proxies) as http:
            for source in trusted + others:
                with _from(http, source) as connection:
                    assert _ask(connection, b"X-Forwarded-For: 198.51.100.1\r\n").endswith(b"done")
    finally:
        server.end()
    said = [re.findall(rb"(?i)x-forwarded-for: (.*)\r\n", one)[0].decode() for one in server.received]
    assert dict(zip(trusted + others, said, strict=True)) == dict.fromkeys(trusted, "198.51.100.1") | {
        one: one for one in others
    }


@pytest.mark.parametrize("proxies", ["::/0", "::/80", ",".join(f"2001:db8:{one}::/48" for one in range(100))])
def test_networks_of_ipv6_have_no_ipv4_address_in_them_however_many_there_are(tmp_path: Path, proxies: str) -> None:
    server = _Server(_ANSWER)
    server.start()
    trusted = "2001:db8:63::7" if proxies != "::/80" else "::7"
    sources = [trusted, "10.1.2.3", "::ffff:10.1.2.3"]
    try:
        with _haproxy(tmp_path, server.port, is_told_sources=True, MULTILORA_TRUSTED_PROXIES=proxies) as http:
            for source in sources:
                with _from(http, source) as connection:
                    assert _ask(connection, b"X-Forwarded-For: 198.51.100.1\r\n").endswith(b"done")
    finally:
        server.end()
    said = [re.findall(rb"(?i)x-forwarded-for: (.*)\r\n", one)[0].decode() for one in server.received]
    assert dict(zip(sources, said, strict=True)) == {trusted: "198.51.100.1"} | {one: one for one in sources[1:]}


def test_addresses_that_have_the_same_numbers_have_shares_of_their_own(
    tmp_path: Path, servers: tuple[_Server, _Server]
) -> None:
    """An IPv4 address has one, in either spelling; a 6to4 one has that of its /64, as all of IPv6."""
    _, answers = servers
    with ExitStack() as stack:
        http = stack.enter_context(
            _haproxy(tmp_path, answers.port, is_told_sources=True, RAY_SERVE_HAPROXY_MAXCONN="4")
        )

        def status(source: str) -> bytes:
            return _ask(stack.enter_context(_from(http, source))).split()[1]

        for first, second, third in [
            ("198.51.100.7", "198.51.100.7", "::ffff:198.51.100.7"),
            ("2002:c633:6407:1::1", "2002:c633:6407:1::2", "2002:c633:6407:1:9::1"),
            ("2002:c633:6407:2::1", "2002:c633:6407:2::2", "2002:c633:6407:2:9::1"),
        ]:
            assert [status(first), status(second), status(third)] == [b"200", b"200", b"429"]


def test_bounds_are_those_of_one_server_where_nothing_else_is_said() -> None:
    assert Settings.model_fields["stall_limit_seconds"].default == STALL_LIMIT_SECONDS


@contextmanager
def _answering(folder: Path) -> Iterator[tuple[int, int]]:
    """A process that answers every request for / with its folder's name; its id and its port."""
    folder.mkdir()
    (folder / "index.html").write_text(folder.name)
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"port (\d+)", process.stdout.readline())
            assert found is not None
            yield process.pid, int(found.group(1))
        finally:
            process.kill()


def test_a_server_that_stands_still_gets_nothing_until_it_goes_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        (pid, port), (_, other) = (stack.enter_context(_answering(tmp_path / name)) for name in ("stopped", "other"))
        http = stack.enter_context(_haproxy(tmp_path, port, other, checks=_CHECKS))
        assert {http.get("/").text for _ in range(4)} == {"stopped", "other"}
        with standing_still(pid):
            wait_for(lambda: http.get("/servers-up").text == "1", "it to leave the rotation")
            assert {http.get("/").text for _ in range(4)} == {"other"}
        wait_for(lambda: http.get("/servers-up").text == "2", "it to come back")
        assert {http.get("/").text for _ in range(4)} == {"stopped", "other"}


def test_a_configuration_is_extended_once_and_only_where_servers_are() -> None:
    grpc = "backend grpc\n    mode http\n    server a 127.0.0.1:1 proto h2 check\n"
    text = _written(_CONFIGURATION, 3, "e", "    server s0 127.0.0.1:2", _CHECKS) + grpc
    once = extended(text)
    assert extended(once) == once
    assert "return status 404" in once and "return status 503" not in once
    starting = extended(_WITHOUT_APPLICATION)
    assert extended(starting) == starting
    assert once.count("retry-on conn-failure empty-response") == once.count("wait-for-body") == 1
    assert once.endswith(grpc)
    of_servers = f" tcp-ut {VANISHED_SECONDS}s"
    assert once.count(of_servers) == 1
    assert [line for line in once.replace(of_servers, "").splitlines() if line in text] == text.splitlines()
