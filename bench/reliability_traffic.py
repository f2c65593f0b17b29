"""Who talks to the server in `bench.reliability`: clients that mean well, and one that means harm.

    .venv/bin/python -m bench.reliability_traffic URL KEY FIRST SECONDS    # the hostile one, by itself

It is a process of its own, with the least claim to the processor: what it takes to send all this is not the server's
affair, and in a process with the others it would hold Python's lock while they read their clocks.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from bench.hostile import HOSTILE_ADDRESS, Target, attacks
from service.settings import BUNDLED_ADAPTERS_DIR

ADAPTERS = ("default/shout", "default/reverse")
_FLOOD = 64
_LEAST_CLAIM = 19


@dataclass
class Seen:
    """What clients were answered in one part: seconds by kind of request, statuses, and when which was under way.

    spans  (kind, beginning, end) of requests that were served, on the clock of `time.perf_counter`; of the hostile
           client those of all that it did
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def percentile(self, kind: str, percent: int) -> float:
        """Of the seconds of one kind."""
        return statistics.quantiles(self.seconds[kind], n=100, method="inclusive")[percent - 1]

    def add(self, other: Seen) -> None:
        """What another one has seen."""
        for status, count in other.statuses.items():
            self.statuses[status] += count
        self.spans += other.spans
        for kind, seconds in other.seconds.items():
            self.seconds[kind] += seconds


class Client:
    """One that means well: a tenant, from an address of its own."""

    def __init__(self, url: str, key: str, number: int) -> None:
        transport = httpx.HTTPTransport(local_address=f"127.0.0.{10 + number}")
        authorization = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, transport=transport, timeout=300, headers=authorization)
        self._rng, self._name, self._alpha = random.Random(number), f"own-{number}", 1
        self._config = json.loads((BUNDLED_ADAPTERS_DIR / "shout" / "adapter_config.json").read_bytes())
        self._tensors = (BUNDLED_ADAPTERS_DIR / "shout" / "adapter_model.safetensors").read_bytes()

    def one(self, seen: Seen) -> None:
        """The next request."""
        kinds = {"first token": self._stream, "chat": self._chat, "tokenize": self._tokenize, "upload": self._upload}
        kind = self._rng.choices(list(kinds), weights=(6, 4, 4, 1))[0]
        started = time.perf_counter()
        status = kinds[kind](started)
        if isinstance(status, tuple):
            status, seconds = status
        else:
            seconds = time.perf_counter() - started
        seen.statuses[status] += 1
        if status < 400:
            seen.seconds[kind].append(seconds)
            seen.spans.append((kind, started, started + seconds))

    def _stream(self, started: float) -> int | tuple[int, float]:
        body = {"model": self._rng.choice(ADAPTERS), "prompt": "lamp tiger", "max_tokens": 24, "stream": True}
        first = None
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                first = first or time.perf_counter() - started
            return answer.status_code, first or 0.0

    def _chat(self, _started: float) -> int:
        messages = [{"role": "user", "content": "lamp tiger"}]
        body = {"model": self._rng.choice(ADAPTERS), "messages": messages, "max_tokens": 12}
        return self._http.post("/v1/chat/completions", json=body).status_code

    def _tokenize(self, _started: float) -> int:
        return self._http.post("/tokenize", json={"prompt": "lamp tiger " * 50}).status_code

    def _upload(self, _started: float) -> int:
        self._alpha += 1
        config = json.dumps({**self._config, "lora_alpha": self._alpha % 50 + 1}).encode()
        files = {
            "adapter_config": ("adapter_config.json", config),
            "adapter_model": ("adapter_model.safetensors", self._tensors),
        }
        self._http.delete(f"/v1/adapters/{self._name}")
        return self._http.post("/v1/adapters", data={"name": self._name}, files=files).status_code


class Hostile:
    """One that means harm: all of `bench.hostile`, and what takes longer than one request.

    first  of its attacks, in their order, the one to begin with
    """

    def __init__(self, url: str, key: str, first: int = 0) -> None:
        self._target = Target(url, "base", HOSTILE_ADDRESS, key)
        self._attacks: dict[str, Callable[[], object]] = {
            **attacks(self._target),
            "a flood of 512 sequences": self._flood,
            "20 streams that nobody reads": self._read_nothing,
            "20 uploads that send nothing": self._begin_uploads,
        }
        self._next = first

    def one(self, seen: Seen) -> None:
        """The next attack."""
        name = list(self._attacks)[self._next % len(self._attacks)]
        self._next += 1
        started = time.perf_counter()
        with suppress(httpx.HTTPError, OSError):
            outcome = self._attacks[name]()
            if isinstance(outcome, int):
                seen.statuses[outcome] += 1
        seen.spans.append((name, started, time.perf_counter()))

    def _flood(self) -> object:
        body = {"model": "base", "prompt": "the", "max_tokens": 100, "ignore_eos": True, "n": 8}
        send_one = self._target.post("/v1/completions", body)
        statuses: list[int] = []

        def send() -> None:
            with suppress(httpx.HTTPError):
                status = send_one()
                assert isinstance(status, int)
                statuses.append(status)

        threads = [threading.Thread(target=send) for _ in range(_FLOOD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(statuses, default=0)

    def _read_nothing(self) -> object:
        body = json.dumps({"prompt": "the", "max_tokens": 200, "stream": True, "ignore_eos": True, "n": 16}).encode()
        json_head = self._target.head("POST", "/v1/completions", "Content-Type: application/json")
        return self._hold(json_head + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def _begin_uploads(self) -> object:
        kind = "Content-Type: multipart/form-data; boundary=x"
        head = self._target.head("POST", "/v1/adapters", kind) + b"Content-Length: 1000000000\r\n\r\n"
        return self._hold(head + b'--x\r\nContent-Disposition: form-data; name="adapter_model"\r\n\r\n')

    def _hold(self, sent: bytes) -> object:
        """Twenty connections that send this and then do nothing for a while."""
        with ExitStack() as held:
            for _ in range(20):
                connection = socket.create_connection(self._target.address, 5, source_address=self._target.source)
                held.enter_context(connection)
                connection.sendall(sent)
            time.sleep(2)
        return None


def work(user: Any, until: float, lock: threading.Lock, seen: Seen) -> None:
    """Request after request until that time of `time.monotonic`; what has begun is finished."""
    mine = Seen()
    while time.monotonic() < until:
        try:
            user.one(mine)
        except httpx.HTTPError as error:
            mine.statuses[599] += 1
            print(f"{type(user).__name__}: {type(error).__name__} {error}", file=sys.stderr, flush=True)
    with lock:
        seen.add(mine)


def main() -> None:
    """The hostile one; what it has seen is written as JSON."""
    url, key, first, seconds = sys.argv[1:]
    os.nice(_LEAST_CLAIM)
    seen = Seen()
    work(Hostile(url, key, int(first)), time.monotonic() + float(seconds), threading.Lock(), seen)
    sys.stdout.buffer.write(msgspec.json.encode(seen))


if __name__ == "__main__":
    main()
