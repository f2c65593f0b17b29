"""A real `multilora serve` process on a free port, for benchmarks and for tests over HTTP.

    with running_server(model_dir, tmp_path, token_budget=64) as server:
        httpx.get(f"{server.url}/v1/models")

Settings are given by name; everything the process writes goes to `server.log_path`. With TEST_REPLICAS=2 in the
environment each server has two engines where nothing else is said, so that any test runs against them unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.limits import LIMIT_SECONDS
from tests.support.processes import children, command_line

_ROOT = Path(__file__).resolve().parents[3]


def wait_for(condition: Callable[[], Any], what: str, *, every_seconds: float = 0.02) -> Any:
    """Poll until `condition()` is true and return what it returned; AssertionError after LIMIT_SECONDS."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {LIMIT_SECONDS} s in vain for {what}"
        time.sleep(every_seconds)


@dataclass
class Server:
    """A running server. `url` has no trailing slash."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path
    store_dir: Path
    # One client for all calls: building one costs more than most requests.
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=LIMIT_SECONDS), repr=False)

    @property
    def log(self) -> str:
        """Everything the processes have logged so far."""
        return self.log_path.read_text(errors="replace")

    def log_lines(self, request_id: str) -> list[dict[str, Any]]:
        """What has been logged of a request, oldest first, by a server with log_format="json"."""
        lines = (json.loads(line) for line in self.log.splitlines() if request_id in line and line.endswith("}"))
        return [line for line in lines if line.get("request_id") == request_id]

    @property
    def openai_url(self) -> str:
        """`base_url` for the openai client."""
        return f"{self.url}/v1"

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET a path."""
        return self.http.get(f"{self.url}{path}", **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """POST to a path."""
        return self.http.post(f"{self.url}{path}", **options)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `multilora_<name>` whose labels include `labels`; 0 without any."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == f"multilora_{name}"]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def engine_pid(self) -> int:
        """Process id of the one engine."""
        (engine,) = self.engine_pids()
        return engine

    def engine_pids(self) -> list[int]:
        """Process ids of the engines."""
        return self.child_pids_of("service.engine.process")

    def child_pid(self, module: str) -> int:
        """Process id of the one child that runs this module."""
        (child,) = self.child_pids_of(module)
        return child

    def child_pids_of(self, module: str) -> list[int]:
        """Process ids of the children that run this module."""
        return [pid for pid in self.child_pids() if module.encode() in command_line(pid)]

    def child_pids(self) -> list[int]:
        """Process ids of all children."""
        return children(self.process.pid)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_SECONDS)


def start_server(
    model_dir: Path | None,
    work_dir: Path,
    *,
    wait: bool = True,
    installed: Path | None = None,
    module: str = "service.cli.main",
    server_class: type[Server] = Server,
    tree: Path = _ROOT,
    **settings: Any,
) -> Server:
    """Start a server on a free port; with `wait` it is ready on return. End it with `Server.stop` or kill it.

    A model directory or a setting that is None has the server's own default. The server is this tree's, or
    another one's; with `installed`, the path of a command `multilora`, it is that one, started in `work_dir`. `module`
    takes the arguments of that command, and is a `server_class`.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    store_dir = Path(settings.pop("store_dir", work_dir / "store"))
    given = {
        "model_dir": model_dir,
        "store_dir": store_dir,
        "port": 0,
        "device": "cpu",
        "num_threads": 1,
        "kv_bytes": "8MiB",
        "adapter_row_bytes": "32MiB",
        "host_tier_bytes": "32MiB",
        "replicas": os.environ.get("TEST_REPLICAS"),
        **settings,
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    log_path = work_dir / f"server-{time.monotonic_ns()}.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MULTILORA_")}
    command: Sequence[str] = (sys.executable, "-m", module) if installed is None else (str(installed),)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "serve", *flags],
            cwd=tree if installed is None else work_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    server = server_class(process, "", log_path, store_dir)
    try:
        server.url = wait_for(lambda: _listening_url(server), "the server to listen")
        if wait:
            wait_for(lambda: _is_ready(server), "the server to be ready", every_seconds=0.1)  # each asks the server
    except BaseException:
        process.kill()
        process.wait()
        print(server.log)
        raise
    return server


@contextlib.contextmanager
def running_server(model_dir: Path | None, work_dir: Path, **settings: Any) -> Iterator[Server]:
    """A ready server, killed at the end if it has not been stopped."""
    server = start_server(model_dir, work_dir, **settings)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def _listening_url(server: Server) -> str | None:
    assert server.process.poll() is None, f"the server has ended with {server.process.returncode}:\n{server.log}"
    found = re.search(r"listening.*?(http://[^\s\"]+)", server.log)
    return None if found is None else found.group(1)


def _is_ready(server: Server) -> bool:
    assert server.process.poll() is None, f"the server has ended with {server.process.returncode}:\n{server.log}"
    try:
        return server.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
