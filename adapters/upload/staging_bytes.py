"""The limits of uploads, the bytes on the disk of those that are not adapters yet, and files that are written within
them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from adapters.errors import StagingFull, StorageFull, TooLarge
from adapters.files.durable_files import begin_sync, store_faults_are_ours
from adapters.quota import ClientQuota
from adapters.text.side_files import KEPT_BYTES, Role

# Free disk space is asked for again after this many bytes.
DISK_CHECK_BYTES = 16 << 20
# Tensors begin to go to disk after so many bytes, while more come.
_SYNC_BYTES = 4 << 20
# Pieces of so many bytes are worth a thread's turn, and so many may wait for it: it goes on without being woken.
_BESIDE_BYTES, _MOST_BESIDE = 1 << 18, 4


class StagingBytes:
    """Counts the bytes by owner, as `ClientQuota` divides them; thread-safe.

    limit_bytes  of all uploads together, half of it for one owner; small uploads are admitted beyond it, up to a
                 quarter more
    setting      what a refusal's sentence calls that
    holders      its subject
    way_out      its end
    """

    def __init__(
        self,
        limit_bytes: int,
        setting: str = "--max-staging-bytes",
        holders: str = "The uploads that are not finished",
        way_out: str = "upload again when they are done",
    ) -> None:
        self._lock = threading.Lock()
        self._holders, self._way_out = holders, way_out
        self._setting = f"{setting} ({limit_bytes})"
        self._shares = ClientQuota(limit_bytes // 2, small=limit_bytes // 256)

    @property
    def num_bytes(self) -> int:
        """Bytes in use now."""
        with self._lock:
            return self._shares.num_held

    def take(self, owner: str, num_bytes: int, before: int = 0) -> None:
        """Reserve bytes before they are written, of an upload that holds `before` already. Raises TooLarge if it will
        never have as many, StagingFull if the owner may not have them now."""
        with self._lock:
            self._acquire(owner, num_bytes, before)

    def check(self, owner: str, num_bytes: int) -> None:
        """Raise what `take` would raise for a whole upload of so many bytes."""
        with self._lock:
            self._acquire(owner, num_bytes, 0)
            self._shares.release(owner, num_bytes)

    def _acquire(self, owner: str, num_bytes: int, before: int) -> None:
        shares, size = self._shares, before + num_bytes
        if shares.acquire(owner, num_bytes):
            return
        most = f"{shares.most_of_one} bytes, half of {self._setting}"
        if size > shares.most_of_one:
            raise TooLarge(
                f"The upload takes {size} bytes or more, and a client may hold {most}; ask the operator to raise that."
            )
        raise StagingFull(
            f"{self._holders} hold {shares.num_held - before} bytes, of which yours hold "
            f"{shares.held_by(owner) - before}; a client gets as much as it leaves free for others, at most {most}, "
            f"and this upload takes {size} or more; {self._way_out}."
        )

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Release bytes that were removed, or became an adapter's."""
        with self._lock:
            self._shares.release(owner, num_bytes)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of one upload.

    max_upload_bytes       bytes received, all parts together; also the bound of what an archive unpacks to
    max_files              parts, archive members or directory entries
    free_disk_floor_bytes  refuse to write when less than this would stay free on the store's file system
    max_staging_bytes      of all uploads until they are adapters; None = no limit. An archive counts packed and
                           unpacked, and so does the copy of tensors that came in another form than the stored one

    Limits of the versions of a name:

    max_versions           the current one included
    max_version_bytes      of older contents of one name, together

    max_ephemeral_bytes    of ephemeral versions and their uploads, in memory; None = none is taken. Older contents of
                           one name have an eighth of it
    """

    max_upload_bytes: int = 4 << 30
    max_files: int = 256
    free_disk_floor_bytes: int = 256 << 20
    max_staging_bytes: int | None = None
    max_versions: int = 8
    max_version_bytes: int = 1 << 30
    max_ephemeral_bytes: int | None = None


class HeldBytes:
    """The staging bytes of one upload."""

    def __init__(self, shared: StagingBytes | None, owner: str) -> None:
        self._shared = shared
        self.owner = owner
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Reserve bytes before they are written. Raises StagingFull, TooLarge."""
        if self._shared is not None:
            self._shared.take(self.owner, num_bytes, self._num_bytes)
            self._num_bytes += num_bytes

    def check(self, num_bytes: int) -> None:
        """Raise what `take` would raise for all bytes of the upload, of which none is here."""
        if self._shared is not None:
            self._shared.check(self.owner, num_bytes)

    def keep(self, num_bytes: int) -> None:
        """Release all bytes but so many; a second call is harmless."""
        if self._shared is not None and num_bytes < self._num_bytes:
            self._shared.give_back(self.owner, self._num_bytes - num_bytes)
            self._num_bytes = num_bytes


class Budget:
    """The running counts of one upload, or of what an archive in it holds."""

    def __init__(self, directory: Path, limits: StoreLimits, held: HeldBytes) -> None:
        self._directory = directory
        self._limits = limits
        self._held = held
        self._num_bytes = 0
        self._num_files = 0
        self._checked_at = 0

    def receive(self, num_bytes: int) -> None:
        """Count bytes before they are written. Raises TooLarge, StorageFull, StagingFull."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._limits.max_upload_bytes:
            raise TooLarge(f"The upload is larger than the limit of {self._limits.max_upload_bytes} bytes.")
        self._held.take(num_bytes)
        if self._num_bytes - self._checked_at >= DISK_CHECK_BYTES:
            self.check_disk(num_bytes)

    def check_disk(self, num_bytes: int) -> None:
        """Raises StorageFull when writing `num_bytes` more would leave less free than the floor."""
        self._checked_at = self._num_bytes
        with store_faults_are_ours():
            stat = os.statvfs(self._directory)
        if stat.f_bavail * stat.f_frsize - num_bytes < self._limits.free_disk_floor_bytes:
            raise StorageFull("The store's disk is too full to take this adapter; delete adapters that are not needed.")

    def count_file(self) -> None:
        self._num_files += 1
        if self._num_files > self._limits.max_files:
            raise TooLarge(f"The upload has more than {self._limits.max_files} files.")


class UploadPart:
    """A file of an upload, open for writing; a context manager. Not thread-safe by itself."""

    def __init__(self, path: Path | None, role: Role, budget: Budget) -> None:
        """`path` None counts the bytes and keeps nothing."""
        self._file: IO[bytes] | None = None
        if path is not None:
            with store_faults_are_ours():
                self._file = path.open("wb" if path.is_symlink() else "xb")
        self.role = role
        self._syncs = path is not None and not path.is_symlink()
        self._budget = budget
        self._num_bytes = self._synced_bytes = 0
        self._steps: Generator[None, bytes | memoryview, None] | None = None
        self._beside: ThreadPoolExecutor | None = None
        self._taken: deque[Future[None]] = deque()

    def follow(self, steps: Generator[None, bytes | memoryview, None]) -> None:
        """Have each piece sent to `steps` once it is written; large ones in a thread, while the next ones come."""
        next(steps, None)
        self._steps = steps

    def write(self, data: bytes | memoryview) -> int:
        """Append. Raises TooLarge or StorageFull the moment a limit is passed."""
        self._budget.receive(len(data))
        kept_bytes = KEPT_BYTES.get(self.role)
        before, self._num_bytes = self._num_bytes, self._num_bytes + len(data)
        if kept_bytes is not None and self._num_bytes > kept_bytes:
            if self.role not in ("tokenizer", "ignored"):
                raise TooLarge(f"The {self.role.replace('_', ' ')} file is larger than {kept_bytes} bytes.")
            data_kept = data[: max(0, kept_bytes - before)]
        else:
            data_kept = data
        if self._file is not None and data_kept:
            with store_faults_are_ours():
                self._file.write(data_kept)
                if self.role == "tensors" and self._syncs and self._num_bytes - self._synced_bytes >= _SYNC_BYTES:
                    begin_sync(self._file.fileno(), self._synced_bytes, self._num_bytes - self._synced_bytes)
                    self._synced_bytes = self._num_bytes
        if self._steps is not None:
            if len(data) < _BESIDE_BYTES:
                self._settle()
                self._take(data)
            else:
                self._settle(_MOST_BESIDE - 1)
                self._beside = self._beside or ThreadPoolExecutor(1, "upload-digest")
                self._taken.append(self._beside.submit(self._take, data))
        return len(data)

    def _take(self, data: bytes | memoryview) -> None:
        assert self._steps is not None
        with suppress(StopIteration):
            self._steps.send(data)

    def _settle(self, most: int = 0) -> None:
        """Wait until at most so many pieces wait for the thread. Raises what it has raised."""
        while len(self._taken) > most:
            self._taken.popleft().result()

    def flush(self) -> None:
        """Have what was written be in the file, for others to read."""
        if self._file is not None:
            with store_faults_are_ours():
                self._file.flush()

    def close(self) -> None:
        try:
            self._settle()
        finally:
            if self._beside is not None:
                self._beside.shutdown()
            if self._file is not None:
                with store_faults_are_ours():
                    self._file.close()

    def __enter__(self) -> UploadPart:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
