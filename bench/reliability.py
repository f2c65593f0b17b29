"""Mixed traffic of several clients, first by themselves and then beside a hostile one.

    .venv/bin/python -m bench.reliability --minutes=30     # starts its own server; --minutes for both parts together

The clients come from addresses of their own on loopback. Five of them stream completions with adapters, chat, count
tokens and upload, replace and delete an adapter; in the second part the sixth sends what `bench.hostile` has, floods
with requests, begins uploads and reads nothing. Told are the others' times in both parts, and in the second beside each
thing that the hostile one does; all answers of 500 and above; how the memory of each process grows in the last half of
the second part, and the most it had in each quarter: freed memory goes back now and then, so that it rises and falls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.hostile import Target, attacks
from bench.server_process import Server, start_server
from service.settings import BUNDLED_ADAPTERS_DIR

ADAPTERS = ("shout", "reverse")
NUM_CLIENTS = 5
HOSTILE = "127.0.0.66"
_FLOOD = 64


@dataclass
class Seen:
    """What clients were answered in one part: seconds by kind of request, statuses, and when which was under way.

    spans  (kind, beginning, end) of requests that were served, on the clock of `time.perf_counter`; of the hostile
           client those of all that it did
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: Counter[int] = field(default_factory=Counter)
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def percentile(self, kind: str, percent: int) -> float:
        """Of the seconds of one kind."""
        return statistics.quantiles(self.seconds[kind], n=100, method="inclusive")[percent - 1]


class Client:
    """One that means well, from an address of its own."""

    def __init__(self, url: str, number: int) -> None:
        transport = httpx.HTTPTransport(local_address=f"127.0.0.{10 + number}")
        self._http = httpx.Client(base_url=url, transport=transport, timeout=300)
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
    """One that means harm: all of `bench.hostile`, and what takes longer than one request."""

    def __init__(self, url: str) -> None:
        self._target = Target(url, "base", HOSTILE)
        self._attacks = {
            **attacks(self._target),
            "a flood of 512 sequences": self._flood,
            "20 streams that nobody reads": self._read_nothing,
            "20 uploads that send nothing": self._begin_uploads,
        }
        self._at, self._url = 0, url

    def one(self, seen: Seen) -> None:
        """The next attack."""
        self._at += 1
        name = list(self._attacks)[self._at % len(self._attacks)]
        started = time.perf_counter()
        with suppress(httpx.HTTPError, OSError):
            outcome = self._attacks[name]()
            if isinstance(outcome, int):
                seen.statuses[outcome] += 1
        seen.spans.append((name, started, time.perf_counter()))

    def _flood(self) -> object:
        body = {"model": "base", "prompt": "the", "max_tokens": 100, "ignore_eos": True, "n": 8}
        statuses: list[int] = []

        def send() -> None:
            with suppress(httpx.HTTPError):
                statuses.append(self._target.http.post(f"{self._url}/v1/completions", json=body).status_code)

        threads = [threading.Thread(target=send) for _ in range(_FLOOD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(statuses, default=0)

    def _read_nothing(self) -> object:
        body = json.dumps({"prompt": "the", "max_tokens": 200, "stream": True, "ignore_eos": True, "n": 16}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        return self._hold(head % len(body) + body)

    def _begin_uploads(self) -> object:
        head = b"POST /v1/adapters HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n"
        kind = b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
        return self._hold(head + kind + b'--x\r\nContent-Disposition: form-data; name="adapter_model"\r\n\r\n')

    def _hold(self, sent: bytes) -> object:
        """Twenty connections that send this and then do nothing for a while."""
        import socket

        with ExitStack() as held:
            for _ in range(20):
                connection = socket.create_connection(self._target.address, 5, source_address=self._target.source)
                held.enter_context(connection)
                connection.sendall(sent)
            time.sleep(2)
        return None


class Memory(threading.Thread):
    """Resident bytes of the server and its children, once a second, by what they are."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server, self.ended = server, threading.Event()
        self.samples: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def run(self) -> None:
        while not self.ended.wait(1.0):
            self._sample(self._server.process.pid, "server")
            for module, name in (("service.engine.process", "engine"), ("template_worker", "template worker")):
                for pid in self._server.child_pids_of(module)[:1]:
                    self._sample(pid, name)

    def _sample(self, pid: int, name: str) -> None:
        with suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self.samples[name].append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))

    def slopes(self, since: float) -> dict[str, float]:
        """Bytes per minute of each, from the samples after that time, by least squares."""
        found = {}
        for name, samples in self.samples.items():
            late = [(at, size) for at, size in samples if at >= since]
            if len(late) > 10:
                found[name] = statistics.linear_regression(*zip(*late, strict=True)).slope * 60
        return found

    def quarters(self, since: float, until: float) -> dict[str, list[int]]:
        """Most bytes of each in the four quarters of that time."""
        span = (until - since) / 4
        found = {}
        for name, samples in self.samples.items():
            most = [0] * 4
            for at, size in samples:
                if since <= at < until:
                    quarter = int((at - since) / span)
                    most[quarter] = max(most[quarter], size)
            found[name] = most
        return found


def beside_each(alone: Seen, beside: Seen, hostile: Seen) -> list[tuple[str, int, float, float]]:
    """(what the hostile client did, the others' requests meanwhile, their median and slowest hundredth), in units of
    the slowest hundredth alone of each one's kind; the worst first."""
    usual = {kind: alone.percentile(kind, 99) for kind in alone.seconds}
    found: dict[str, list[float]] = defaultdict(list)
    for name, began, ended in hostile.spans:
        for kind, started, done in beside.spans:
            if started < ended and done > began:
                found[name].append((done - started) / usual[kind])
    rows = []
    for name, parts in found.items():
        if len(parts) > 1:
            cuts = statistics.quantiles(parts, n=100, method="inclusive")
            rows.append((name, len(parts), cuts[49], cuts[98]))
    return sorted(rows, key=lambda row: -row[3])


def part(users: list[Any], seconds: float, seen: dict[str, Seen]) -> None:
    """All of them at once for so long; each finishes what it has begun."""
    until = time.monotonic() + seconds

    def work(user: Any) -> None:
        mine = Seen()
        while time.monotonic() < until:
            try:
                user.one(mine)
            except httpx.HTTPError as error:
                mine.statuses[599] += 1
                print(f"{type(user).__name__}: {type(error).__name__} {error}", flush=True)
        seen_of(user, mine, seen, lock)

    lock = threading.Lock()
    threads = [threading.Thread(target=work, args=(user,)) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def seen_of(user: Any, mine: Seen, seen: dict[str, Seen], lock: Any) -> None:
    """Add what one has seen to what its kind has."""
    with lock:
        whole = seen.setdefault(type(user).__name__, Seen())
        whole.statuses += mine.statuses
        whole.spans += mine.spans
        for kind, seconds in mine.seconds.items():
            whole.seconds[kind] += seconds


def tell_memory(memory: Memory, since: float, until: float, say: Callable[[str], None]) -> None:
    """What the processes took in that time."""
    slopes, quarters = memory.slopes((since + until) / 2), memory.quarters(since, until)
    for name, slope in slopes.items():
        most = ", ".join(f"{size / (1 << 20):.0f}" for size in quarters[name])
        say(f"memory of the {name}: {slope / (1 << 20):+.2f} MiB per minute; most in each quarter: {most} MiB")


def tell(alone: Seen, beside: Seen, hostile: Seen, say: Callable[[str], None]) -> int:
    """The tables; how many answers were 500 or above."""
    say("| Request | alone: p50, p99 | beside: p50, p99 | p99 beside / alone |\n|---|---|---|---|")
    for kind in alone.seconds:
        times = [seen.percentile(kind, percent) * 1e3 for seen in (alone, beside) for percent in (50, 99)]
        cells = [
            f"{kind} ({len(alone.seconds[kind])}, {len(beside.seconds[kind])})",
            f"{times[0]:.0f}, {times[1]:.0f} ms",
            f"{times[2]:.0f}, {times[3]:.0f} ms",
            f"{times[3] / times[1]:.1f}",
        ]
        say(f"| {' | '.join(cells)} |")
    for name, seen in (("alone", alone), ("beside", beside), ("the hostile one", hostile)):
        say(f"answers {name}: {dict(sorted(seen.statuses.items()))}")
    say("| Beside | requests | p50 | p99, in units of the p99 alone |\n|---|---|---|---|")
    for what, count, half, most in beside_each(alone, beside, hostile):
        say(f"| {what} | {count} | {half:.2f} | {most:.1f} |")
    return sum(count for seen in (alone, beside, hostile) for status, count in seen.statuses.items() if status >= 500)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed traffic beside a hostile client.")
    parser.add_argument("--minutes", type=float, default=30.0)
    given = parser.parse_args()
    seconds = given.minutes * 30
    with tempfile.TemporaryDirectory(prefix="reliability-") as root:
        server = start_server(None, Path(root), min_free_disk_bytes=0)
        try:
            clients = [Client(server.url, number) for number in range(NUM_CLIENTS)]
            alone, beside = dict[str, Seen](), dict[str, Seen]()
            part(clients, seconds, alone)
            memory = Memory(server)
            memory.start()
            began = time.monotonic()
            part([*clients, Hostile(server.url)], seconds, beside)
            memory.ended.set()
            memory.join()
            num_failed = tell(alone["Client"], beside["Client"], beside["Hostile"], print)
            tell_memory(memory, began, time.monotonic(), print)
            exit_code = server.stop()
        finally:
            server.process.kill()
            server.http.close()
    print(f"{num_failed} answers of 500 and above; the server ended with {exit_code}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
