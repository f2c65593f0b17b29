"""Servers for tests: those of `server_process.py`, and what tests alone need to know of a process.

With TEST_SERVED_BY=ray in the environment each of them is an application on Ray Serve
(`tests/support/on_ray/ray_server.py`), so that any test of a server runs through Ray's proxy unchanged. What cannot
hold there: `tests/support/on_ray/through_ray.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import compiled_after_ready
from tests.support.http import server_process
from tests.support.http.client_environments import environment
from tests.support.http.server_process import Server, wait_for
from tests.support.on_ray.through_ray import is_on_ray
from tests.support.processes import descendants

__all__ = [
    "Server",
    "is_alive",
    "on_ray",
    "posted",
    "running_server",
    "standing_still",
    "start_server",
    "still_loading",
    "wait_for",
]


class ServerOnRay(Server):
    """One whose process has started Ray, whose processes are those that serve."""

    def child_pids(self) -> list[int]:
        """Process ids of all that the process has started, and of all that these have."""
        return descendants(self.process.pid)


def on_ray() -> dict[str, Any]:
    """What is added to the settings of a server that is to be on Ray. Skips where Ray has no environment."""
    environment("ray")
    return {"module": "tests.support.on_ray.ray_server", "server_class": ServerOnRay}


def _chosen() -> dict[str, Any]:
    return on_ray() if is_on_ray() else {}


def start_server(model_dir: Path | None, work_dir: Path, **settings: Any) -> Server:
    """See `server_process.start_server`; from now on each test looks whether it has compiled anything."""
    server = server_process.start_server(model_dir, work_dir, **{**_chosen(), **settings})
    compiled_after_ready.watch_log(server.log_path)
    return server


@contextlib.contextmanager
def running_server(model_dir: Path | None, work_dir: Path, **settings: Any) -> Iterator[Server]:
    """See `server_process.running_server`; likewise."""
    with server_process.running_server(model_dir, work_dir, **{**_chosen(), **settings}) as server:
        compiled_after_ready.watch_log(server.log_path)
        yield server


@contextlib.contextmanager
def posted(server: Server, path: str, body: Any, name: str = "by-hand") -> Iterator[None]:
    """A POST with this X-Request-Id, whose connection is closed on leaving, answered or not."""
    content = json.dumps(body).encode()
    headers = {"Host": "x", "X-Request-Id": name, "Content-Type": "application/json", "Content-Length": len(content)}
    headers |= {header: value for header, value in server.http.headers.items() if header == "authorization"}
    head = "".join(f"{header}: {value}\r\n" for header, value in headers.items())
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        yield


@contextlib.contextmanager
def standing_still(*pids: int) -> Iterator[None]:
    """Nothing that the processes work on can end meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def still_loading(server: Server) -> Iterator[None]:
    """A server that was started just now does not get ready meanwhile."""
    num_engines = int(os.environ.get("TEST_REPLICAS", "1"))
    wait_for(lambda: len(server.engine_pids()) == num_engines, "the engines' processes")
    with standing_still(*server.engine_pids()):
        yield


def is_alive(pid: int) -> bool:
    """A process that nobody has waited for yet is dead all the same."""
    return _state(pid) not in ("Z", "X", "gone")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
