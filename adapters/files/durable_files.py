"""Durable writes, which survive a power failure once a call returns, and removal of directories. The one place that
replaces a file by a rename, and that makes errors of the store of the system's errors about its disk."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

from adapters.errors import AdapterError, StorageFull, StoreUnreachable

log = logging.getLogger(__name__)

# Linux's own, in glibc and musl.
_sync_file_range, _WRITE = getattr(ctypes.CDLL(None), "sync_file_range", None), 2
# Faults of the process or the machine: they say nothing of the file that was to be read, and pass.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(
    path: Path, data: bytes, *, temporary: Path | None = None, mode: int | None = None, is_durable: bool = True
) -> None:
    """Replace a file, or make it, by one rename: readers, and a start after a kill, find the old content or the new.
    Raises OSError, with the file as it was. One writer of a file at a time.

    temporary   where the data is written first, on the same disk; by default hidden beside the file
    mode        permissions; by default those of a new file
    is_durable  whether the new content survives a power failure once this returns
    """
    new = temporary or path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # of a killed process: it may have another's permissions
    created_mode = 0o666 if mode is None else mode
    try:
        with open(new, "xb", opener=lambda name, flags: os.open(name, flags, created_mode)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    if is_durable:
        sync_renamed(path.parent)


@contextmanager
def whole_directory(target: Path, *, may_replace: bool = False) -> Iterator[Path]:
    """A new directory to fill, hidden beside `target`, which it becomes by one rename when the body has ended, synced.
    After an exception nothing of it is left; a kill leaves the hidden one.

    Raises FileExistsError if there is something at `target`, before the body runs and after it.

    may_replace  a directory that is there goes instead
    """
    if os.path.lexists(target) and not (may_replace and target.is_dir() and not target.is_symlink()):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    around = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        new = around / "new"
        new.mkdir()
        yield new
        for directory, _, _ in os.walk(new):
            sync_files(Path(directory))
        if os.path.lexists(target):
            if not may_replace:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            target.rename(around / "old")
        try:
            new.rename(target)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # another process was first
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
            raise
    finally:
        shutil.rmtree(around, ignore_errors=True)
    sync_renamed(target.parent)


def begin_sync(descriptor: int, first_byte: int, num_bytes: int) -> None:
    """Have the system begin to write a range of a file to disk, so that a later sync waits for less. Promises nothing;
    a no-op where there is no such call."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(first_byte), ctypes.c_int64(num_bytes), _WRITE)


@contextmanager
def synced_beside(path: Path) -> Iterator[None]:
    """Sync a written file in another thread while the body runs; it is on disk when the body ends."""
    with path.open("r+b") as file, ThreadPoolExecutor(1, thread_name_prefix="sync") as thread:
        synced = thread.submit(os.fsync, file.fileno())
        yield
        synced.result()


def sync_renamed(path: Path) -> None:
    """After a rename into `path`, which holds whether this works or not: only a failure of power could undo it."""
    try:
        sync_directory(path)
    except OSError:
        log.exception("what was written to %s may not outlast a failure of power", path)


def sync_files(path: Path) -> None:
    """Sync a directory and the plain files in it, not those that links lead to."""
    for file in path.iterdir():
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    sync_directory(path)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(paths: Iterable[Path]) -> None:
    """Remove each with all that is in it. What cannot be removed is left to the next start."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()  # of what is no directory, such as a link to one


def remove(path: Path) -> None:
    """Remove a directory with its contents, a file, or a link itself; a missing one is no error. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_unless_gone)
    else:
        path.unlink(missing_ok=True)


def _unless_gone(_call: object, _path: str, error: tuple[type[BaseException], BaseException, TracebackType]) -> None:
    """For `shutil.rmtree`: raise the error, but for what somebody else has removed."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def refuse_shortage(error: Exception) -> None:
    """Raise the error unless it concerns the one file alone."""
    if isinstance(error, OSError) and error.errno in _SHORTAGES:
        raise error


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
# Unmounted or moved away, read-only, without access, or on a file server that does not answer.
_AWAY = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENODEV, errno.ENXIO),
        *(errno.ESTALE, errno.EREMOTEIO, errno.ENOLCK, errno.ENOTCONN, errno.ETIMEDOUT),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)


def store_fault(error: OSError) -> AdapterError | None:
    """StorageFull or StoreUnreachable for an OSError of the store's own files, None for any other."""
    if error.errno in FULL:
        return StorageFull("The store's disk is full; delete adapters that are not needed.")
    if error.errno not in _AWAY:
        return None
    log.error("the adapter store cannot be used: %s", error)
    return StoreUnreachable(
        f"The server's adapter store cannot be read or written now ({error.strerror}); try again in a moment. "
        "Adapters that are loaded can be used meanwhile."
    )


@contextmanager
def store_faults_are_ours() -> Iterator[None]:
    """Raise `store_fault`'s error in place of an OSError."""
    try:
        yield
    except OSError as error:
        fault = store_fault(error)
        if fault is None:
            raise
        raise fault from error


WriteFault = Literal["full", "unreachable", "read-only"]
# More than what a file system keeps within a file's own entry.
_NUM_BYTES = 8192


def write_fault(directory: Path) -> WriteFault | None:
    """The reason why files cannot be written there; None after a successful trial, which leaves no file. Blocks on a
    file server that does not answer."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            # A file server may say only at the end that it was too much: closing raises then.
            if file.write(bytes(_NUM_BYTES)) < _NUM_BYTES:
                return "full"
    except OSError as error:
        if error.errno in FULL:
            return "full"
        return "read-only" if error.errno in READ_ONLY else "unreachable"
    return None


# Above what a disk that works takes, and below what whoever asks for /health waits.
ANSWER_SECONDS = 1.0
# A file server may take longer, where nobody waits.
_WATCH_ANSWER_SECONDS = 3.0
_WATCH_SECONDS = 2.0


class StoreHealth:
    """Looks in a thread of its own, one look at a time, however many ask: those who come during one share the next, so
    that what they are told is not older than their question. A look may stick in the system's call.

    answer_seconds  how long a look is waited for
    """

    def __init__(self, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._answer_seconds = answer_seconds
        self._thread = ThreadPoolExecutor(1, "store-look")
        self._next: Future[WriteFault | None] | None = None

    async def fault(self, look: Callable[[], WriteFault | None]) -> WriteFault | None:
        """The fault that `look` returns; "unreachable" if that takes too long."""
        if self._next is None or self._next.running() or self._next.done():
            self._next = self._thread.submit(look)
        answer = asyncio.wrap_future(self._next)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), self._answer_seconds)
        except TimeoutError:
            return "unreachable"


class DiskWatch:
    """Calls `report` with "disk-full", "disk-read-only" or "disk-unreachable" where one of the directories cannot be
    written, and with None where all can, after each look. A directory that is not there is left out: it is not
    made yet, or missing for all."""

    def __init__(self, directories: Sequence[Path], report: Callable[[str | None], None]) -> None:
        self._directories, self._report = tuple(directories), report
        self._health = StoreHealth(_WATCH_ANSWER_SECONDS)

    async def look(self) -> None:
        """Check once."""
        fault = await self._health.fault(self._first_fault)
        self._report(None if fault is None else f"disk-{fault}")

    async def run(self) -> None:
        """Check until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_WATCH_SECONDS)

    def _first_fault(self) -> WriteFault | None:
        faults = (write_fault(one) for one in self._directories if one.is_dir())
        return next((fault for fault in faults if fault is not None), None)
