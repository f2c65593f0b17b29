"""The processes of this machine, as /proc tells of them, and processes that need not import what they use."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.limits import LIMIT_SECONDS


def command_line(pid: int) -> bytes:
    """Its arguments, each with a zero byte behind it; empty of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def parent(pid: int) -> int:
    """Process id of its parent; 0 of a process that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def children(pid: int) -> list[int]:
    """Process ids of its children."""
    pids: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process that has ended meanwhile
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


def descendants(pid: int) -> list[int]:
    """Process ids of its children, of theirs, and so on."""
    found = [pid]
    for one in found:
        found += children(one)
    return found[1:]


@contextlib.contextmanager
def forked(code: str, environment: Mapping[str, str], imported: Sequence[str]) -> Iterator[Connection]:
    """Run code in a process of its own, whose end of the connection is the name `connection`, with this environment.

    It is the fork of one that has imported these modules once for all: the import of torch alone takes more than a
    second. The process is to end with code 0 when this end of the connection is closed, which leaving the block does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imported))
    ours, theirs = context.Pipe()
    process = context.Process(target=_execute, args=(code, dict(environment), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(LIMIT_SECONDS)
    assert process.exitcode == 0


def _execute(code: str, environment: dict[str, str], connection: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    exec(code, {"__name__": "__main__", "connection": connection})
