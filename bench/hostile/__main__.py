"""What hostile requests cost the others: the longest wait of GET /health while each of them is served.

    make serve                                       # in another terminal; the server must be on this machine
    .venv/bin/python -m bench.hostile                # or --url=..., --model=...
    .venv/bin/python -m bench.hostile --own-server   # its own server, and the longest stretch of its event loop too

Every attack is bounded and ends by itself. Only loopback is talked to. A line for each: what it is, how many answers of
each status it got (0: none), how long it took, the longest wait, and the longest stretch.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.hostile.attacks import attacks
from bench.hostile.target import HOSTILE_ADDRESS, Target
from bench.steps import loop_stretches
from tests.support.http.server_process import running_server


@contextmanager
def worst_wait(url: str) -> Iterator[list[float]]:
    """Seconds that each GET /health on one kept connection takes meanwhile."""
    waits: list[float] = []
    ended = threading.Event()

    def probe() -> None:
        while True:
            started = time.perf_counter()
            client.get(f"{url}/health")
            waits.append(time.perf_counter() - started)
            if ended.wait(0.01):
                return

    with httpx.Client(timeout=120) as client:
        client.get(f"{url}/health")  # connected from here on
        thread = threading.Thread(target=probe)
        thread.start()
        try:
            yield waits
            time.sleep(0.1)
        finally:
            ended.set()
            thread.join()


def main() -> None:
    """Run them one after the other."""
    parser = argparse.ArgumentParser(description="Longest wait of GET /health while hostile requests are served.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="base")
    parser.add_argument("--only", default="", help="those attacks whose names have this in them")
    parser.add_argument("--own-server", action="store_true", help="start one, see bench.steps.loop_stretches")
    given = parser.parse_args()
    if not given.own_server:
        run(Target(given.url, given.model, HOSTILE_ADDRESS), None, given.only)
        return
    with tempfile.TemporaryDirectory(prefix="hostile-") as root:
        stretches = Path(root) / "stretches"
        os.environ[loop_stretches.VARIABLE] = str(stretches)
        with running_server(None, Path(root), module="bench.steps.loop_stretches", min_free_disk_bytes=0) as server:
            run(Target(server.url, given.model, HOSTILE_ADDRESS), stretches, given.only)
            print(f"{server.log.count('Traceback')} tracebacks in the server's log")


def run(target: Target, stretches: Path | None, only: str) -> None:
    """A line for each attack whose name has `only` in it; with the file of `bench.steps.loop_stretches` the longest of
    them too."""
    for name, attack in attacks(target).items():
        if only not in name:
            continue
        begun = time.monotonic()
        with worst_wait(target.url) as waits:
            started = time.perf_counter()
            attack()
            seconds = time.perf_counter() - started
        told = f"| {name} | {target.take_statuses()} | {seconds:.1f} s | {max(waits) * 1e3:.0f} ms |"
        if stretches is not None:
            told += f" {loop_stretches.longest_since(stretches, begun) * 1e3:.0f} ms |"
        print(told, flush=True)


if __name__ == "__main__":
    main()
