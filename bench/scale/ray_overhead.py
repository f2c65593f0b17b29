"""What Ray Serve in front of an engine costs against `multilora serve`. Runs where Ray is installed:

    RAY_SERVE_ENABLE_HA_PROXY=1 python -m bench.scale.ray_overhead [--rounds 5] [--requests 60] [--streams 16]

Starts both with one engine on a CPU thread each, and asks them in turns. A request is for one token, one after another
on one connection; streams begin all at once. Ray's start is not counted. Prints the medians of the rounds; machines
that do other work meanwhile tell nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench.http.http_client import complete_all
from tests.support.http.server_process import running_server
from tests.support.on_ray.own_ray import deploy, running_ray

_ASK = {"model": "calculator", "prompt": "12 + 30", "max_tokens": 1, "temperature": 0, "ignore_eos": True}


def first_ms(url: str, num_requests: int) -> float:
    """Milliseconds of a request for one token, the median."""
    seconds = []
    with httpx.Client(base_url=url, timeout=60) as http:
        for _ in range(num_requests):
            began = time.perf_counter()
            http.post("/v1/completions", json=_ASK).raise_for_status()
            seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def tokens_per_second(url: str, num_streams: int, num_tokens: int) -> float:
    """Of streams at once."""
    more = {"max_tokens": num_tokens, "stream": True, "stream_options": {"include_usage": True}}
    answers, began, ended = complete_all(url, [_ASK | more] * num_streams)
    return sum(one.num_tokens for one in answers) / (ended - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags = (("port", 8434), ("rounds", 5), ("requests", 60), ("streams", 16), ("output-tokens", 200))
    for flag, default in flags:
        parser.add_argument(f"--{flag}", type=int, default=default)
    given = parser.parse_args()
    settings: dict[str, Any] = {"kv_bytes": "24MiB", "num_threads": 1}
    measured: dict[str, list[tuple[float, float]]] = {"multilora serve": [], "Ray Serve": []}
    with tempfile.TemporaryDirectory() as scratch, running_ray(given.port) as root:
        deploy(settings | {"store_dir": str(root / "store")}, engines=1)
        with running_server(None, Path(scratch), **settings) as alone:
            urls = {"multilora serve": alone.url, "Ray Serve": f"http://127.0.0.1:{given.port}"}
            for turn in range(given.rounds + 1):
                for name, url in urls.items():
                    one = first_ms(url, given.requests), tokens_per_second(url, given.streams, given.output_tokens)
                    measured[name] += [one] if turn else []
    proxy = "HAProxy" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "Ray's own proxy"
    print(f"{proxy}, median of {given.rounds} rounds")
    (alone_ms, alone_rate), (ray_ms, ray_rate) = (
        (statistics.median(ms for ms, _ in one), statistics.median(rate for _, rate in one))
        for one in measured.values()
    )
    print(f"one token: {alone_ms:.1f} ms, on Ray {ray_ms:.1f} ms: {ray_ms - alone_ms:+.1f} ms")
    print(f"streams: {alone_rate:.0f} tokens/s, on Ray {ray_rate:.0f}: {ray_rate / alone_rate:.2f} of it")


if __name__ == "__main__":
    main()
