"""deploy/haproxy.cfg: HAProxy runs it before a real server. Ports and bounds are exchanged for those of a test."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.blocks import ROOT
from tests.support.http.server import Server, running_server, wait_for
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_tiny_model

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin") or ""
pytestmark = pytest.mark.skipif(not HAPROXY, reason="NOT RUN: there is no HAProxy (apt-get install haproxy)")

CONFIGURATION = ROOT / "deploy" / "haproxy.cfg"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    work = tmp_path_factory.mktemp("behind")
    base = make_tiny_model("lfm2", work / "base", max_position_embeddings=16_384)
    settings = {"trusted_proxies": "127.0.0.1", "refusal_lines_per_minute": 1, "log_format": "json"}
    with running_server(base, work, model_name="tiny", stall_limit_seconds=0.5, **settings) as running:
        yield running


@contextmanager
def _before(port: int, tmp_path: Path, **exchanged: str) -> Iterator[httpx.Client]:
    """A client of HAProxy before a server at this port. `exchanged`: words of the configuration, by what they become,
    as in `s1="30s"`."""
    text = CONFIGURATION.read_text()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        words = {":8080": f"fd@{listener.fileno()}", "127.0.0.1:8000": f"127.0.0.1:{port}", **exchanged}
        for old, new in words.items():
            text, number = re.subn(rf"(?<= ){re.escape(old)}(?=[ \n])", new, text)
            assert number, f"{old!r} stands nowhere"
        path = tmp_path / "haproxy.cfg"
        path.write_text(text)
        process = subprocess.Popen(
            [HAPROXY, "-db", "-f", str(path)], pass_fds=[listener.fileno()], stdout=sys.stderr, stderr=sys.stderr
        )
        stack.callback(process.wait, LIMIT_SECONDS)
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield stack.enter_context(httpx.Client(base_url=url, timeout=LIMIT_SECONDS))


@pytest.fixture
def proxy(server: Server, tmp_path: Path) -> Iterator[httpx.Client]:
    with _before(httpx.URL(server.url).port or 0, tmp_path, **{"30s": "500ms", "45s": "750ms"}) as made:
        yield made


def _answer(proxy: httpx.Client, sent: bytes) -> tuple[int, str]:
    """Status and text of what comes on a connection that sends this and no more."""
    url = proxy.base_url
    with socket.create_connection((url.host, url.port or 0), timeout=LIMIT_SECONDS) as connection:
        connection.sendall(sent)
        read = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = read.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def test_haproxy_finds_no_fault_in_the_file_as_it_is() -> None:
    checked = subprocess.run([HAPROXY, "-c", "-f", str(CONFIGURATION)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr


def test_answers_stream_through_it(proxy: httpx.Client) -> None:
    url = f"{proxy.base_url}".rstrip("/")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=LIMIT_SECONDS) as client:
        stream = client.completions.create(
            model="tiny", prompt="the", max_tokens=15_000, extra_body={"ignore_eos": True}, stream=True
        )
        next(iter(stream))  # far before the last one
        stream.close()


def test_clients_are_counted_by_their_own_address_whatever_they_write(server: Server, proxy: httpx.Client) -> None:
    names = [f"forged-{n}" for n in range(5)]
    for number, name in enumerate(names):
        headers = {"X-Forwarded-For": f"203.0.113.{number}", "X-Request-Id": name}
        assert proxy.get("/nothing", headers=headers).status_code == 404
    with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=LIMIT_SECONDS) as other:
        other.get(proxy.base_url.join("/nothing"), headers={"X-Request-Id": "of-another"})
    wait_for(lambda: server.log_lines("of-another"), "the line of the other client's refusal")
    # One line a minute of one client, and a minute may have ended in between.
    assert len([name for name in names if server.log_lines(name)]) <= 2


def test_a_client_that_does_not_send_on_is_answered(proxy: httpx.Client) -> None:
    assert _answer(proxy, b"GET /health HTTP/1.1\r\nHost: x\r\n")[0] == 408
    assert _answer(proxy, b"GET /health\x00 HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 400
    # The server's own answer.
    status, body = _answer(proxy, b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")


def test_an_address_has_so_many_connections_and_another_one_its_own(server: Server, tmp_path: Path) -> None:
    port = httpx.URL(server.url).port or 0
    head = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with _before(port, tmp_path, **{"1024": "2", "1280": "3"}) as proxy, ExitStack() as stack:
        address = (proxy.base_url.host, proxy.base_url.port or 0)
        held = [stack.enter_context(socket.create_connection(address, timeout=LIMIT_SECONDS)) for _ in range(2)]
        for one in held:
            one.sendall(head)
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
        status, body = _answer(proxy, head)
        assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=LIMIT_SECONDS) as other:
            assert other.get(proxy.base_url.join("/version")).status_code == 200


def test_without_a_server_it_says_that_nobody_takes_requests(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with _before(nobody.getsockname()[1], tmp_path) as proxy:
            answer = proxy.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert answer.headers["Retry-After"] == "1"
