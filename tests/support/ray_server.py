"""The server on a Ray of its own: `python ray_server.py JSON` with `args` of the application, the HTTP `port` and a
`temp_dir` for Ray. Says READY, and ends with its stdin. Runs in an environment that has Ray."""

from __future__ import annotations

import json
import sys

import ray
from ray import serve

from service.ray_app import RayArgs, build

_STARTS = 5


def main() -> None:
    said = json.loads(sys.argv[1])
    _start_ray(said["temp_dir"])
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": said["port"]})
        serve.run(build(RayArgs(**said["args"])), name="multilora", route_prefix="/")
        print("READY", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


def _start_ray(temp_dir: str) -> None:
    """Ray gives its own processes 30 s, which is not enough beside much other work: then it is started again."""
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=4,
                num_gpus=0,
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


if __name__ == "__main__":
    main()
