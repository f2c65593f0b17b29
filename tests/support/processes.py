"""The processes of this machine, as /proc tells of them."""

from __future__ import annotations

import contextlib
from pathlib import Path


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
