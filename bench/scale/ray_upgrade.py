"""An upgrade of the server on Ray Serve under traffic: which requests it costs. Runs where Ray is installed:

    RAY_SERVE_ENABLE_HA_PROXY=1 python -m bench.scale.ray_upgrade

Starts a Ray of its own with two engines on CPUs, sends requests from several clients and reads long streams, deploys
the application anew with other settings, so that Ray replaces the ingress and both engines, and prints what failed.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

import httpx

from bench.adapters.kill_clients import Streamer
from bench.adapters.kill_tenants import Tenant
from tests.support.on_ray.own_ray import deploy, running_ray

_BODY = {"model": "calculator", "prompt": "12 + 30", "max_tokens": 8, "temperature": 0}
_AFTER_SECONDS = 5.0


class Traffic:
    """Clients that ask until `stop`, some of which read long streams; seconds of each request, and what failed."""

    def __init__(self, url: str, num_clients: int, num_streams: int) -> None:
        self.seconds: list[float] = []
        self.failed: list[str] = []
        self._url = url
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_clients)]
        for one in self._threads:
            one.start()
        self._streamers = [Streamer(url, Tenant()) for _ in range(num_streams)]
        for streamer in self._streamers:
            streamer.start()

    @property
    def num_streams(self) -> int:
        """That came to their ends."""
        return sum(one.num_whole for one in self._streamers)

    def stop(self) -> None:
        self._stopping.set()
        for streamer in self._streamers:
            streamer.stop.set()
        for one in self._threads:
            one.join()
        for streamer in self._streamers:
            streamer.join()
            if streamer.num_ended:
                self.failed.append(f"{streamer.num_ended} streams ended by an error event")
            if streamer.is_cut or streamer.failure is not None:
                self.failed.append(f"a stream: {streamer.failure or 'cut off'}")

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stopping.is_set():
                began_seconds = time.monotonic()
                try:
                    answer = http.post("/v1/completions", json=_BODY)
                    if answer.status_code != 200:
                        self.failed.append(f"{answer.status_code} {answer.text[:200]}")
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                self.seconds.append(time.monotonic() - began_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8433)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--streams", type=int, default=2, help="clients that read streams of 400 tokens of the base")
    given = parser.parse_args()
    url = f"http://127.0.0.1:{given.port}"
    with running_ray(given.port) as root:
        settings: dict[str, Any] = {"store_dir": str(root / "store"), "kv_bytes": "24MiB", "model_name": "base"}
        deploy(settings, engines=2)
        traffic = Traffic(url, given.clients, given.streams)
        try:
            began_seconds = time.monotonic()
            deploy({**settings, "token_budget": 128}, engines=2)
            upgrade_seconds = time.monotonic() - began_seconds
            time.sleep(_AFTER_SECONDS)
        finally:
            traffic.stop()
        print(f"upgrade: {upgrade_seconds:.0f} s, {len(traffic.seconds)} requests, ", end="")
        print(f"{traffic.num_streams} streams whole, {len(traffic.failed)} failed")
        print(f"p50 {1e3 * statistics.median(traffic.seconds):.0f} ms", *traffic.failed[:10], sep="\n")


if __name__ == "__main__":
    main()
