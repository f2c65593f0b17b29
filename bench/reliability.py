"""Mixed traffic of five tenants, by themselves and beside a hostile one.

    .venv/bin/python -m bench.reliability --minutes=30     # starts its own servers; --minutes are those beside it

Tenants of a keys file, with addresses of their own on loopback. Five of them stream completions with adapters, chat,
count tokens and upload, replace and delete an adapter. The sixth sends what `bench.hostile` has, floods with requests,
begins uploads and reads nothing. Its rounds have three parts each, so that what else the machine does counts in all:

alone    the five, a quarter of the time
control  the five, while the sixth does all that to another server on the same machine: what it costs that the two
         share processors, whatever this server does; a quarter of the time
beside   the five and the sixth at one server

Told are the five's times in the three parts, and beside each thing that the hostile one does; all answers of 500 and
above; how the memory of each process grows in the last half of the run, and the most it had in each quarter: freed
memory goes back now and then, so that it rises and falls.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from bench.reliability_traffic import Client, Seen, work
from bench.server_process import Server, running_server

NUM_CLIENTS = 5
PARTS = ("alone", "control", "beside")
_TENANTS = (*(f"client-{number}" for number in range(NUM_CLIENTS)), "hostile")


class Memory(threading.Thread):
    """Resident bytes of the server and its children, once a second, by what they are."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server, self.ended = server, threading.Event()
        self.samples: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def run(self) -> None:
        while not self.ended.wait(1.0):
            self._sample(self._server.process.pid, "server")
            for module, name in (
                ("service.engine.process", "engine"),
                ("template_worker", "template worker"),
                ("grammars.trial", "grammar trial"),
            ):
                for pid in self._server.child_pids_of(module)[:1]:
                    self._sample(pid, name)

    def _sample(self, pid: int, name: str) -> None:
        with suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self.samples[name].append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))

    def slopes(self, since: float) -> dict[str, float]:
        """Bytes per minute of each, from the samples after that time, by least squares."""
        found = {}
        for name, samples in self.samples.items():
            late = [(at, size) for at, size in samples if at >= since]
            if len(late) > 10:
                found[name] = statistics.linear_regression(*zip(*late, strict=True)).slope * 60
        return found

    def quarters(self, since: float, until: float) -> dict[str, list[int]]:
        """Most bytes of each in the four quarters of that time."""
        span = (until - since) / 4
        found = {}
        for name, samples in self.samples.items():
            most = [0] * 4
            for at, size in samples:
                if since <= at < until:
                    quarter = int((at - since) / span)
                    most[quarter] = max(most[quarter], size)
            found[name] = most
        return found


def keys_file(folder: Path) -> tuple[Path, list[str]]:
    """A file with all tenants, and a key of each."""
    keys = [f"key of {tenant}".replace(" ", "-") for tenant in _TENANTS]
    blocks = []
    for tenant, key in zip(_TENANTS, keys, strict=True):
        digest = hashlib.sha256(key.encode()).hexdigest()
        scopes = '["infer", "upload", "delete"]'
        blocks.append(f'[tenants.{tenant}]\n\n[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest}"\nscopes = {scopes}\n')
    path = folder / "keys.toml"
    path.write_text("\n".join(blocks))
    return path, keys


def part(clients: list[Client], seconds: float, seen: Seen) -> None:
    """All of them at once for so long; each finishes what it has begun."""
    lock, until = threading.Lock(), time.monotonic() + seconds
    threads = [threading.Thread(target=work, args=(client, until, lock, seen)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def part_with_hostile(clients: list[Client], seconds: float, seen: Seen, url: str, key: str, hostile: Seen) -> None:
    """The same, while the hostile client does its work at the server of that address, from where it has left off."""
    command = [sys.executable, "-m", "bench.reliability_traffic", url, key, str(len(hostile.spans)), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        part(clients, seconds, seen)
        hostile.add(msgspec.json.decode(process.stdout.read(), type=Seen))


def beside_each(seen: dict[str, Seen], hostile: Seen) -> list[tuple[str, int, float, float]]:
    """(what the hostile client did, the others' requests meanwhile, their median and slowest hundredth), in units of
    the slowest hundredth alone of each one's kind; the worst first."""
    alone = seen["alone"]
    usual = {kind: alone.percentile(kind, 99) for kind in alone.seconds}
    found: dict[str, list[float]] = defaultdict(list)
    for name, began, ended in hostile.spans:
        for kind, started, done in seen["beside"].spans:
            if started < ended and done > began:
                found[name].append((done - started) / usual[kind])
    rows = []
    for name, parts in found.items():
        if len(parts) > 1:
            cuts = statistics.quantiles(parts, n=100, method="inclusive")
            rows.append((name, len(parts), cuts[49], cuts[98]))
    return sorted(rows, key=lambda row: -row[3])


def tell_memory(memory: Memory, since: float, until: float, say: Callable[[str], None]) -> None:
    """What the processes took in that time."""
    slopes, quarters = memory.slopes((since + until) / 2), memory.quarters(since, until)
    for name, slope in slopes.items():
        most = ", ".join(f"{size / (1 << 20):.0f}" for size in quarters[name])
        say(f"memory of the {name}: {slope / (1 << 20):+.2f} MiB per minute; most in each quarter: {most} MiB")


def tell(seen: dict[str, Seen], hostile: dict[str, Seen], say: Callable[[str], None]) -> int:
    """The tables; how many answers were 500 or above."""
    say(
        "| Request | "
        + " | ".join(f"{name}: number, p50, p99" for name in PARTS)
        + " | p99 beside / alone | / control |"
    )
    say("|---|" + "---|" * (len(PARTS) + 2))
    for kind in seen["alone"].seconds:
        cells, slowest = [], {}
        for name in PARTS:
            half, slowest[name] = (seen[name].percentile(kind, percent) * 1e3 for percent in (50, 99))
            cells.append(f"{len(seen[name].seconds[kind])}, {half:.0f}, {slowest[name]:.0f} ms")
        ratios = [f"{slowest['beside'] / slowest[name]:.1f}" for name in ("alone", "control")]
        say(f"| {kind} | {' | '.join(cells + ratios)} |")
    everybody = {**seen, "hostile": hostile["beside"]}
    for name, one in everybody.items():
        say(f"answers, {name}: {dict(sorted(one.statuses.items()))}")
    say("| Beside | requests | p50 | p99, in units of the p99 alone |\n|---|---|---|---|")
    for what, count, half, most in beside_each(seen, hostile["beside"]):
        say(f"| {what} | {count} | {half:.2f} | {most:.1f} |")
    return sum(count for one in everybody.values() for status, count in one.statuses.items() if status >= 500)


def run(folder: Path, server: Server, keys: list[str], given: argparse.Namespace, settings: dict[str, object]) -> int:
    """All rounds, at a server that runs; how many answers were 500 or above."""
    seconds = given.minutes * 60 / given.rounds
    *own, hostile_key = keys
    clients = [Client(server.url, key, number) for number, key in enumerate(own)]
    seen, hostile = {name: Seen() for name in PARTS}, {name: Seen() for name in PARTS}
    part(clients, 2, Seen())  # the first requests of a server
    memory = Memory(server)
    memory.start()
    began = time.monotonic()
    for number in range(given.rounds):
        part(clients, seconds / 4, seen["alone"])
        with running_server(None, folder / f"control-{number}", **settings) as other:
            part_with_hostile(clients, seconds / 4, seen["control"], other.url, hostile_key, hostile["control"])
        part_with_hostile(clients, seconds, seen["beside"], server.url, hostile_key, hostile["beside"])
    memory.ended.set()
    memory.join()
    num_failed = tell(seen, hostile, print)
    tell_memory(memory, began, time.monotonic(), print)
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed traffic beside a hostile client.")
    parser.add_argument("--minutes", type=float, default=30.0, help="beside the hostile client, in all rounds together")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reliability-") as root:
        path, keys = keys_file(Path(root))
        settings: dict[str, object] = {"min_free_disk_bytes": 0, "keys_file": path}
        with running_server(None, Path(root) / "server", **settings) as server:
            num_failed = run(Path(root), server, keys, given, settings)
            exit_code = server.stop()
    print(f"{num_failed} answers of 500 and above; the server ended with {exit_code}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
