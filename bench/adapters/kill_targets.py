"""What `bench.adapters.kills` kills: servers of one store, and which of their processes."""

from __future__ import annotations

import abc
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from bench.adapters.kill_tenants import Keys, Tenant
from service.engine.ipc.client import MAX_DEATHS
from service.settings import BUNDLED_MODEL_DIR
from tests.support.http.server_process import Server, start_server, wait_for
from tests.support.limits import LIMIT_SECONDS

MAX_VERSIONS = 3
# Module of each process but the API's, which is the server's own.
_MODULES = {"engine": "service.engine.process", "template": "service.text.template_worker"}
_SMALL = {"kv_bytes": "8MiB", "adapter_row_bytes": "32MiB", "host_tier_bytes": "32MiB", "num_threads": 1}


class Target(abc.ABC):
    """Servers of one store.

    victims          what may be killed of each
    has_other        whether a request has another engine to go to
    keys             of its tenants; None where no key is asked for
    noticed_seconds  how long what stood still was still taken for ready, each time
    """

    def __init__(self, *, has_other: bool, keys: Keys | None = None) -> None:
        self.has_other, self.keys = has_other, keys
        self.victims: tuple[str, ...] = ()
        self.noticed_seconds: list[float] = []

    @property
    def tenants(self) -> Sequence[Tenant]:
        """Whose adapters there are."""
        return (Tenant(),) if self.keys is None else self.keys.tenants

    @property
    @abc.abstractmethod
    def urls(self) -> Sequence[str]:
        """Of each server."""

    @abc.abstractmethod
    def kill(self, which: int, victim: str, chosen: random.Random) -> None:
        """Kill it beside whatever goes on; returns when its loss has been seen, and all that comes back without a
        further start serves again."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all."""

    def instead_of(self, _which: int, victim: str) -> str:
        """What is killed now where this victim would end the server for good."""
        return victim

    def cuts(self, _victim: str) -> bool:
        """Whether changes and streams are cut off, at a server that is there again afterwards."""
        return False

    def cuts_unstreamed(self, _victim: str) -> bool:
        """Whether requests are, too, that are not streamed and change nothing."""
        return False

    def is_gone(self, _url: str) -> bool:
        """Whether a server has ended, so that it is to be started again."""
        return False

    def start_again(self, which: int) -> None:
        """Start one that has ended; returns when it serves."""
        raise NotImplementedError(f"server {which} has not ended")

    @contextmanager
    def standing_still(self, pid: int) -> Iterator[None]:
        """Left when the server has noticed that a process stands still."""
        since_seconds = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
            self.noticed_seconds.append(time.monotonic() - since_seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def settings_of(work_dir: Path) -> dict[str, Any]:
    """Settings of every server."""
    (work_dir / "none").mkdir(exist_ok=True)
    return _SMALL | {
        "store_dir": str(work_dir / "store"),
        "preload_adapters_dir": str(work_dir / "none"),
        "max_versions": MAX_VERSIONS,
        "model_name": "base",
    }


def replicas_of(url: str) -> dict[str, str]:
    """The state of each engine, as a server tells of it; nothing while it does not answer."""
    with suppress(httpx.TransportError):
        answer = httpx.get(f"{url}/health")
        if answer.is_success:
            replicas: dict[str, str] = answer.json().get("replicas", {"engine": "ready"})
            return replicas
    return {}


def is_whole(url: str) -> bool:
    """Whether a server serves with all its engines."""
    return set(replicas_of(url).values()) == {"ready"} and httpx.get(f"{url}/ready", timeout=LIMIT_SECONDS).is_success


class OwnServers(Target):
    """Of `multilora serve` with a keys file: "api", "engine" and "template" processes get SIGKILL; an engine is
    "stopped" until the server has noticed."""

    def __init__(self, work_dir: Path, *, num_servers: int, num_replicas: int) -> None:
        self._keys_path = work_dir / "keys.toml"
        super().__init__(has_other=num_replicas > 1, keys=Keys(self._keys_path))
        self.victims = ("api", "engine", "template", "stopped")[: 4 if self.has_other else 3]
        self._work_dir, self._num_replicas = work_dir, num_replicas
        self._is_shared = num_servers > 1
        # Engines that died under each server: one whose engine died three times within a minute starts no other.
        self._num_deaths = [0] * num_servers
        self._servers: list[Server] = []
        for _ in range(num_servers):
            self._servers.append(self._start())

    def _start(self) -> Server:
        return start_server(
            BUNDLED_MODEL_DIR,
            self._work_dir,
            store_shared=self._is_shared,
            replicas=self._num_replicas,
            keys_file=self._keys_path,
            open_paths="/metrics",
            **settings_of(self._work_dir),
        )

    @property
    def urls(self) -> list[str]:
        """Of each server."""
        return [one.url for one in self._servers]

    def close(self) -> None:
        """Kill all."""
        for server in self._servers:
            server.process.kill()
            server.process.wait()

    def instead_of(self, which: int, victim: str) -> str:
        """The API process, once an engine has died as often as it may."""
        return "api" if victim == "engine" and self._num_deaths[which] == MAX_DEATHS - 1 else victim

    def is_gone(self, url: str) -> bool:
        """Whether its process is."""
        return any(one.url == url and one.process.poll() is not None for one in self._servers)

    def kill(self, which: int, victim: str, chosen: random.Random) -> None:
        """See Target."""
        server = self._servers[which]
        if victim == "api":
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
            return
        self._kill_child(server, victim, chosen)
        if victim == "engine":
            self._num_deaths[which] += 1
            wait_for(lambda: server.metric("engine_restarts_total") == self._num_deaths[which], "its death seen")
        wait_for(lambda: is_whole(server.url), "the server to be whole")

    def _kill_child(self, server: Server, victim: str, chosen: random.Random) -> None:
        module = _MODULES["engine" if victim == "stopped" else victim]
        pid = chosen.choice(wait_for(lambda: server.child_pids_of(module), f"the process for {victim}"))
        if victim == "stopped":
            with self.standing_still(pid):
                wait_for(lambda: "silent" in replicas_of(server.url).values(), "it to be noticed")
        else:
            with suppress(ProcessLookupError):  # those for templates come and go
                os.kill(pid, signal.SIGKILL)

    def start_again(self, which: int) -> None:
        """See Target."""
        self._servers[which] = self._start()
        self._num_deaths[which] = 0
        left = [] if self._is_shared else list((self._work_dir / "store").glob("*/staging/*"))
        assert not left, f"left over: {left}"
        wait_for(lambda: is_whole(self._servers[which].url), "the server to be whole")
