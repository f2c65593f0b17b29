"""The application on Ray Serve, for `bench.adapters.kills`. Runs where Ray is installed."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx

from bench.adapters.kill_targets import Target, is_whole, replicas_of, settings_of
from tests.support.http.server_process import wait_for
from tests.support.on_ray.own_ray import deploy, running_ray
from tests.support.processes import command_line, descendants

_HAS_HAPROXY = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
# What is in the command line of each kind of process.
_TITLES = {
    "engine": b"service.engine.process",
    "replica": b"ray::ServeReplica:multilora:EngineReplica",
    "template": b"service.text.template_worker",
    "ingress": b"ray::ServeReplica:multilora:Ingress",
    "proxy": b"bin/haproxy" if _HAS_HAPROXY else b"ray::ProxyActor",
    "controller": b"ray::ServeController",
}
_STOPPED = {"stopped engine": "engine", "stopped replica": "replica", "stopped ingress": "ingress"}
# Where Ray has HAProxy tell how many ingresses are in the rotation.
_METRICS_URL = f"http://127.0.0.1:{os.environ.get('RAY_SERVE_HAPROXY_METRICS_PORT', '9101')}/metrics"


class RayApplication(Target):
    """A Ray of one's own with one address: each of `_TITLES` gets SIGKILL; an engine, the replica that owns it, or
    behind HAProxy one of several ingresses stands still until that has been noticed."""

    def __init__(self, work_dir: Path, *, num_ingresses: int, num_replicas: int) -> None:
        super().__init__(has_other=num_replicas > 1)
        kinds_of_several = {"engine", "replica"} if self.has_other else set()
        if _HAS_HAPROXY and num_ingresses > 1:
            kinds_of_several.add("ingress")
        self.victims = (*_TITLES, *(victim for victim, kind in _STOPPED.items() if kind in kinds_of_several))
        self._numbers = {"engine": num_replicas, "replica": num_replicas, "ingress": num_ingresses}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        with ExitStack() as stack:
            stack.enter_context(running_ray(port))
            deploy(settings_of(work_dir), engines=num_replicas, ingresses=num_ingresses)
            wait_for(self._is_whole, "the application to be whole")
            self._end = stack.pop_all()

    @property
    def urls(self) -> list[str]:
        """The one."""
        return [self._url]

    def close(self) -> None:
        """End Ray."""
        self._end.close()

    def cuts(self, victim: str) -> bool:
        """What the client is connected to, or what its connection goes on to, is not there for a moment."""
        return victim in ("ingress", "proxy")

    def cuts_unstreamed(self, victim: str) -> bool:
        """What the client is connected to is not there; of what lies behind, HAProxy sends them again."""
        return victim == "proxy" or (victim == "ingress" and not _HAS_HAPROXY)

    def kill(self, _which: int, victim: str, chosen: random.Random) -> None:
        """See Target."""
        kind = _STOPPED.get(victim, victim)
        pid = chosen.choice(wait_for(lambda: self._pids_of(kind), f"the process for {victim}"))
        if victim in _STOPPED:
            has_left = self._is_short_of_an_ingress if kind == "ingress" else self._is_short_of_an_engine
            with self.standing_still(pid):
                wait_for(has_left, "it to be noticed")
        else:
            os.kill(pid, signal.SIGKILL)
            if kind in ("engine", "replica"):
                wait_for(lambda: self._is_short_of_an_engine(), "its death seen")
            wait_for(lambda: pid not in self._pids_of(kind), "its end")
        wait_for(self._is_whole, "the application to be whole")

    def _is_short_of_an_engine(self) -> bool:
        states = set(replicas_of(self._url).values())
        return bool(states) and states != {"ready"}

    def _is_short_of_an_ingress(self) -> bool:
        try:
            text = httpx.get(_METRICS_URL).text
        except httpx.TransportError:
            return True
        found = re.search(r'haproxy_backend_active_servers\{proxy="http-multilora"\} (\d+)', text)
        return found is None or int(found.group(1)) < self._numbers["ingress"]

    def _is_whole(self) -> bool:
        is_there = all(len(self._pids_of(kind)) >= self._numbers.get(kind, 1) for kind in _TITLES if kind != "template")
        return is_there and is_whole(self._url) and not (_HAS_HAPROXY and self._is_short_of_an_ingress())

    def _pids_of(self, kind: str) -> list[int]:
        return [pid for pid in descendants(os.getpid()) if _TITLES[kind] in command_line(pid)]
