"""The server on a Ray of its own: `python ray_server.py JSON` with `args` of the application, the HTTP `port` and a
`temp_dir` for Ray. Says READY, and ends with its stdin. Runs in an environment that has Ray."""

from __future__ import annotations

import json
import sys

import ray
from ray import serve

from bench.ray_server import start_ray
from service.ray_app import RayArgs, build


def main() -> None:
    said = json.loads(sys.argv[1])
    start_ray(said["temp_dir"], num_cpus=4)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": said["port"]})
        serve.run(build(RayArgs(**said["args"])), name="multilora", route_prefix="/")
        print("READY", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
