"""Kills processes of real servers at random, while adapters are uploaded, replaced, rolled back, pruned, deleted and
loaded, and compares what is there afterwards with what was acknowledged.

    .venv/bin/python -m bench.adapters.kills [--kills 200] [--seed 0]        # also `make test-kills`
                                             [--replicas 1] [--servers 1]
                                             [--ray]

A victim is an API process, an engine or a process for chat templates; with several engines behind a server also an
engine that stands still (SIGSTOP) until the server has noticed. With several servers, which share the store, the one
whose process is killed has clients, and so has another one. With --ray, where Ray is installed, `--servers` are the
ingresses of one application on Ray Serve, and victims are engines and the replicas that own them, killed or standing
still, ingresses, where HAProxy has several also one that stands still, processes for chat templates, the proxy in
front, and Ray's controller.

A server has a keys file with three tenants, each of which changes names of its own, the same ones, and who may use
them. Before each kill `multilora keys` adds a key and revokes one that it added earlier. On Ray there is one tenant
without a key.

Nothing acknowledged may be missing, on any server: of each tenant its names with the contents of their versions, their
owner and who may use them, what it sees of the others, and the keys that count and do not. The one change of a tenant
that was under way when the API process died may have happened or not; an upload that is refused, since the process for
its template was killed, has changed nothing. With several engines, and on a server that is not killed, no request may
fail that is not streamed; every stream must end as a whole or with an error event, and none may hang. On Ray streams
and changes that are under way when an ingress or the proxy is killed may be cut off, and requests that are not streamed
when the proxy is; they are counted. Every version must serve a request, which has an engine read it, and nothing may
lie in staging. Prints a JSON line, with the longest time from a kill of each kind until all serve again.
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

from bench.adapters.kill_clients import Asker, KillClient, Mover, Streamer, upload_files
from bench.adapters.kill_targets import MAX_VERSIONS, OwnServers, Target
from bench.adapters.kill_tenants import NUM_CONTENTS, Names, Tenant
from tests.support.http.server_process import wait_for
from tests.support.limits import LIMIT_SECONDS


class Run:
    """Clients of what is killed, and what must be in its store."""

    def __init__(self, target: Target, *, seed: int) -> None:
        self.target = target
        self._random = random.Random(seed)
        self.counts = Counter[str]()
        self.back_seconds: dict[str, float] = {}
        self._held: dict[str, Names] = {tenant.name: {} for tenant in target.tenants}
        self._digests = _digests(target.urls[0], target.tenants[0])

    def kill_one(self, victim: str | None = None) -> None:
        """One victim beside clients, at random unless it is named; AssertionError if anything is as it may not be
        afterwards."""
        target = self.target
        which = self._random.randrange(len(target.urls))
        victim = target.instead_of(which, victim or self._random.choice(target.victims))
        if target.keys is not None:
            target.keys.change(self._random)
            self._check_keys()
        url, may_be_cut = target.urls[which], target.cuts(victim)
        movers = [Mover(url, tenant, self._new_seed(), may_be_cut=may_be_cut) for tenant in target.tenants]
        cuts_askers = target.cuts_unstreamed(victim)
        askers = [
            Asker(
                one,
                self._random.choice(target.tenants),
                self._new_seed(),
                may_fail=one == url and not target.has_other,
                may_be_cut=cuts_askers,
            )
            for one in target.urls
        ]
        streamer = Streamer(url, self._random.choice(target.tenants), may_be_cut=may_be_cut)
        self._kill_beside(which, victim, movers, [*askers, streamer])
        self._count(victim, movers, askers, streamer)
        self._compare(movers)

    def _count(self, victim: str, movers: Sequence[Mover], askers: Sequence[Asker], streamer: Streamer) -> None:
        self.counts.update(
            {
                f"kills: {victim}": 1,
                "uploads refused": sum(one.num_refused for one in movers),
                "requests answered": sum(one.num_answered for one in askers),
                "requests cut off": sum(one.is_cut for one in askers),
                "streams whole": streamer.num_whole,
                "streams ended by an error event": streamer.num_ended,
                "streams cut off": int(streamer.is_cut),
            }
        )
        for mover in movers:
            self.counts.update(f"acknowledged: {what}" for what, _, _ in mover.acknowledged)

    def figures(self) -> dict[str, float]:
        """Counts, and the longest times."""
        return {
            **self.counts,
            "longest seconds until noticed": round(max(self.target.noticed_seconds, default=0), 1),
            **{f"longest seconds until all serve: {one}": round(most, 1) for one, most in self.back_seconds.items()},
        }

    def _new_seed(self) -> int:
        return self._random.randrange(2**32)

    def _kill_beside(self, which: int, victim: str, movers: Sequence[Mover], others: Sequence[KillClient]) -> None:
        """Kill a process once some changes are made, while they go on; return when all serve again."""
        target, url, num_changes = self.target, self.target.urls[which], self._random.randrange(1, 20)
        for client in (*movers, *others):
            client.start()
        wait_for(
            lambda: (
                sum(len(one.acknowledged) for one in movers) >= num_changes or not all(one.is_alive() for one in movers)
            ),
            "changes to be made",
        )
        since_seconds = time.monotonic()
        target.kill(which, victim, self._random)
        for client in (*movers, *others):
            if not target.is_gone(client.url):
                client.stop.set()
        for client in (*movers, *others):
            client.end()
        if target.is_gone(url):
            for one in target.urls:
                if one != url:
                    self._found_at(one, movers)
            target.start_again(which)
        self.back_seconds[victim] = max(self.back_seconds.get(victim, 0.0), time.monotonic() - since_seconds)

    def _compare(self, movers: Sequence[Mover]) -> None:
        found = {url: self._found_at(url, movers) for url in self.target.urls}
        held = next(iter(found.values()))
        assert all(one == held for one in found.values()), found
        for mover in movers:
            name = mover.tenant.name
            self.counts["changes under way that were made"] += held[name] != self._after_acknowledged(mover)
        self._held = held
        self._check_keys()

    def _after_acknowledged(self, mover: Mover) -> Names:
        names = self._held[mover.tenant.name]
        for change in mover.acknowledged:
            names = mover.tenant.after(names, change, MAX_VERSIONS)
        return names

    def _found_at(self, url: str, movers: Sequence[Mover]) -> dict[str, Names]:
        """What a server has of each tenant, which must be what was acknowledged."""
        held = {}
        for mover in movers:
            tenant, names = mover.tenant, self._after_acknowledged(mover)
            may_be = names if mover.under_way is None else tenant.after(names, mover.under_way, MAX_VERSIONS)
            found = tenant.found(url, self._digests)
            assert found in (names, may_be), (tenant.name, found, names, mover.under_way)
            held[tenant.name] = found
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as http:
            for tenant in self.target.tenants:
                seen, expected = tenant.listed(http), tenant.sees(held)
                assert seen == expected, (tenant.name, seen, expected)
        return held

    def _check_keys(self) -> None:
        if self.target.keys is not None:
            for url in self.target.urls:
                self.target.keys.check(url)


def _digests(url: str, tenant: Tenant) -> dict[str, int]:
    """Digest of each content."""
    digests, path = {}, "/v1/adapters/content"
    with httpx.Client(base_url=url, timeout=LIMIT_SECONDS, headers=tenant.headers) as http:
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
