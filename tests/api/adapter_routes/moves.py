"""Requests while names move: every one is answered, by the version that was current when it was sent or a newer one.

    make serve                                       # in another terminal
    .venv/bin/python -m tests.api.adapter_routes.moves         # or --url=..., --requests=10000, --moves=200

Uploads the bundled adapters under names of its own, replaces and rolls them back, and deletes them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from service.settings import BUNDLED_ADAPTERS_DIR
from tests.support.limits import LIMIT_SECONDS

_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass
class Outcome:
    """What became of the requests. `late` are those that an older version answered than was acknowledged before they
    were sent, `mixed` those whose header and fingerprint tell of different contents."""

    statuses: Counter[int] = field(default_factory=Counter)
    late: int = 0
    mixed: int = 0
    num_moves: int = 0
    num_versions_seen: int = 0


class _Names:
    """The newest version of each name that the server has acknowledged."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.acknowledged = dict.fromkeys(names, 0)


def run(
    url: str,
    contents: Sequence[Path],
    *,
    num_requests: int,
    num_moves: int,
    names: Sequence[str] = ("moving-0", "moving-1", "moving-2"),
    num_clients: int = 8,
) -> Outcome:
    """Send at least so many requests from `num_clients` threads, and more until another one has moved the names so
    often: in turn, among `contents`, every fourth time by a rollback, and after that not before a request was answered
    by what it has brought back, so that names move among requests. Deletes the names in the end."""
    known, outcome, lock = _Names(names), Outcome(), threading.Condition()
    seen: set[str] = set()
    sending = itertools.count()
    moved = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as client:
            while True:
                at = next(sending)
                if at >= num_requests and moved.is_set():
                    return
                name = known.names[at % len(known.names)]
                before = known.acknowledged[name]
                body = {"model": name, "prompt": "the", "max_tokens": 1, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                spoke = answer.headers.get("x-multilora-adapter", "@0 sha256:")
                with lock:
                    outcome.statuses[answer.status_code] += 1
                    outcome.late += int(spoke.partition("@")[2].split()[0]) < before
                    digest = spoke.partition("sha256:")[2]
                    outcome.mixed += not (digest and answer.json()["system_fingerprint"].endswith(digest[:16]))
                    seen.add(spoke.partition(" ")[0])
                    lock.notify_all()

    def wait_until_seen(spoken: str) -> None:
        with lock:
            lock.wait_for(lambda: spoken in seen, LIMIT_SECONDS)

    def move() -> None:
        try:
            move_all()
        finally:
            moved.set()

    def move_all() -> None:
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as client:
            for at in range(num_moves):
                name = known.names[at % len(known.names)]
                if at % 4 == 3:
                    answer = client.post(f"/v1/adapters/{name}/rollback", json={})
                else:
                    content = contents[at // len(known.names) % len(contents)]
                    answer = client.put(f"/v1/adapters/{name}", files=_parts(content))
                version = known.acknowledged[name] = answer.raise_for_status().json()["version"]
                outcome.num_moves += 1
                if at % 4 == 3:
                    wait_until_seen(f"{name}@{version}")

    with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as client:
        try:
            for name in names:
                client.put(f"/v1/adapters/{name}", files=_parts(contents[-1])).raise_for_status()
            with ThreadPoolExecutor(num_clients + 1) as pool:
                for one in [pool.submit(move), *(pool.submit(send) for _ in range(num_clients))]:
                    one.result()
        finally:
            for name in names:
                client.delete(f"/v1/adapters/{name}")
    outcome.num_versions_seen = len(seen)
    return outcome


def _parts(directory: Path) -> list[tuple[str, tuple[str, bytes]]]:
    return [("file", (name, (directory / name).read_bytes())) for name in _FILES]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.api.adapter_routes.moves", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--adapters", type=Path, default=BUNDLED_ADAPTERS_DIR, help="directory of PEFT directories")
    arguments = parser.parse_args()
    contents = sorted(path for path in arguments.adapters.iterdir() if path.is_dir())
    outcome = run(arguments.url, contents, num_requests=arguments.requests, num_moves=arguments.moves)
    print(json.dumps({**vars(outcome), "statuses": dict(outcome.statuses)}))


if __name__ == "__main__":
    main()
