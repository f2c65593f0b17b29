"""Kills the API process or the engine of a real server at random, while adapters are uploaded, replaced, rolled back,
pruned and deleted over HTTP, and compares what is there afterwards with what was acknowledged.

    .venv/bin/python -m bench.adapters.kills [--kills 200] [--seed 0]

Nothing acknowledged may be missing; the one change that was under way when the API process died may have happened or
not. Every version must serve a request, which has the engine read it. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
from collections import Counter
from pathlib import Path

import httpx

from bench.adapters.changes import Change, State, after, changes
from bench.adapters.made_up import adapter_files
from bench.limits import LIMIT_SECONDS
from bench.server_process import Server, start_server, wait_for
from service.engine.client import MAX_DEATHS
from service.settings import BUNDLED_MODEL_DIR

NAMES = ("one", "two", "three")
NUM_CONTENTS = 4
MAX_VERSIONS = 3


class Mover(threading.Thread):
    """Makes changes over HTTP until it is told to stop, or the server is gone. `acknowledged` are those answered."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__()
        self._url = url
        self._changes = changes(seed, NAMES, NUM_CONTENTS)
        self.acknowledged: list[Change] = []
        self.under_way: Change | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=LIMIT_SECONDS) as client:
            while not self.stop.is_set():
                self.under_way = next(self._changes)
                try:
                    _make(client, self.under_way)
                except httpx.TransportError:
                    return
                self.acknowledged.append(self.under_way)
                self.under_way = None


def _make(client: httpx.Client, change: Change) -> None:
    what, name, content = change
    path = f"/v1/adapters/{name}"
    if what == "put":
        client.put(path, files=adapter_files(content)).raise_for_status()
        return
    answer = client.delete(path) if what == "delete" else client.post(f"{path}/rollback", json={})
    assert answer.is_success or answer.status_code == 404, answer.text


def _found(server: Server, digests: dict[str, int]) -> State:
    """The versions that the server tells of, each of which answers a request."""
    state: State = {}
    for name in (one["name"] for one in server.get("/v1/adapters").raise_for_status().json()["data"]):
        history = server.get(f"/v1/adapters/{name}/history").raise_for_status().json()["data"]
        for version in history:
            body = {"model": f"{name}@{version['number']}", "prompt": "the", "max_tokens": 1}
            answer = server.post("/v1/completions", json=body).raise_for_status()
            assert version["digest"] in answer.headers["x-multilora-adapter"]
        state[name] = tuple(digests[version["digest"]] for version in reversed(history))
    return state


def run(work_dir: Path, num_kills: int, seed: int) -> dict[str, int]:
    """Counts of kills and changes, and of how the change under way ended."""
    generator, counts = random.Random(seed), Counter[str]()
    settings = {"store_dir": work_dir / "store", "preload_adapters_dir": work_dir / "none"}
    (work_dir / "none").mkdir()

    def start() -> Server:
        return start_server(BUNDLED_MODEL_DIR, work_dir, max_versions=MAX_VERSIONS, **settings)

    server = start()
    try:
        digests = _digests(server)
        state: State = {}
        num_engines = 0  # that died under this server
        for _ in range(num_kills):
            # A server whose engine died three times within a minute starts no other.
            victim = "api" if num_engines == MAX_DEATHS - 1 else generator.choice(("api", "engine"))
            mover = Mover(server.url, generator.randrange(2**32))
            num_before = generator.randrange(1, 20)
            mover.start()
            wait_for(lambda mover=mover, most=num_before: len(mover.acknowledged) >= most, "changes to be made")
            os.kill(server.process.pid if victim == "api" else server.engine_pid(), signal.SIGKILL)
            if victim == "engine":
                mover.stop.set()
            mover.join()
            for change in mover.acknowledged:
                state = after(state, change, MAX_VERSIONS)
            may_be = state if mover.under_way is None else after(state, mover.under_way, MAX_VERSIONS)
            if victim == "api":
                server.process.wait()
                server, num_engines = start(), 0
            else:
                num_engines += 1
                _wait_for_engine(server, num_engines)
            found = _found(server, digests)
            assert found in (state, may_be), (found, state, mover.under_way)
            counts[f"kills of the {victim}"] += 1
            counts["changes acknowledged"] += len(mover.acknowledged)
            counts["changes under way that were made"] += found != state
            state = found
        return dict(counts)
    finally:
        server.process.kill()
        server.process.wait()


def _wait_for_engine(server: Server, num_restarts: int) -> None:
    wait_for(lambda: server.metric("engine_restarts_total") == num_restarts, "the engine's death to be seen")
    wait_for(lambda: server.get("/ready").status_code == 200, "the next engine")


def _digests(server: Server) -> dict[str, int]:
    """Digest of each content."""
    digests = {}
    for content in range(NUM_CONTENTS):
        path = f"{server.url}/v1/adapters/content"
        report = server.http.put(path, files=adapter_files(content)).raise_for_status().json()
        digests[report["digest"]] = content
        server.http.delete(path).raise_for_status()
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(run(Path(scratch), arguments.kills, arguments.seed)))


if __name__ == "__main__":
    main()
