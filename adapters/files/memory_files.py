"""Files of ephemeral adapters: each lies in memory alone, and a link in an adapter's directory leads to it, so that
whoever reads the directory reads it too. The memory goes with its link's directory, or with this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from adapters.errors import StagingFull, Unsupported
from adapters.quota import ClientQuota

# Each holds a file descriptor, of which connections need some too. Half of them for one owner, as `ClientQuota` has it.
MAX_FILES = 256

# Releases bytes that an upload holds, all but so many.
KeepBytes = Callable[[int], None]


class MemoryFiles:
    """Thread-safe. A child process reads them by their links as long as this process lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[int, str, KeepBytes]] = {}  # by the link's target
        self._shares = ClientQuota(MAX_FILES // 2)

    def create(self, link: Path, owner: str, keep_bytes: KeepBytes) -> None:
        """Make an empty file and a link to it. Raises StagingFull if the owner may have no more, Unsupported where the
        system has none.

        keep_bytes  called with the bytes that remain in memory for the upload whenever a file of it goes
        """
        if not hasattr(os, "memfd_create"):
            raise Unsupported("This system has no files in memory; upload without `ephemeral`.")
        with self._lock:
            if not self._shares.acquire(owner, 1):
                raise StagingFull(
                    f"There are {self._shares.num_held} ephemeral versions in memory, {self._shares.refusal(owner)}; "
                    "delete some, or move fewer names."
                )
            try:
                descriptor = os.memfd_create("multilora-adapter")
            except OSError:
                self._shares.release(owner, 1)
                raise
            target = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._open[target] = descriptor, owner, keep_bytes
        link.symlink_to(target)

    def close_below(self, directory: Path) -> None:
        """Free the memory of all links below the directory, which is about to be removed."""
        for path in directory.rglob("*"):
            if path.is_symlink():
                self._close(os.readlink(path))

    def settle(self, keep_bytes: KeepBytes) -> None:
        """Release the bytes that an upload holds beside those of its files here."""
        with self._lock:
            sizes = [os.fstat(descriptor).st_size for descriptor, _, keep in self._open.values() if keep == keep_bytes]
            keep_bytes(sum(sizes))

    def close(self) -> None:
        """Free all memory."""
        for target in list(self._open):
            self._close(target)

    def _close(self, target: str) -> None:
        with self._lock:
            found = self._open.pop(target, None)
            if found is None:
                return
            descriptor, owner, keep_bytes = found
            self._shares.release(owner, 1)
        # Frees the memory, 10 ms for 84 MB, for which the answer to an upload that drops an old version need not wait.
        threading.Thread(target=os.close, args=(descriptor,), name="free-memory").start()
        self.settle(keep_bytes)


def is_in_memory(directory: Path, name: str) -> bool:
    """Whether the file of an adapter's directory is one of these, of this process or a dead one."""
    return (directory / name).is_symlink()
