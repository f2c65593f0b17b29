"""Mixed traffic of five tenants, by themselves and beside a hostile one.

    .venv/bin/python -m bench.http.reliability --minutes=30     # starts its own servers; --minutes are those beside it

Tenants of a keys file, with addresses of their own on loopback. Five of them stream completions with adapters, chat,
count tokens and upload, replace and delete an adapter. The sixth sends all that `bench.hostile` has. Its rounds have
three parts each, so that what else the machine does counts in all:

alone    the five, a quarter of the time
control  the five, while the sixth does all that to another server on the same machine: what it costs that the two
         share processors, whatever this server does; a quarter of the time
beside   the five and the sixth at one server

Told are the five's times in the three parts, and beside each thing that the hostile one does; all answers of 500 and
above, those inside of streams and on raw sockets too (0 is for no answer), and tracebacks in the log; how the memory of
each process grows in the last half of the minutes beside the sixth, on a clock that stands still in the other parts,
and the most it had in each quarter of them. Servers do less in the other parts, so that a line through all of them
tells where in the half those lie: it is told too.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from bench.http.reliability_traffic import Client, Seen, work
from tests.support.http.server_process import Server, running_server

NUM_CLIENTS = 5
MIB = 1 << 20
PARTS = ("alone", "control", "beside")
SEVERAL = "the end of one thing and the beginning of the next"
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
                for number, pid in enumerate(sorted(self._server.child_pids_of(module))):
                    self._sample(pid, f"{name} {number + 1}" if number else name)

    def _sample(self, pid: int, name: str) -> None:
        with suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self.samples[name].append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))

    def beside(self, spans: Sequence[tuple[float, float]]) -> dict[str, list[tuple[float, int]]]:
        """The samples within those times, of each process, on a clock that stands still between them."""
        return {
            name: [
                (at - began + sum(end - start for start, end in spans[:number]), size)
                for number, (began, ended) in enumerate(spans)
                for at, size in samples
                if began <= at < ended
            ]
            for name, samples in self.samples.items()
        }


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes per minute in the last half of the time, by least squares; nan where too few samples tell."""
    half = (samples[0][0] + samples[-1][0]) / 2 if samples else 0.0
    late = [(at, size) for at, size in samples if at >= half]
    return statistics.linear_regression(*zip(*late, strict=True)).slope * 60 if len(late) > 10 else math.nan


def quarters(samples: Sequence[tuple[float, int]]) -> list[int]:
    """Most bytes in each quarter of the time."""
    begin, span = samples[0][0], (samples[-1][0] - samples[0][0]) / 4 or 1.0
    most = [0] * 4
    for at, size in samples:
        quarter = min(int((at - begin) / span), 3)
        most[quarter] = max(most[quarter], size)
    return most


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


def part_with_hostile(
    clients: list[Client], seconds: float, seen: Seen, url: str, key: str, hostile: Seen, first: int
) -> None:
    """The same, while the hostile client does its work at the server of that address, from where it has left off; it
    began with the attack of number `first`."""
    begin = str(first + len(hostile.spans))
    command = [sys.executable, "-m", "bench.http.reliability_traffic", url, key, begin, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        part(clients, seconds, seen)
        hostile.add(msgspec.json.decode(process.stdout.read(), type=Seen))


def beside_each(seen: dict[str, Seen], hostile: Seen) -> list[tuple[str, int, float, float]]:
    """(what the hostile client did, the others' requests meanwhile, their median and slowest hundredth), in units of
    the slowest hundredth alone of each one's kind; the worst first.

    A request counts for what it lies wholly inside of. One that was under way beside several things waited for any of
    them, and one that began or ended beside none is not wholly anything's: these have a row together, as the slow ones
    beside short attacks are found there alone.
    """
    alone = seen["alone"]
    usual = {kind: alone.percentile(kind, 99) for kind in alone.seconds}
    found: dict[str, list[float]] = defaultdict(list)
    for kind, started, done in seen["beside"].spans:
        names = {name for name, began, ended in hostile.spans if began <= started and done <= ended}
        found[names.pop() if names else SEVERAL].append((done - started) / usual[kind])
    rows = []
    for name, parts in found.items():
        if len(parts) > 1:
            cuts = statistics.quantiles(parts, n=100, method="inclusive")
            rows.append((name, len(parts), cuts[49], cuts[98]))
    return sorted(rows, key=lambda row: -row[3])


def tell_memory(memory: Memory, spans: Sequence[tuple[float, float]], say: Callable[[str], None]) -> None:
    """What the processes took in those times, beside the hostile client."""
    for name, samples in memory.beside(spans).items():
        if samples:
            beside, everywhere = (slope(those) / MIB for those in (samples, memory.samples[name]))
            most = ", ".join(f"{size / MIB:.0f}" for size in quarters(samples))
            slopes = f"{beside:+.2f} MiB per minute ({everywhere:+.2f} through all parts)"
            say(f"memory of the {name}: {slopes}; most in each quarter: {most} MiB")


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
    everybody = {**seen, "hostile": hostile["beside"], "hostile, to the other server": hostile["control"]}
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
    beside: list[tuple[float, float]] = []
    for number in range(given.rounds):
        part(clients, seconds / 4, seen["alone"])
        with running_server(None, folder / f"control-{number}", **settings) as other:
            part_with_hostile(
                clients, seconds / 4, seen["control"], other.url, hostile_key, hostile["control"], given.first
            )
        began = time.monotonic()
        part_with_hostile(clients, seconds, seen["beside"], server.url, hostile_key, hostile["beside"], given.first)
        beside.append((began, time.monotonic()))
    memory.ended.set()
    memory.join()
    num_failed = tell(seen, hostile, print)
    tell_memory(memory, beside, print)
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed traffic beside a hostile client.")
    parser.add_argument("--minutes", type=float, default=30.0, help="beside the hostile client, in all rounds together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the attack to begin with")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reliability-") as root:
        path, keys = keys_file(Path(root))
        settings: dict[str, object] = {"min_free_disk_bytes": 0, "keys_file": path}
        with running_server(None, Path(root) / "server", **settings) as server:
            num_failed = run(Path(root), server, keys, given, settings)
            exit_code = server.stop()
            _, *tracebacks = server.log.split("Traceback")
    print(f"{num_failed} answers of 500 and above; the server ended with {exit_code}")
    print(f"{len(tracebacks)} tracebacks in its log", *(one[:3000] for one in tracebacks[:5]), sep="\n")
    return int(num_failed > 0 or len(tracebacks) > 0)


if __name__ == "__main__":
    sys.exit(main())
