"""Kills the API process, the engine or a process for chat templates of a real server at random, while adapters are
uploaded, replaced, rolled back, pruned, deleted and loaded, and compares what is there afterwards with what was
acknowledged.

    .venv/bin/python -m bench.adapters.kills [--kills 200] [--seed 0]        # also `make test-kills`

Nothing acknowledged may be missing; the one change that was under way when the API process died may have happened or
not; an upload that is refused, since the process for its template was killed, has changed nothing. Every version must
serve a request, which has the engine read it, and nothing may lie in staging. Prints a JSON line.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from bench.adapters.changes import Change, State, after, changes
from bench.adapters.made_up import Files, adapter_files
from bench.limits import LIMIT_SECONDS
from bench.server_process import Server, start_server, wait_for
from service.engine.client import MAX_DEATHS
from service.settings import BUNDLED_MODEL_DIR

NAMES = ("one", "two", "three")
NUM_CONTENTS = 4
WITH_TEMPLATE = (1, 3)  # of the contents
MAX_VERSIONS = 3
TEMPLATE = ("file", ("chat_template.jinja", b"{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"))
# Module of each process but the API's, which is the server's own.
MODULES = {"engine": "service.engine.process", "template": "service.text.template_worker"}


class Mover(threading.Thread):
    """Makes changes over HTTP until it is told to stop, or the server is gone. `acknowledged` are those answered;
    `failure` what came of them that may not."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._changes = changes(seed, NAMES, NUM_CONTENTS)
        self.acknowledged: list[Change] = []
        self.num_refused = 0
        self.failure: BaseException | None = None
        self.under_way: Change | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=LIMIT_SECONDS) as client:
                while not self.stop.is_set():
                    self.under_way = next(self._changes)
                    if _make(client, self.under_way):
                        self.acknowledged.append(self.under_way)
                    else:
                        self.num_refused += 1
                    self.under_way = None
        except httpx.TransportError:
            return  # the server has been killed
        except BaseException as error:
            self.failure = error


def _make(client: httpx.Client, change: Change) -> bool:
    """Whether it was made."""
    what, name, content = change
    path = f"/v1/adapters/{name}"
    if what == "put":
        answer = client.put(path, files=_files(content))
        if answer.status_code == 400 and "template" in answer.text and content in WITH_TEMPLATE:
            return False
        answer.raise_for_status()
        return True
    answer = client.delete(path) if what == "delete" else client.post(f"{path}/rollback", json={})
    assert answer.is_success or answer.status_code == 404, answer.text
    return True


def _files(content: int) -> Files:
    files = adapter_files(content)
    return [*files, TEMPLATE] if content in WITH_TEMPLATE else files


class Asker(threading.Thread):
    """Sends requests for what the names stand for, so that the engine reads and loads it, as `Mover` changes it."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._generator = random.Random(seed)
        self.num_answered = 0
        self.failure: BaseException | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=LIMIT_SECONDS) as client:
                while not self.stop.is_set():
                    body = {"model": self._generator.choice(NAMES), "prompt": "the", "max_tokens": 2}
                    answer = client.post("/v1/completions", json=body)
                    # No such name just now; the engine was killed under the request; there is none.
                    assert answer.status_code in (200, 404, 500, 503), answer.text
                    self.num_answered += answer.is_success
        except httpx.TransportError:
            return
        except BaseException as error:
            self.failure = error


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
    settings: dict[str, Any] = {"store_dir": work_dir / "store", "preload_adapters_dir": work_dir / "none"}
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
            victim = generator.choice(("api", "engine", "template"))
            victim = "api" if victim == "engine" and num_engines == MAX_DEATHS - 1 else victim
            mover = Mover(server.url, generator.randrange(2**32))
            asker = Asker(server.url, generator.randrange(2**32))
            _kill_beside(server, victim, mover, asker, generator.randrange(1, 20))
            for change in mover.acknowledged:
                state = after(state, change, MAX_VERSIONS)
            may_be = state if mover.under_way is None else after(state, mover.under_way, MAX_VERSIONS)
            if victim == "api":
                server.process.wait()
                server, num_engines = start(), 0
                left = list((work_dir / "store").glob("*/staging/*"))
                assert not left, f"left over: {left}"
            elif victim == "engine":
                num_engines += 1
                _wait_for_engine(server, num_engines)
            found = _found(server, digests)
            assert found in (state, may_be), (found, state, mover.under_way)
            counts[f"kills of the {victim}"] += 1
            counts["changes acknowledged"] += len(mover.acknowledged)
            counts["uploads refused"] += mover.num_refused
            counts["requests answered"] += asker.num_answered
            counts["changes under way that were made"] += found != state
            state = found
        return dict(counts)
    finally:
        server.process.kill()
        server.process.wait()


def _kill_beside(server: Server, victim: str, mover: Mover, asker: Asker, num_changes: int) -> None:
    """Kill a process once so many changes are made, while they go on; return when both threads have ended."""
    mover.start()
    asker.start()

    def are_made() -> bool:
        return len(mover.acknowledged) >= num_changes or not mover.is_alive()

    wait_for(are_made, "changes to be made")
    if victim == "api":
        os.kill(server.process.pid, signal.SIGKILL)
    else:
        pids = wait_for(lambda: server.child_pids_of(MODULES[victim]), f"the process for {victim}")
        with suppress(ProcessLookupError):  # those for templates come and go
            os.kill(pids[0], signal.SIGKILL)
    threads: tuple[Mover | Asker, ...] = mover, asker
    for thread in threads:
        if victim != "api":
            thread.stop.set()
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive(), "a request is not answered"
        if thread.failure is not None:
            raise thread.failure


def _wait_for_engine(server: Server, num_restarts: int) -> None:
    wait_for(lambda: server.metric("engine_restarts_total") == num_restarts, "the engine's death to be seen")
    wait_for(lambda: server.get("/ready").status_code == 200, "the next engine")


def _digests(server: Server) -> dict[str, int]:
    """Digest of each content."""
    digests = {}
    for content in range(NUM_CONTENTS):
        path = f"{server.url}/v1/adapters/content"
        report = server.http.put(path, files=_files(content)).raise_for_status().json()
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
