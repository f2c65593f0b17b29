"""What hostile requests cost the others: the longest wait of GET /health while each of them is served.

    make serve                                       # in another terminal; the server must be on this machine
    .venv/bin/python -m bench.hostile                # or --url=..., --model=...
    .venv/bin/python -m bench.hostile --own-server   # its own server, and the longest stretch of its event loop too

Every attack is bounded and ends by itself. Only loopback is talked to.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench import loop_stretches
from bench.server_process import running_server

MIB = 1 << 20
# Who asks for GET /health comes from another one: what is bounded is what one client does to others.
HOSTILE_ADDRESS = "127.0.0.66"
JSON = {"Content-Type": "application/json"}
Attack = Callable[[], object]


class Target:
    """The server, and who sends what to it."""

    def __init__(self, url: str, model: str, source: str | None = None, key: str | None = None) -> None:
        """`source` is the address of this machine that everything is sent from, `key` what the server asks for."""
        parts = urlsplit(url)
        assert parts.hostname in ("127.0.0.1", "localhost", "::1"), "for a server on this machine"
        self.url, self.model = url.rstrip("/"), model
        self.address = (parts.hostname or "", parts.port or 80)
        self.source = None if source is None else (source, 0)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        transport = httpx.HTTPTransport(local_address=source)
        self.http = httpx.Client(timeout=120, transport=transport, headers=self._headers)

    def post(self, path: str, body: bytes | dict[str, Any]) -> Attack:
        """An attack that is one request; tells the answer's status."""
        content = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        return lambda: self.http.post(self.url + path, content=content, headers=JSON).status_code

    def head(self, method: str, path: str, *headers: str) -> bytes:
        """Of a request of raw bytes, without the empty line at its end."""
        lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {text}" for name, text in self._headers.items())]
        return "".join(f"{line}\r\n" for line in (*lines, *headers)).encode()

    def send(self, *pieces: bytes) -> Attack:
        """An attack that is raw bytes; tells how the answer begins."""

        def attack() -> object:
            with socket.create_connection(self.address, timeout=10, source_address=self.source) as connection:
                try:
                    for piece in pieces:
                        connection.sendall(piece)
                    return connection.recv(1 << 16)[:12].decode("ascii", "replace")
                except OSError as error:
                    return type(error).__name__

        return attack

    def send_on_many(self, num_connections: int, *pieces: bytes) -> Attack:
        """An attack that is the same raw bytes on many connections at once; tells how many of them had an answer."""
        one = self.send(*pieces)

        def attack() -> object:
            with ThreadPoolExecutor(num_connections) as pool:
                answers = pool.map(lambda _: str(one()), range(num_connections))
                return sum(answer.startswith("HTTP") for answer in answers)

        return attack

    def hold_connections(self) -> object:
        """Open many connections and send nothing; tells what one more is answered."""
        held = []
        try:
            for _ in range(1500):
                held.append(socket.create_connection(self.address, timeout=5, source_address=self.source))
            return httpx.get(f"{self.url}/health").status_code
        except (OSError, httpx.TransportError) as error:
            return f"{type(error).__name__} after {len(held)}"
        finally:
            for connection in held:
                connection.close()


@contextmanager
def worst_wait(url: str) -> Iterator[list[float]]:
    """Seconds that each GET /health on one kept connection takes meanwhile."""
    waits: list[float] = []
    ended = threading.Event()

    def probe() -> None:
        with httpx.Client(timeout=120) as client:
            while not ended.wait(0.01):
                started = time.perf_counter()
                client.get(f"{url}/health")
                waits.append(time.perf_counter() - started)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        time.sleep(0.3)
        waits.clear()
        yield waits
        time.sleep(0.1)
    finally:
        ended.set()
        thread.join()


def attacks(target: Target) -> dict[str, Attack]:
    """All of them, by what is told of them."""
    long = {"prompt": "the", "max_tokens": 200, "ignore_eos": True, "n": 16}
    stops = [["a" * length + chr(65 + index) for index in range(32)] for length in (999, 127)]
    item = {"model": target.model, "prompt": "lamp tiger " * 20, "max_tokens": 2, "stop": stops[1]}
    lists = b"[" + b"[]," * (16 * MIB // 3 - 2) + b"[]]"
    user = {"role": "user"}
    chunked = target.head("POST", "/tokenize", "Content-Type: application/json", "Transfer-Encoding: chunked")
    small = target.head("POST", "/tokenize", "Content-Type: application/json", "Content-Length: 48001")
    small += b"\r\n["
    called = {"function": {"name": "f", "arguments": "[" + "[]," * 20_000 + "[]]"}}
    return {
        "16 choices, nothing else": target.post("/v1/completions", long),
        "the same with 32 stop strings of 1,000 characters": target.post("/v1/completions", {**long, "stop": stops[0]}),
        "the same with 32 stop strings of 128 characters": target.post("/v1/completions", {**long, "stop": stops[1]}),
        "a body of 16 MiB of empty lists": target.post("/v1/completions", lists),
        "/detokenize of 1,048,576 tokens": target.post("/detokenize", {"tokens": [100] * MIB}),
        "/tokenize of 1,000,000 characters": target.post("/tokenize", {"prompt": "lamp tiger " * 90_000}),
        "a message of 16,000 parts": target.post(
            "/v1/chat/completions", {"messages": [{**user, "content": [{"type": "text", "text": "a"}] * 16_000}]}
        ),
        "16,000 messages": target.post("/v1/chat/completions", {"messages": [{**user, "content": "a"}] * 16_000}),
        "1,048,576 numbers for the template": target.post(
            "/v1/chat/completions",
            {"messages": [{**user, "content": "a"}], "chat_template_kwargs": {"a": [1] * MIB}, "max_tokens": 1},
        ),
        "JSON of 12 MiB inside of tool calls": target.post(
            "/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [called]}] * 200}
        ),
        "a batch of 256, each with 32 stop strings": target.post(
            "/v1/completions/batch", json.dumps({"items": [item] * 256}).encode()
        ),
        "log probabilities of 30 prompts": target.post(
            "/v1/completions", {"prompt": ["lamp " * 60] * 30, "echo": True, "logprobs": 20, "max_tokens": 1}
        ),
        "2,000 requests on one connection at once": target.send(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 2000),
        "500,000 chunks of a byte": target.send(chunked + b"\r\n", b"1\r\n \r\n" * 500_000),
        "200 connections with 40,000 chunks of a byte each": target.send_on_many(
            200, chunked + b"\r\n", b"1\r\n \r\n" * 40_000, b"0\r\n\r\n"
        ),
        "200 connections with a long head each": target.send_on_many(
            200, b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 3900 + b"\r\n"
        ),
        "200 connections with 16,000 empty lists each": target.send_on_many(200, small + b"[]," * 15_999 + b"[]]"),
        "a head of 3,900 headers": target.send(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 3900 + b"\r\n"),
        "Content-Length with Transfer-Encoding": target.send(chunked + b"Content-Length: 4\r\n\r\n0\r\n\r\n"),
        "1,500 idle connections": target.hold_connections,
    }


def main() -> None:
    """Run them one after the other."""
    parser = argparse.ArgumentParser(description="Longest wait of GET /health while hostile requests are served.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="base")
    parser.add_argument("--only", default="", help="those attacks whose names have this in them")
    parser.add_argument("--own-server", action="store_true", help="start one, see bench.loop_stretches")
    given = parser.parse_args()
    if not given.own_server:
        run(Target(given.url, given.model, HOSTILE_ADDRESS), None, given.only)
        return
    with tempfile.TemporaryDirectory(prefix="hostile-") as root:
        stretches = Path(root) / "stretches"
        os.environ[loop_stretches.VARIABLE] = str(stretches)
        with running_server(None, Path(root), module="bench.loop_stretches", min_free_disk_bytes=0) as server:
            run(Target(server.url, given.model, HOSTILE_ADDRESS), stretches, given.only)


def run(target: Target, stretches: Path | None, only: str) -> None:
    """A line for each attack whose name has `only` in it; with the file of `bench.loop_stretches` the longest of
    them too."""
    for name, attack in attacks(target).items():
        if only not in name:
            continue
        begun = time.monotonic()
        with worst_wait(target.url) as waits:
            started = time.perf_counter()
            outcome = attack()
            seconds = time.perf_counter() - started
        told = f"| {name} | {outcome} | {seconds:.1f} s | {max(waits) * 1e3:.0f} ms |"
        if stretches is not None:
            told += f" {loop_stretches.longest_since(stretches, begun) * 1e3:.0f} ms |"
        print(told, flush=True)


if __name__ == "__main__":
    main()
