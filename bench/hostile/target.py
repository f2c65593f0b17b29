"""The server that is attacked, and every answer that it gave.

Whatever an attack sends, and however, its answers are counted here: `httpx` clients' and those on raw sockets, one by
one, errors inside of streams and batches too. So "no answer of 500 or above" is said of all of them.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

# Who asks for GET /health comes from another one: what is bounded is what one client does to others.
HOSTILE_ADDRESS = "127.0.0.66"
JSON = {"Content-Type": "application/json"}
# The status of what was not answered at all: its connection was reset, closed, or silent for too long.
NO_ANSWER = 0
_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ")
# What the error object of a failure of the server says in an answer that had begun.
FAULT = re.compile(rb'"type": ?"(?:server_error|service_unavailable_error)"')

Attack = Callable[[], object]


class Target:
    """The server, and who sends what to it. Attacks may use it from several threads."""

    def __init__(self, url: str, model: str, source: str | None = None, key: str | None = None) -> None:
        """`source` is the address of this machine that everything is sent from, `key` what the server asks for."""
        parts = urlsplit(url)
        assert parts.hostname in ("127.0.0.1", "localhost", "::1"), "for a server on this machine"
        self.url, self.model = url.rstrip("/"), model
        self.address = (parts.hostname or "", parts.port or 80)
        self.source = None if source is None else (source, 0)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        transport = httpx.HTTPTransport(local_address=source, limits=limits)
        self._http = httpx.Client(base_url=self.url, timeout=120, transport=transport, headers=self._headers)
        self._statuses, self._lock = Counter[int](), threading.Lock()

    def take_statuses(self) -> dict[int, int]:
        """How many answers of each status there were since the last call; NO_ANSWER for none."""
        with self._lock:
            taken, self._statuses = self._statuses, Counter()
        return dict(sorted(taken.items()))

    def _count(self, *statuses: int) -> None:
        with self._lock:
            self._statuses.update(statuses)

    def request(self, method: str, path: str, **options: Any) -> int:
        """One request, with what httpx takes; the status, or NO_ANSWER. An error that the server calls its own in the
        middle of an answer counts as a 500 beside that."""
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError:
            self._count(NO_ANSWER)
            return NO_ANSWER
        self._count(answer.status_code)
        if answer.status_code < 500:
            self._count(*[500] * len(FAULT.findall(answer.content)))
        return answer.status_code

    def post(self, path: str, body: bytes | dict[str, Any], times: int = 1) -> Attack:
        """An attack that is one request, or so many of it at once."""
        content = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        return lambda: at_once([lambda: self.request("POST", path, content=content, headers=JSON)] * times)

    def head(self, method: str, path: str, *headers: str) -> bytes:
        """Of a request of raw bytes, without the empty line at its end."""
        lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {text}" for name, text in self._headers.items())]
        return "".join(f"{line}\r\n" for line in (*lines, *headers)).encode()

    def json_request(self, path: str, body: dict[str, Any]) -> bytes:
        """A whole request of raw bytes."""
        content = json.dumps({"model": self.model, **body}).encode()
        head = self.head("POST", path, "Content-Type: application/json", f"Content-Length: {len(content)}")
        return head + b"\r\n" + content

    @contextmanager
    def connections(self, number: int) -> Iterator[list[socket.socket]]:
        """As many as the server lets be opened; closed at the end. What came on them is counted; that nothing did is
        not: nobody waited for it."""
        opened: list[socket.socket] = []
        with ExitStack() as held:
            with suppress(OSError):
                for _ in range(number):
                    one = socket.create_connection(self.address, 10, source_address=self.source)
                    opened.append(held.enter_context(one))
            yield opened
            for one in opened:
                one.settimeout(0.001)
                self._count(*_statuses(one, num_answers=1))

    def send(self, *pieces: bytes, num_answers: int = 1, times: int = 1, half_closed: bool = False) -> Attack:
        """An attack that is raw bytes, on a connection of its own, or on so many at once.

        num_answers  read until there are so many, or the connection is closed or silent for a minute
        half_closed  whether the client says that it sends no more before it reads
        """

        def attack() -> None:
            try:
                connection = socket.create_connection(self.address, timeout=60, source_address=self.source)
            except OSError:
                self._count(NO_ANSWER)
                return
            with connection:
                with suppress(OSError):  # refused before all was sent; there may be an answer all the same
                    for piece in pieces:
                        connection.sendall(piece)
                    if half_closed:
                        connection.shutdown(socket.SHUT_WR)
                self._count(*(_statuses(connection, num_answers) or [NO_ANSWER]))

        return lambda: at_once([attack] * times)

    def hold(self, number: int, sent: bytes, seconds: float, drip: bytes = b"") -> Attack:
        """An attack that sends this on many connections and reads nothing; `drip` follows on each every second."""

        def attack() -> None:
            with self.connections(number) as opened:
                for connection in opened:
                    with suppress(OSError):
                        connection.sendall(sent)
                ends = time.monotonic() + seconds
                while (left := ends - time.monotonic()) > 0:
                    time.sleep(min(left, 1.0))
                    for connection in opened:
                        with suppress(OSError):  # it has been dropped, as it should
                            connection.send(drip)

        return attack


def _statuses(connection: socket.socket, num_answers: int) -> list[int]:
    """Of so many answers, or of those that there are before the connection is closed or silent for too long; a 500
    beside them for each error that the server calls its own inside of a good one."""
    read = bytearray()
    with suppress(OSError):
        while len(_STATUS_LINE.findall(read)) < num_answers and (piece := connection.recv(1 << 16)):
            read += piece
    statuses = [int(status) for status in _STATUS_LINE.findall(read)]
    return statuses + [500] * (len(FAULT.findall(read)) if statuses[:1] == [200] else 0)


def at_once(attacks: Sequence[Attack]) -> None:
    """All of them at the same time, each in a thread."""
    if len(attacks) == 1:
        attacks[0]()
        return
    with ThreadPoolExecutor(len(attacks)) as pool:
        for done in [pool.submit(attack) for attack in attacks]:
            done.result()


def spread(attacks: Sequence[Attack], num_threads: int) -> Attack:
    """All of them, so many at a time, as one attack."""
    return lambda: at_once([in_turn(*attacks[index::num_threads]) for index in range(num_threads)])


def in_turn(*attacks: Attack) -> Attack:
    """One after the other, as one attack."""

    def attack() -> None:
        for one in attacks:
            one()

    return attack
