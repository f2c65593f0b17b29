"""The server on Ray Serve over several hosts: `ray start` on each, then `serve deploy`, as docs/scale.md says."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.hosts.network import SHARED, Host
from service.ray_serve.haproxy import ENVIRONMENT
from tests.support.on_ray.own_ray import haproxy_command
from tests.support.processes import command_line, descendants

_RAY_PORT, _PORT, _DASHBOARD_PORT = 6379, 8000, 8265
_OBJECT_BYTES = 80 * 2**20
# One engine finds room on each host.
_ENGINE = "engine"


class Cluster:
    """The first host is Ray's head.

    shared  the directory that the hosts have in common, as it is called here
    """

    def __init__(self, hosts: Sequence[Host], shared: Path) -> None:
        self.hosts, self.shared = list(hosts), shared
        addresses = ",".join(["127.0.0.1", *(one.address for one in hosts)])
        self.environment = {
            **ENVIRONMENT,
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_BINARY_PATH": f"{SHARED}/{haproxy_command(shared).name}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "FORWARDED_ALLOW_IPS": addresses,
        }

    def start_ray(self, host: Host, num_cpus: int = 2) -> None:
        """The head, if it is the first host; else it joins. CalledProcessError where its processes take more than Ray's
        30 s: beside much other work, begin anew."""
        begin = ["start", f"--node-ip-address={host.address}", f"--num-cpus={num_cpus}", "--num-gpus=0"]
        begin += [f"--resources={json.dumps({_ENGINE: 1})}", f"--object-store-memory={_OBJECT_BYTES}"]
        if host is self.hosts[0]:
            begin += ["--head", f"--port={_RAY_PORT}", "--dashboard-host=0.0.0.0"]
        else:
            begin += [f"--address={self.hosts[0].address}:{_RAY_PORT}"]
        self._run(host, "ray", *begin)

    def deploy(self, engines: int, ingresses: int, **others: Any) -> None:
        """What deploy/ray/serve.yaml says, for CPUs; does not wait for it."""
        settings = {"store_dir": f"{SHARED}/store", "model_dir": f"{SHARED}/base", "model_name": "tiny"}
        settings |= {"preload_adapters_dir": f"{SHARED}/adapters", "kv_bytes": "24MiB", **others.pop("settings", {})}
        args = {"engines": engines, "ingresses": ingresses, "num_cpus": 1, "resources": {_ENGINE: 1}, **others}
        application = {"name": "multilora", "route_prefix": "/", "import_path": "service.ray_serve.app:build"}
        config = {
            "proxy_location": "EveryNode",
            "http_options": {"host": "0.0.0.0", "port": _PORT},
            "applications": [{**application, "args": {"settings": settings, **args}}],
        }
        (self.shared / "serve.yaml").write_text(json.dumps(config))
        address = f"--address=http://{self.hosts[0].address}:{_DASHBOARD_PORT}"
        self._run(self.hosts[0], "serve", "deploy", address, f"{SHARED}/serve.yaml")

    def url(self, host: Host) -> str:
        """Of its HAProxy."""
        return f"http://{host.address}:{_PORT}"

    def health(self, host: Host, timeout: float = 5) -> dict[str, Any]:
        """Empty when it does not say so in time."""
        try:
            answer = httpx.get(f"{self.url(host)}/health", timeout=timeout)
            said: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}
        return said

    def is_whole(self, host: Host) -> bool:
        """All engines, as it says."""
        replicas = self.health(host).get("replicas", {})
        return bool(replicas) and set(replicas.values()) == {"ready"}

    def has_engine(self, host: Host) -> bool:
        """Whether one runs there."""
        return any(b"service.engine.process" in command_line(pid) for pid in descendants(host.pid))

    def _run(self, host: Host, command: str, *arguments: str) -> None:
        host.run([str(Path(sys.executable).parent / command), *arguments], self.environment)
