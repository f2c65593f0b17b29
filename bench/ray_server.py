"""A Ray of one's own with the application on it, for benchmarks. Runs where Ray is installed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve

from service.ray_app import RayArgs, build


@contextlib.contextmanager
def running_ray(port: int) -> Iterator[Path]:
    """Ray of this machine, for CPUs alone, which listens on this port; a directory that goes with it."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as root:
        ray.init(address="local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False, _temp_dir=root)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield Path(root)
        finally:
            serve.shutdown()
            ray.shutdown()


def deploy(settings: dict[str, Any], engines: int) -> None:
    """Start the application, or replace it; returns when it serves."""
    serve.run(build(RayArgs(settings=settings, engines=engines, drain_seconds=20)), name="multilora", route_prefix="/")
