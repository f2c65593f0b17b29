"""Processes killed at random while adapters are uploaded, replaced and deleted: nothing acknowledged is lost.

    python -m tests.hostile.kills              # 300 kills of real servers' processes; `make test-kills`

A life of a server: a client changes adapters without a pause, while processes for templates, the engine and at last the
server itself are killed with SIGKILL at random moments. The next server opens the same store, and each name must stand
for what was acknowledged last, or for what was under way when the server died.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.server_process import Server, start_server, wait_for
from service.settings import BUNDLED_ADAPTERS_DIR

NAMES = ("one", "two", "three")
TEMPLATE = b"{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
# A server whose engine dies three times in a minute does not start a fourth.
ENGINES_PER_LIFE = 2
_ABSENT = ""


@dataclass
class Ledger:
    """What each name may stand for: digests, or `_ABSENT`. One while nothing is under way."""

    may_be: dict[str, set[str]] = field(default_factory=lambda: {name: {_ABSENT} for name in NAMES})
    num_acknowledged: int = 0
    refused: Counter[int] = field(default_factory=Counter)

    def check(self, listed: dict[str, str]) -> None:
        """AssertionError for a name that stands for anything else; from now on it is known."""
        for name, expected in self.may_be.items():
            found = listed.get(name, _ABSENT)
            assert found in expected, f"{name} stands for {found[:12] or 'nothing'}, not for one of {expected}"
            self.may_be[name] = {found}
        assert listed.keys() <= set(NAMES), listed


class Client(threading.Thread):
    """Changes adapters until the server is gone, or it is told to stop."""

    def __init__(self, server: Server, ledger: Ledger, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self._server, self._ledger, self._rng = server, ledger, rng
        self._config = json.loads((BUNDLED_ADAPTERS_DIR / "shout" / "adapter_config.json").read_bytes())
        self._tensors = (BUNDLED_ADAPTERS_DIR / "shout" / "adapter_model.safetensors").read_bytes()
        self.stopping = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._server.url, timeout=120) as http:
                while not self.stopping.is_set():
                    self._change(http, self._rng.choice(NAMES))
        except httpx.TransportError:
            return  # the server has been killed
        except BaseException as error:
            self.failure = error

    def go_on(self, num_changes: int) -> None:
        """Return when so many more have been acknowledged."""
        goal = self._ledger.num_acknowledged + num_changes
        wait_for(lambda: self._ledger.num_acknowledged >= goal or not self.is_alive(), "changes to be acknowledged")

    def _change(self, http: httpx.Client, name: str) -> None:
        (before,) = self._ledger.may_be[name]
        if before != _ABSENT:
            self._ledger.may_be[name] = {before, _ABSENT}
            answer = http.delete(f"/v1/adapters/{name}")
            assert answer.status_code == 200, answer.text
            self._ledger.may_be[name] = {_ABSENT}
            self._ledger.num_acknowledged += 1
            if self._rng.random() < 0.3:
                return
        # What is under way is only known by its digest once it is acknowledged.
        self._ledger.may_be[name] = {_ABSENT, *self._all_digests()}
        answer = http.post("/v1/adapters", data={"name": name}, files=self._parts(alpha := self._rng.randrange(1, 9)))
        if answer.status_code in (400, 503):  # its process for the template was killed; there is no engine
            self._ledger.may_be[name] = {_ABSENT}
            self._ledger.refused[answer.status_code] += 1
            return
        assert answer.status_code == 201, answer.text
        digest = answer.json()["digest"]
        DIGESTS.setdefault(alpha, digest)
        assert DIGESTS[alpha] == digest
        self._ledger.may_be[name] = {digest}
        self._ledger.num_acknowledged += 1

    def _all_digests(self) -> list[str]:
        return list(DIGESTS.values())

    def _parts(self, alpha: int) -> dict[str, Any]:
        config = json.dumps({**self._config, "lora_alpha": alpha}).encode()
        parts = {"adapter_config": ("adapter_config.json", config), "chat_template": ("chat_template.jinja", TEMPLATE)}
        return {**parts, "adapter_model": ("adapter_model.safetensors", self._tensors)}


DIGESTS: dict[int, str] = {}  # by lora_alpha, which is all in which the uploads differ


def start(root: Path) -> Server:
    """Ready for uploads."""
    return start_server(None, root, store_dir=root / "store", preload_adapters_dir=root / "none", min_free_disk_bytes=0)


def listed(server: Server) -> dict[str, str]:
    """What the names stand for."""
    return {one["name"]: one["digest"] for one in server.get("/v1/adapters").json()["data"]}


def life(root: Path, ledger: Ledger, rng: random.Random, killed: Counter[str]) -> None:
    """One server, from its start on what the last one left to its death."""
    server = start(root)
    try:
        ledger.check(listed(server))
        left = list((root / "store").glob("*/staging/*"))
        assert not left, f"left over: {left}"
        client = Client(server, ledger, rng)
        client.start()
        kinds = ["engine"] * rng.randrange(ENGINES_PER_LIFE + 1) + ["template"] * rng.randrange(6, 14)
        rng.shuffle(kinds)
        for kind in kinds:
            client.go_on(rng.randrange(4))
            time.sleep(rng.random() * 0.1)  # picks the moment of the kill; nothing waits for anything
            kill_child(server, kind, killed)
        client.go_on(rng.randrange(4))
        time.sleep(rng.random() * 0.1)
        server.process.kill()
        killed["server"] += 1
        client.stopping.set()
        client.join(120)
        assert not client.is_alive()
        if client.failure is not None:
            raise client.failure
    finally:
        server.process.kill()
        server.process.wait()
        server.http.close()


def kill_child(server: Server, kind: str, killed: Counter[str]) -> None:
    """One of them, if there is one just now."""
    module = {"engine": "service.engine.process", "template": "service.text.template_worker"}[kind]
    for pid in server.child_pids_of(module)[:1]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed[kind] += 1
        if kind == "engine":
            wait_for(lambda: server.get("/ready").status_code == 200, "the next engine")


def learn_digests(root: Path) -> None:
    """What each upload will be called, so that one that nobody acknowledged is known when it is found."""
    server = start(root)
    client = Client(server, Ledger(), random.Random(0))
    try:
        for alpha in range(1, 9):
            answer = server.post("/v1/adapters", data={"name": f"alpha{alpha}"}, files=client._parts(alpha))
            DIGESTS[alpha] = answer.raise_for_status().json()["digest"]
    finally:
        server.stop()
        server.http.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill processes at random; nothing acknowledged may be lost.")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    rng, killed, ledger, started, lives = random.Random(seed), Counter[str](), Ledger(), time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        root = Path(name)
        (root / "none").mkdir()
        (root / "first" / "none").mkdir(parents=True)
        learn_digests(root / "first")
        while killed.total() < given.kills:
            life(root, ledger, rng, killed)
            lives += 1
            if lives % 10 == 0:
                print(f"{killed.total()} kills in {time.monotonic() - started:.0f} s", flush=True)
        server = start(root)
        ledger.check(listed(server))
        for adapter in listed(server):
            body = {"model": adapter, "prompt": "the", "max_tokens": 2}
            assert server.post("/v1/completions", json=body).status_code == 200
        assert server.stop() == 0
        server.http.close()
    shown = ", ".join(f"{count} of the {kind}" for kind, count in sorted(killed.items()))
    print(
        f"{killed.total()} kills ({shown}) in {lives} lives and {time.monotonic() - started:.0f} s; "
        f"{ledger.num_acknowledged} changes acknowledged, none lost; refused, by status: {dict(ledger.refused)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
