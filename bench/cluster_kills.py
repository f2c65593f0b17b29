"""Engines of one server are killed at random under mixed traffic: nothing acknowledged is lost, no request fails.

python -m bench.cluster_kills [--kills 100] [--replicas 2] [--pause-seconds 15] [--seed 1]

Short answers of the bundled adapters and the base from six clients, a long stream from a seventh, and an eighth that
uploads and replaces adapters, all without a pause, while an engine gets SIGKILL. A request that had nothing yet must be
answered with 200; a stream that had begun must end with an error event or go on; after each kill all engines must be
ready again, and at the end each name must stand for what was acknowledged last. The pause keeps each engine below three
deaths a minute, after which it would not be started again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.server_process import Server, running_server, wait_for
from service.settings import BUNDLED_ADAPTERS_DIR

_SECONDS = 120


class Traffic:
    """Clients of a server, until `is_over`; what came of their requests."""

    def __init__(self, url: str, models: list[str], seed: int) -> None:
        self._url, self._models, self._random = url, models, random.Random(seed)
        self.is_over = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.versions: dict[str, int] = {}

    def clients(self) -> list[Callable[[], None]]:
        return [self._ask] * 6 + [self._stream, self._upload]

    def _ask(self) -> None:
        with httpx.Client(timeout=_SECONDS) as http:
            while not self.is_over.is_set():
                body = self._body(self._random.choice(self._models), 1)
                answer = http.post(f"{self._url}/v1/completions", json=body)
                self._count("answer", answer)

    def _stream(self) -> None:
        body = self._body(self._models[0], 500) | {"stream": True}
        while not self.is_over.is_set():
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=_SECONDS) as answer:
                events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
            is_error = len(events) > 1 and "error" in json.loads(events[-2])
            is_whole = bool(events) and events[-1] == "[DONE]"
            self.outcomes["stream ended by an error event" if is_error else f"stream whole: {is_whole}"] += 1

    def _upload(self) -> None:
        directories = sorted(one for one in BUNDLED_ADAPTERS_DIR.iterdir() if one.is_dir())
        with httpx.Client(timeout=_SECONDS) as http:
            while not self.is_over.is_set():
                name = f"moved-{self._random.randrange(3)}"
                directory = self._random.choice(directories)
                files = {
                    part.partition(".")[0]: (directory / part).read_bytes()
                    for part in ("adapter_config.json", "adapter_model.safetensors")
                }
                answer = http.put(f"{self._url}/v1/adapters/{name}", files=files)
                self._count("upload", answer)
                if answer.is_success:
                    self.versions[name] = answer.json()["version"]

    def _count(self, what: str, answer: httpx.Response) -> None:
        self.outcomes[f"{what} ok" if answer.is_success else f"{what} {answer.status_code} {answer.text[:200]}"] += 1

    def _body(self, model: str, max_tokens: int) -> dict[str, Any]:
        return {"model": model, "prompt": "the", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def run(server: Server, given: argparse.Namespace) -> dict[str, Any]:
    """Kill and wait, again and again."""
    chance = random.Random(given.seed)
    models = [one["id"] for one in server.get("/v1/models").json()["data"]]
    traffic = Traffic(server.url, models, given.seed)
    back_seconds: list[float] = []
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client) for client in traffic.clients()]
        try:
            for _ in range(given.kills):
                time.sleep(given.pause_seconds * (0.5 + chance.random()))
                restarts = server.metric("engine_restarts_total")
                os.kill(chance.choice(server.child_pids_of("service.engine.process")), signal.SIGKILL)
                killed = time.monotonic()
                wait_for(lambda before=restarts: server.metric("engine_restarts_total") > before, "the next engine")
                wait_for(lambda: set(server.get("/health").json()["replicas"].values()) == {"ready"}, "all engines")
                back_seconds.append(time.monotonic() - killed)
        finally:
            traffic.is_over.set()
        for one in running:
            one.result()
    stored = {name: server.get(f"/v1/adapters/{name}").json()["version"] for name in traffic.versions}
    return {
        "outcomes": dict(traffic.outcomes),
        "names_that_stand_for_something_else": {
            name: (version, stored[name]) for name, version in traffic.versions.items() if stored[name] != version
        },
        "sent_again": server.metric("requests_sent_again_total"),
        "seconds_until_whole_max": max(back_seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster_kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--pause-seconds", type=float, default=15.0, help="between two kills, on the average")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        settings = {"replicas": given.replicas, "kv_bytes": "16MiB"}
        with running_server(None, Path(scratch), **settings) as server:
            print(json.dumps(run(server, given), indent=1))


if __name__ == "__main__":
    main()
