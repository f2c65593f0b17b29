"""Whether NFS gives what a shared store relies on (`adapters.store.shared_log`): machines of QEMU's, one of which
exports a directory by NFS 4.2 and two mount it. Root on Debian.

    bench/nfs/image.sh DIR      # once
    python -m bench.nfs DIR [--options hard,lookupcache=positive] [--changes 60] [--seed 0] [--accelerator tcg]

What is done from the two:

replaced    one replaces a file by rename, again and again, and the other reads it: it is there, whole, never older
turns       both count up a number in a file, each time in a turn
changes     one changes a name in the store, either at random, and at once the other must have all names and versions
            as they are then; also with a log of changes that begins anew every few changes
killed      a process that has the turn is killed: how soon the other machine gets it
restarted   the file server ends in the middle of changes, and is there again later: they wait, and none is lost
cut off     the machine of a process that has the turn is killed: how soon the other gets it; the file server's lease
            is 10 s in these machines, where 90 s are usual

Prints a line of JSON; AssertionError where something is not as it must be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

from bench.nfs.machines import Caller, Machine, running
from tests.support.limits import LIMIT_SECONDS
from tests.support.name_changes import State, after, changes

_NAMES, _NUM_CONTENTS, _MAX_VERSIONS = ("one", "two", "three"), 4, 3
_ANEW_BYTES = 512  # of a log: half of it is a few changes
_LOG_BYTES = 1 << 20


def replaced(one: Caller, other: Caller, times: int) -> dict[str, int]:
    """What the other saw."""
    one.call("replace", 1)
    one.begin("replace", times)
    seen: dict[str, int] = other.call("read", 3 * times)
    one.end()
    assert not seen["missing"] + seen["torn"] + seen["older"], seen
    assert seen["numbers"] > 1, "nothing was replaced meanwhile"
    return seen


def turns(one: Caller, other: Caller, times: int) -> int:
    """The number in the end."""
    one.begin("count_up", times)
    other.begin("count_up", times)
    last = max(one.end(), other.end())
    assert last == 2 * times, last
    return 2 * times


class Names:
    """What the store must hold: contents are told apart by their digests, which are learnt as they come."""

    def __init__(self) -> None:
        self.state: State = {}
        self._digests: dict[int, str] = {}

    def check(self, held: dict[str, list[str]], change: object) -> None:
        told = f"{held} after {change}, where {self.state} is right"
        assert held.keys() == self.state.keys(), told
        for name, contents in self.state.items():
            assert len(held[name]) == len(contents), told
            for content, digest in zip(contents, held[name], strict=True):
                assert self._digests.setdefault(content, digest) == digest, told


def change_names(callers: list[Caller], names: Names, count: int, seed: int) -> float:
    """Seconds until the other knew, at the most: from the answer of the one to the answer of the other."""
    generator, longest = random.Random(seed), 0.0
    for change in itertools.islice(changes(seed, _NAMES, _NUM_CONTENTS), count):
        writer, reader = generator.sample(callers, 2)
        what, name, content = change
        writer.call(what, name, *([content] if what == "put" else []))
        names.state = after(names.state, change, _MAX_VERSIONS)
        began = time.monotonic()
        names.check(reader.call("held"), change)
        longest = max(longest, time.monotonic() - began)
    return longest


def gets_turn(other: Caller) -> float:
    """Seconds until it has it."""
    began = time.monotonic()
    while not other.call("take_turn"):
        assert time.monotonic() - began < LIMIT_SECONDS, "the turn never comes"
    other.call("give_turn")
    return time.monotonic() - began


def restarted(server: Machine, callers: list[Caller], names: Names) -> float:
    """Seconds that a change took which began while there was no file server."""
    server.run("rpc.nfsd 0")
    began = time.monotonic()
    callers[0].begin("put", "late", 0)
    server.run("sleep 5; rpc.nfsd --no-nfs-version 3 4")
    callers[0].end()
    took = time.monotonic() - began
    names.state = {**names.state, "late": (0,)}
    names.check(callers[1].call("held"), "late")
    callers[0].call("delete", "late")
    names.state = {name: state for name, state in names.state.items() if name != "late"}
    names.check(callers[1].call("held"), "late, deleted")
    return took


def measure(machines: list[Machine], options: str, count: int, seed: int) -> dict[str, Any]:
    server, *clients = machines
    for client in clients:
        client.mount(options)
    one, other = callers = [Caller(client) for client in clients]
    figures: dict[str, Any] = {"mount": clients[0].run("grep nfs4 /proc/mounts").strip()}
    figures["replaced"] = replaced(one, other, count)
    figures["turns"] = turns(one, other, count)
    names = Names()
    for log_bytes in (_LOG_BYTES, _ANEW_BYTES):
        for caller in callers:
            caller.call("open", log_bytes)
        figures[f"changes_{log_bytes}"] = count
        figures[f"known_seconds_{log_bytes}"] = round(change_names(callers, names, count, seed + log_bytes), 3)
        figures["restarted_seconds"] = round(restarted(server, callers, names), 1)
        for caller in callers:
            caller.call("close")
    assert one.call("take_turn")
    one.kill()
    figures["killed_seconds"] = round(gets_turn(other), 2)
    third = Caller(clients[0])
    assert third.call("take_turn")
    clients[0].kill()
    figures["cut_off_seconds"] = round(gets_turn(other), 1)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nfs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path, metavar="DIR")
    parser.add_argument("--options", default="hard,lookupcache=positive")
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=7300, help="of the machines' network, and of shells above it")
    parser.add_argument("--accelerator", default="tcg", help="kvm where it works")
    given = parser.parse_args()
    with running(given.images, 3, given.port, given.accelerator) as machines:
        print(json.dumps(measure(machines, given.options, given.changes, given.seed)))


if __name__ == "__main__":
    main()
