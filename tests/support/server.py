"""Servers for tests are those of the benchmarks; what tests alone need to know of a process is here."""

from __future__ import annotations

from pathlib import Path

from bench.server_process import Server, running_server, start_server, wait_for

__all__ = ["Server", "is_alive", "running_server", "start_server", "wait_for"]


def is_alive(pid: int) -> bool:
    """A process that nobody has waited for yet is dead all the same."""
    return _state(pid) not in ("Z", "X", "gone")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
