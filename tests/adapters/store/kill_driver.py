"""Run by test_kill.py in a process of its own: kills children of itself inside the store, and looks at what is left.

Every file-system operation of a fixed scenario is a point of death (an audit hook counts them and sends SIGKILL before
the chosen one); then the moments between, by sleeping for part of the scenario's time. What a death leaves is opened by
a second child, which dies as well, while it removes that: at another operation each time. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from adapters.files.name_versions import Condition, keep, move
from adapters.store.name_index import Query
from adapters.store.store import AdapterStore, StoreLimits
from tests.support.adapter_files import (
    config_bytes,
    lora_tensors,
    modules_ending,
    safetensors_bytes,
    small_layout,
    upload_bytes,
)

LAYOUT = small_layout()
TENSORS = [safetensors_bytes(lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 4, seed=seed)) for seed in range(3)]
MAX_VERSIONS = 2
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir", "shutil.rmtree"}


def open_store(root: Path) -> AdapterStore:
    limits = StoreLimits(free_disk_floor_bytes=0, max_versions=MAX_VERSIONS)
    return AdapterStore(root, LAYOUT, limits, base_name="base")


def put(store: AdapterStore, name: str, seed: int, condition: Condition = keep) -> None:
    upload_bytes(store, name, config_bytes(), TENSORS[seed], chunk_bytes=200, condition=condition)


def scenario(store: AdapterStore) -> None:
    """From {old: (0,)} through the states of STATES."""
    put(store, "new", 1)
    lease = store.lease("old")
    store.delete("old")
    lease.release()
    store.settle()
    put(store, "old", 2)
    put(store, "again", 1)
    store.delete("new")
    put(store, "again", 0, move)
    store.rollback("again")
    put(store, "again", 2, move)


# Name to the seeds of its versions, oldest first.
STATES: list[dict[str, tuple[int, ...]]] = [
    {"old": (0,)},
    {"old": (0,), "new": (1,)},
    {"new": (1,)},
    {"new": (1,), "old": (2,)},
    {"new": (1,), "old": (2,), "again": (1,)},
    {"old": (2,), "again": (1,)},
    {"old": (2,), "again": (1, 0)},
    {"old": (2,), "again": (0, 1)},
    {"old": (2,), "again": (1, 2)},
]


def die_at(count: int) -> None:
    """SIGKILL this process right before its file-system operation number `count`."""
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event in EVENTS:
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)


def child(root: Path, die_at_operation: int | None, play: Callable[[AdapterStore], None] = scenario) -> int:
    """Fork; the child opens the store and plays the scenario."""
    pid = os.fork()
    if pid == 0:
        if die_at_operation is not None:
            die_at(die_at_operation)
        play(open_store(root))
        os._exit(0)
    return pid


def has_died(pid: int) -> bool:
    """Wait for the child: whether it was killed, or else went through."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def whole_adapters(root: Path) -> dict[str, tuple[int, dict[str, bytes]]]:
    """Digest -> seed and files, from a store that nobody kills."""
    store = open_store(root)
    for seed in range(len(TENSORS)):
        put(store, f"seed{seed}", seed)
    adapters = {
        record.digest: (int(record.name.removeprefix("seed")), files_of(store.path_of(record.digest)))
        for record in store.each()
    }
    store.close()
    assert all(files["adapter_config.json"] == config_bytes() for _, files in adapters.values())
    return adapters


def prepare(root: Path) -> None:
    store = open_store(root)
    put(store, "old", 0)
    store.close()


def leaves(root: Path) -> int:
    """How many things in the store are there by the death alone."""
    (layout,) = root.iterdir()
    records = (json.loads(path.read_bytes()) for path in (layout / "names").iterdir())
    named = {version["digest"] for record in records for version in record["versions"]}
    unnamed = {path.name for path in (layout / "adapters").iterdir()} - named
    return len(list((layout / "staging").iterdir())) + len(unnamed)


def look(root: Path, whole: dict[str, tuple[int, dict[str, bytes]]]) -> dict[str, tuple[int, ...]]:
    """Reopen, and return name -> seeds of its versions. Whatever is there is whole."""
    store = open_store(root)
    store.check_integrity()
    found = {}
    for name, record in store.names().items():
        for version in record.versions:
            assert files_of(store.path_of(version.digest)) == whole[version.digest][1]
        found[name] = tuple(whole[version.digest][0] for version in record.versions)
    assert [row.name for row in store.page(Query(limit=1000))] == list(found), "the index differs"
    assert list(root.glob("*/staging/*")) == [], "leftovers"
    for name, seeds in found.items():  # the store still works
        put(store, name, seeds[-1])
    put(store, "after", 0)
    store.delete("after")
    store.close()
    return found


def main(root: Path) -> None:
    whole = whole_adapters(root / "whole")
    seen: list[dict[str, tuple[int, ...]]] = []
    deaths = 0
    recovery_deaths: set[int] = set()  # the operations of an opening at which one died that had something to remove
    recovery_point = 0
    for point in range(10_000):
        place = root / f"point{point}"
        prepare(place)
        if not has_died(child(place, point)):
            seen.append(look(place, whole))
            break
        deaths += 1
        if leaves(place):
            if has_died(child(place, recovery_point, play=AdapterStore.close)):
                recovery_deaths.add(recovery_point)
                recovery_point += 1
            else:
                recovery_point = 0
        seen.append(look(place, whole))
    for part in range(10):
        place = root / f"time{part}"
        prepare(place)
        pid = child(place, None)
        time.sleep(0.004 * part)  # picks the moment of the kill; nothing waits for anything
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen.append(look(place, whole))
    assert all(state in STATES for state in seen), [state for state in seen if state not in STATES]
    num_states = sum(state in seen for state in STATES)
    print(
        json.dumps(
            {"deaths": deaths, "recovery_deaths": len(recovery_deaths), "states": num_states, "all": len(STATES)}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
