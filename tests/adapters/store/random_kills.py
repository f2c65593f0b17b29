"""Kills a process at random while it uploads, replaces, rolls back, prunes and deletes, again and again in one store.

    .venv/bin/python -m tests.adapters.store.random_kills DIRECTORY [--kills 200] [--seed 0]

The child says after each change that it is done. What is found after its death is what those changes made, perhaps with
the one that was under way; every version is whole, and the index kept equals the index built anew; and what a number
was found to tell once it tells for ever, whatever was deleted. A kill seldom meets the moment in which a change is made
and not said, so kills go on until one has, up to twenty times as many. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

from adapters.errors import NotFound
from adapters.files.name_versions import move
from adapters.store.store import AdapterStore
from tests.adapters.store.kill_driver import (
    MAX_VERSIONS,
    TENSORS,
    die_at,
    has_died,
    look,
    open_store,
    put,
    whole_adapters,
)
from tests.support.name_changes import Change, State, after, changes

NAMES = ("one", "two", "three")


def make(store: AdapterStore, change: Change) -> None:
    """The same in the store."""
    what, name, seed = change
    try:
        if what == "delete":
            store.delete(name)
        elif what == "rollback":
            store.rollback(name)
        else:
            put(store, name, seed, move)
    except NotFound:
        assert what != "put"


def run_and_die(root: Path, seed: int, die_at_operation: int | None, num_changes: int) -> int:
    """A child makes changes and dies: at a file-system operation, or else when it has said that so many are done.
    Returns how many it has said to be done."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        if die_at_operation is not None:
            die_at(die_at_operation)
        store = open_store(root)
        for change in changes(seed, NAMES, len(TENSORS)):
            make(store, change)
            os.write(writing, b".")
    os.close(writing)
    num_done = 0
    while said := os.read(reading, 1):
        num_done += len(said)
        if die_at_operation is None and num_done == num_changes:
            os.kill(pid, signal.SIGKILL)
    os.close(reading)
    assert has_died(pid)
    return num_done


def numbered(root: Path) -> dict[tuple[str, int], str]:
    """Digests by name and number."""
    store = open_store(root)
    names = store.names()
    store.close()
    return {(name, one.number): one.digest for name, record in names.items() for one in record.versions}


def main(root: Path, num_kills: int, seed: int) -> None:
    whole = whole_adapters(root / "whole")
    generator = random.Random(seed)
    place, state = root / "store", State()
    found_as, told = Counter[str](), dict[tuple[str, int], str]()
    num_changes = 0
    for kill in range(20 * num_kills):
        if kill >= num_kills and len(found_as) == 2:
            break
        # Every other one dies at an operation, the others between or within, as the system has it.
        operation = generator.randrange(300) if kill % 2 else None
        run_seed = generator.randrange(2**32)
        num_done = run_and_die(place, run_seed, operation, generator.randrange(1, 12))
        sequence = changes(run_seed, NAMES, len(TENSORS))
        for _ in range(num_done):
            state = after(state, next(sequence), MAX_VERSIONS)
        may_be = after(state, next(sequence), MAX_VERSIONS)
        found = look(place, whole)
        assert found in (state, may_be), (kill, run_seed, num_done, found, state, may_be)
        found_as["as acknowledged" if found == state else "with the change under way"] += 1
        state = found
        for number, digest in numbered(place).items():
            assert told.setdefault(number, digest) == digest, (kill, run_seed, number)
        num_changes += num_done
    print(json.dumps({"kills": found_as.total(), "changes": num_changes, **found_as}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    main(arguments.directory, arguments.kills, arguments.seed)
