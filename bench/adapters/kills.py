"""Kills processes of real servers at random, while adapters are uploaded, replaced, rolled back, pruned, deleted and
loaded, and compares what is there afterwards with what was acknowledged.

    .venv/bin/python -m bench.adapters.kills [--kills 200] [--seed 0]        # also `make test-kills`
                                             [--replicas 1] [--servers 1]
                                             [--ray]

A victim is an API process, an engine or a process for chat templates; with several engines behind a server also an
engine that stands still (SIGSTOP) until the server has noticed. With several servers, which share the store, the one
whose process is killed has clients, and so has another one. With --ray, where Ray is installed, `--servers` are the
ingresses of one application on Ray Serve, and victims are engines and the replicas that own them, killed or standing
still, ingresses, processes for chat templates, the proxy in front, and Ray's controller.

Nothing acknowledged may be missing, on any server; the one change that was under way when the API process died may have
happened or not; an upload that is refused, since the process for its template was killed, has changed nothing. With
several engines, and on a server that is not killed, no request may fail that is not streamed; every stream must end as
a whole or with an error event, and none may hang. On Ray streams and changes that are under way when an ingress or the
proxy is killed may be cut off, and requests that are not streamed when the proxy is; they are counted. Every version
must serve a request, which has an engine read it, and nothing may lie in staging. Prints a JSON line, with the longest
time from a kill of each kind until all serve again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.adapters.changes import State, after
from bench.adapters.kill_clients import NUM_CONTENTS, Asker, KillClient, Mover, Streamer, upload_files
from bench.adapters.kill_targets import MAX_VERSIONS, OwnServers, Target
from bench.limits import LIMIT_SECONDS
from bench.server_process import wait_for


class Run:
    """Clients of what is killed, and what must be in its store."""

    def __init__(self, target: Target, *, seed: int) -> None:
        self.target = target
        self._random = random.Random(seed)
        self.counts = Counter[str]()
        self.back_seconds: dict[str, float] = {}
        self._state: State = {}
        self._digests = _digests(target.urls[0])

    def kill_one(self, victim: str | None = None) -> None:
        """One victim beside clients, at random unless it is named; AssertionError if anything is as it may not be
        afterwards."""
        target = self.target
        which = self._random.randrange(len(target.urls))
        victim = target.instead_of(which, victim or self._random.choice(target.victims))
        url, may_be_cut = target.urls[which], target.cuts(victim)
        mover = Mover(url, self._new_seed(), may_be_cut=may_be_cut)
        cuts_askers = target.cuts_unstreamed(victim)
        askers = [
            Asker(one, self._new_seed(), may_fail=one == url and not target.has_other, may_be_cut=cuts_askers)
            for one in target.urls
        ]
        streamer = Streamer(url, may_be_cut=may_be_cut)
        self._kill_beside(which, victim, mover, [*askers, streamer])
        self.counts.update(
            {
                f"kills: {victim}": 1,
                "changes acknowledged": len(mover.acknowledged),
                "uploads refused": mover.num_refused,
                "requests answered": sum(one.num_answered for one in askers),
                "requests cut off": sum(one.is_cut for one in askers),
                "streams whole": streamer.num_whole,
                "streams ended by an error event": streamer.num_ended,
                "streams cut off": int(streamer.is_cut),
            }
        )
        self._compare(mover)

    def figures(self) -> dict[str, float]:
        """Counts, and the longest times."""
        return {
            **self.counts,
            "longest seconds until noticed": round(max(self.target.noticed_seconds, default=0), 1),
            **{f"longest seconds until all serve: {one}": round(most, 1) for one, most in self.back_seconds.items()},
        }

    def _new_seed(self) -> int:
        return self._random.randrange(2**32)

    def _kill_beside(self, which: int, victim: str, mover: Mover, others: Sequence[KillClient]) -> None:
        """Kill a process once some changes are made, while they go on; return when all serve again."""
        target, url, num_changes = self.target, self.target.urls[which], self._random.randrange(1, 20)
        for client in (mover, *others):
            client.start()
        wait_for(lambda: len(mover.acknowledged) >= num_changes or not mover.is_alive(), "changes to be made")
        since_seconds = time.monotonic()
        target.kill(which, victim, self._random)
        for client in (mover, *others):
            if not target.is_gone(client.url):
                client.stop.set()
        for client in (mover, *others):
            client.end()
        if target.is_gone(url):
            for one in target.urls:
                if one != url:
                    self._found_as(one, mover)
            target.start_again(which)
        self.back_seconds[victim] = max(self.back_seconds.get(victim, 0.0), time.monotonic() - since_seconds)

    def _compare(self, mover: Mover) -> None:
        found = {url: self._found_as(url, mover) for url in self.target.urls}
        state = next(iter(found.values()))
        assert all(one == state for one in found.values()), found
        expected = self._after_acknowledged(mover)
        self.counts["changes under way that were made"] += state != expected
        self._state = state

    def _after_acknowledged(self, mover: Mover) -> State:
        state = self._state
        for change in mover.acknowledged:
            state = after(state, change, MAX_VERSIONS)
        return state

    def _found_as(self, url: str, mover: Mover) -> State:
        """What a server has, which must be what was acknowledged."""
        state = self._after_acknowledged(mover)
        may_be = state if mover.under_way is None else after(state, mover.under_way, MAX_VERSIONS)
        found = _found(url, self._digests)
        assert found in (state, may_be), (found, state, mover.under_way)
        return found


def _found(url: str, digests: dict[str, int]) -> State:
    """The versions that the server tells of, each of which answers a request."""
    state: State = {}
    with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as http:
        for name in (one["name"] for one in http.get("/v1/adapters").raise_for_status().json()["data"]):
            history = http.get(f"/v1/adapters/{name}/history").raise_for_status().json()["data"]
            for version in history:
                body = {"model": f"{name}@{version['number']}", "prompt": "the", "max_tokens": 1}
                answer = http.post("/v1/completions", json=body).raise_for_status()
                assert version["digest"] in answer.headers["x-multilora-adapter"]
            state[name] = tuple(digests[version["digest"]] for version in reversed(history))
    return state


def _digests(url: str) -> dict[str, int]:
    """Digest of each content."""
    digests, path = {}, "/v1/adapters/content"
    with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as http:
        for content in range(NUM_CONTENTS):
            report = http.put(path, files=upload_files(content)).raise_for_status().json()
            digests[report["digest"]] = content
            http.delete(path).raise_for_status()
    return digests


def _target(given: argparse.Namespace, work_dir: Path) -> Target:
    if not given.ray:
        return OwnServers(work_dir, num_servers=given.servers, num_replicas=given.replicas)
    from bench.adapters.kill_ray import RayApplication  # where Ray is installed

    return RayApplication(work_dir, num_ingresses=given.servers, num_replicas=given.replicas)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.adapters.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1, help="engines of a server")
    parser.add_argument("--servers", type=int, default=1, help="that share the store")
    parser.add_argument("--ray", action="store_true", help="on Ray Serve")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        target = _target(given, Path(scratch))
        try:
            run = Run(target, seed=given.seed)
            try:
                for _ in range(given.kills):
                    run.kill_one()
            finally:
                print(json.dumps(run.figures()))
        finally:
            target.close()


if __name__ == "__main__":
    main()
