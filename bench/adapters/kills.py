"""Kills processes of real servers at random, while adapters are uploaded, replaced, rolled back, pruned, deleted and
loaded, and compares what is there afterwards with what was acknowledged.

    .venv/bin/python -m bench.adapters.kills [--kills 200] [--seed 0]        # also `make test-kills`
                                             [--replicas 1] [--servers 1]

A victim is an API process, an engine or a process for chat templates; with several engines behind a server also an
engine that stands still (SIGSTOP) until the server has noticed. With several servers, which share the store, the one
whose process is killed has clients, and so has another one.

Nothing acknowledged may be missing, on any server; the one change that was under way when the API process died may have
happened or not; an upload that is refused, since the process for its template was killed, has changed nothing. With
several engines, and on a server that is not killed, no request may fail that is not streamed; every stream must end as
a whole or with an error event, and none may hang. Every version must serve a request, which has an engine read it, and
nothing may lie in staging. Prints a JSON line, with the longest time from a kill until all serve again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.adapters.changes import State, after
from bench.adapters.kill_clients import NUM_CONTENTS, Asker, KillClient, Mover, Streamer, upload_files
from bench.server_process import Server, start_server, wait_for
from service.engine.client import MAX_DEATHS
from service.settings import BUNDLED_MODEL_DIR

MAX_VERSIONS = 3
# Module of each process but the API's, which is the server's own.
MODULES = {"engine": "service.engine.process", "template": "service.text.template_worker"}


class Run:
    """Servers of one store, and what must be in it."""

    def __init__(self, work_dir: Path, *, num_servers: int, num_replicas: int, seed: int) -> None:
        self._work_dir, self._num_replicas = work_dir, num_replicas
        self._is_shared = num_servers > 1
        self._random = random.Random(seed)
        (work_dir / "none").mkdir()
        self.counts = Counter[str]()
        self.back_seconds: list[float] = []
        self._state: State = {}
        self.servers: list[Server] = []
        # Engines that died under each server: one whose engine died three times within a minute starts no other.
        self._num_deaths = [0] * num_servers
        for _ in range(num_servers):
            self.servers.append(self._start())
        self._digests = _digests(self.servers[0])

    def _start(self) -> Server:
        settings: dict[str, Any] = {"store_dir": self._work_dir / "store", "store_shared": self._is_shared}
        settings |= {"preload_adapters_dir": self._work_dir / "none", "replicas": self._num_replicas}
        return start_server(BUNDLED_MODEL_DIR, self._work_dir, max_versions=MAX_VERSIONS, model_name="base", **settings)

    def close(self) -> None:
        for server in self.servers:
            server.process.kill()
            server.process.wait()

    def kill_one(self, victim: str | None = None) -> None:
        """One victim beside clients, at random unless it is named; AssertionError if anything is as it may not be
        afterwards."""
        which = self._random.randrange(len(self.servers))
        victims = ("api", "engine", "template", "stopped")[: 4 if self._num_replicas > 1 else 3]
        victim = victim or self._random.choice(victims)
        if victim == "engine" and self._num_deaths[which] == MAX_DEATHS - 1:
            victim = "api"
        server = self.servers[which]
        mover = Mover(server.url, self._random.randrange(2**32))
        has_other = self._num_replicas > 1
        askers = [
            Asker(one.url, self._random.randrange(2**32), may_fail=one is server and not has_other)
            for one in self.servers
        ]
        streamer = Streamer(server.url)
        self._kill_beside(which, victim, mover, [*askers, streamer])
        self.counts.update(
            {
                f"kills: {victim}": 1,
                "changes acknowledged": len(mover.acknowledged),
                "uploads refused": mover.num_refused,
                "requests answered": sum(one.num_answered for one in askers),
                "streams whole": streamer.num_whole,
                "streams ended by an error event": streamer.num_ended,
            }
        )
        self._compare(mover)

    def _kill_beside(self, which: int, victim: str, mover: Mover, others: Sequence[KillClient]) -> None:
        """Kill a process once some changes are made, while they go on; return when all serve again."""
        server, num_changes = self.servers[which], self._random.randrange(1, 20)
        for client in (mover, *others):
            client.start()
        wait_for(lambda: len(mover.acknowledged) >= num_changes or not mover.is_alive(), "changes to be made")
        since_seconds = time.monotonic()
        if victim == "api":
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
        else:
            self._kill_child(server, victim)
            if victim == "engine":
                self._num_deaths[which] += 1
                wait_for(lambda: server.metric("engine_restarts_total") == self._num_deaths[which], "its death seen")
            wait_for(lambda: _is_whole(server), "the server to be whole")
        for client in (mover, *others):
            if victim != "api" or client.url != server.url:
                client.stop.set()
        for client in (mover, *others):
            client.end()
        if victim == "api":
            for one in self.servers:
                if one is not server:
                    self._found_as(one, mover)
            self.servers[which] = self._start()
            self._num_deaths[which] = 0
            left = [] if self._is_shared else list((self._work_dir / "store").glob("*/staging/*"))
            assert not left, f"left over: {left}"
            wait_for(lambda: _is_whole(self.servers[which]), "the server to be whole")
        self.back_seconds.append(time.monotonic() - since_seconds)

    def _kill_child(self, server: Server, victim: str) -> None:
        module = MODULES["engine" if victim == "stopped" else victim]
        pids = wait_for(lambda: server.child_pids_of(module), f"the process for {victim}")
        pid = self._random.choice(pids)
        if victim == "stopped":
            since_seconds = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: "silent" in server.get("/health").json()["replicas"].values(), "it to be noticed")
            self.counts["longest ms until noticed"] = max(
                self.counts["longest ms until noticed"], round(1e3 * (time.monotonic() - since_seconds))
            )
            os.kill(pid, signal.SIGCONT)
        else:
            with suppress(ProcessLookupError):  # those for templates come and go
                os.kill(pid, signal.SIGKILL)

    def _compare(self, mover: Mover) -> None:
        found = {one.url: self._found_as(one, mover) for one in self.servers}
        state = found[self.servers[0].url]
        assert all(one == state for one in found.values()), found
        expected = self._after_acknowledged(mover)
        self.counts["changes under way that were made"] += state != expected
        self._state = state

    def _after_acknowledged(self, mover: Mover) -> State:
        state = self._state
        for change in mover.acknowledged:
            state = after(state, change, MAX_VERSIONS)
        return state

    def _found_as(self, server: Server, mover: Mover) -> State:
        """What a server has, which must be what was acknowledged."""
        state = self._after_acknowledged(mover)
        may_be = state if mover.under_way is None else after(state, mover.under_way, MAX_VERSIONS)
        found = _found(server, self._digests)
        assert found in (state, may_be), (found, state, mover.under_way)
        return found


def _is_whole(server: Server) -> bool:
    replicas = server.get("/health").json().get("replicas", {})
    return server.get("/ready").status_code == 200 and set(replicas.values()) <= {"ready"}


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


def _digests(server: Server) -> dict[str, int]:
    """Digest of each content."""
    digests = {}
    for content in range(NUM_CONTENTS):
        path = f"{server.url}/v1/adapters/content"
        report = server.http.put(path, files=upload_files(content)).raise_for_status().json()
        digests[report["digest"]] = content
        server.http.delete(path).raise_for_status()
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.adapters.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1, help="engines of a server")
    parser.add_argument("--servers", type=int, default=1, help="that share the store")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(Path(scratch), num_servers=given.servers, num_replicas=given.replicas, seed=given.seed)
        try:
            for _ in range(given.kills):
                run.kill_one()
        finally:
            print(
                json.dumps(run.counts | {"longest seconds until all serve": round(max(run.back_seconds, default=0), 1)})
            )
            run.close()


if __name__ == "__main__":
    main()
