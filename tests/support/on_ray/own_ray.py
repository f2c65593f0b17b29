"""A Ray of one's own with the application on it, for benchmarks. Runs where Ray is installed."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve

from service.ray_serve.app import RayArgs, build
from service.ray_serve.haproxy import ENVIRONMENT

_STARTS = 5
_ROOT = Path(__file__).resolve().parents[3]


def start_ray(temp_dir: str, *, num_cpus: int, num_gpus: int = 0) -> None:
    """Ray of this machine. It gives its own processes 30 s, which is not enough beside much other work: then it is
    started again."""
    for name, value in {**ENVIRONMENT, "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy_command(Path(temp_dir)))}.items():
        os.environ.setdefault(name, value)
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=80 * 2**20,
                _temp_dir=temp_dir,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == _STARTS or "timed out during startup" not in str(error):
                raise


def haproxy_command(directory: Path) -> Path:
    """The command `multilora-haproxy` of this tree, which need not be installed; made there."""
    path = directory / "multilora-haproxy"
    paths = f'PYTHONPATH="{_ROOT}${{PYTHONPATH:+:$PYTHONPATH}}"'
    path.write_text(f'#!/bin/sh\n{paths} exec "{sys.executable}" -m service.ray_serve.haproxy "$@"\n')
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def running_ray(port: int) -> Iterator[Path]:
    """Ray of this machine, for CPUs alone, which listens on this port; a directory that goes with it."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as root:
        start_ray(root, num_cpus=8)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield Path(root)
        finally:
            serve.shutdown()
            ray.shutdown()


def deploy(settings: dict[str, Any], engines: int, ingresses: int = 1) -> None:
    """Start the application, or replace it; returns when it serves."""
    args = RayArgs(settings=settings, engines=engines, ingresses=ingresses, drain_seconds=20)
    serve.run(build(args), name="multilora", route_prefix="/")
