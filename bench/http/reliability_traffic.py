"""Clients of the server in `bench.http.reliability`: several that mean well, and one that means harm.

    .venv/bin/python -m bench.http.reliability_traffic URL KEY FIRST SECONDS    # the hostile one, by itself

It is a process of its own, with the least claim to the processor: what it takes to send all this is not the server's
affair, and in a process with the others it would hold Python's lock while they read their clocks.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from bench.hostile.attacks import attacks
from bench.hostile.target import FAULT, HOSTILE_ADDRESS, Target
from service.settings import BUNDLED_ADAPTERS_DIR

ADAPTERS = ("default/shout", "default/reverse")
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
            faulty = False
            for line in answer.iter_lines():
                first = first or time.perf_counter() - started
                faulty = faulty or FAULT.search(line.encode()) is not None
            return 500 if faulty else answer.status_code, first or 0.0

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
    """One that means harm: all of `bench.hostile`, one after the other.

    first  of its attacks, in their order, the one to begin with
    """

    def __init__(self, url: str, key: str, first: int = 0) -> None:
        self._target = Target(url, "base", HOSTILE_ADDRESS, key)
        self._attacks = list(attacks(self._target).items())
        self._next = first

    def one(self, seen: Seen) -> None:
        """The next attack. All answers that it got are counted, those on raw sockets too."""
        name, attack = self._attacks[self._next % len(self._attacks)]
        self._next += 1
        started = time.perf_counter()
        attack()
        seen.spans.append((name, started, time.perf_counter()))
        for status, count in self._target.take_statuses().items():
            seen.statuses[status] += count
            if status >= 500:
                print(f"{name}: {count} answers of {status}", file=sys.stderr, flush=True)


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
