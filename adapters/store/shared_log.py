"""Several servers on one store: changes of names, how other servers learn of them, and when files may be removed.

Every change happens under the change lock, an exclusive lock that any one server holds at a time. It protects nothing
that must outlive it: the names' files are the truth, and the log of changes lists what was done, so a holder's death
loses nothing. Reading takes no lock: before a look-up a server opens the log and reads the entries appended since its
last look, and the files of the names in them. A change is in the log before it is answered, so it holds for the next
request to any server.

Assumptions: rename replaces a file at once for everybody; flock excludes, and ends with its process; a file opened
after another server has closed it shows that server's writes (a local file system; NFS 4, close to open). A server
without a sign of life for DEAD_SECONDS counts as dead: its leases keep no file any more.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from adapters.errors import StoreBusy
from adapters.files.durable_files import remove, replace_file
from adapters.files.manifest import UNREADABLE

# How long a change waits for the change lock. A server that hangs while it holds the lock blocks all others until it
# is killed.
CHANGE_LOCK_SECONDS = 10.0
_POLL_SECONDS = 0.005
DEAD_SECONDS = 60.0
# The log has its bytes from the start, so that adapters can be deleted on a full disk. The next one begins at the half.
LOG_BYTES = 1 << 20
_HEADER_BYTES = 17
_HEADER = re.compile(rb"[0-9]{16}\n")
_READ_BYTES = 1 << 16
# A server's file is filled up to as much: most of what it may have to say later fits without a further byte of disk.
_MEMBER_BYTES = 1 << 12

# A place in the log: the number of the log, and of the byte in it, 0 where that is not known.
Position = tuple[int, int]


class _Member(msgspec.Struct, frozen=True):
    """A server's file: how far it has read the log, and digests that only its requests keep, no name."""

    position: Position
    held: tuple[str, ...]


class News(msgspec.Struct, frozen=True):
    """Changes by other servers.

    names     names that changed
    replaced  digests whose damaged files were replaced
    is_all    the log began anew or is damaged, so all names must be read
    """

    names: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    is_all: bool = False


class SharedLog:
    """One server's part in a shared store. One thread of the server at a time holds the change lock, and one reads the
    log.

    root  of the store, of one base; it holds `changes`, `change-lock` and `members/`
    """

    def __init__(self, root: Path) -> None:
        self.member = uuid.uuid4().hex
        self._log = root / "changes"
        self._staging = root / "staging"
        self._members = root / "members"
        self._members.mkdir(parents=True, exist_ok=True)
        self._lock = (root / "change-lock").open("a+")
        self._read: Position = (0, 0)
        self._end = 0
        # Digests without a name, and how far the log was when that was first seen.
        self._unused: dict[str, Position] = {}

    def close(self) -> None:
        """Leave: nothing is kept for this server any more."""
        (self._members / self.member).unlink(missing_ok=True)
        self._lock.close()

    # ---- changes

    @contextmanager
    def change_lock(self) -> Iterator[None]:
        """The change lock, held by one server at a time. Raises StoreBusy after CHANGE_LOCK_SECONDS. Call `news` in it
        first."""
        deadline = time.monotonic() + CHANGE_LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreBusy(
                        "Another server of this store has not finished a change of adapters for "
                        f"{round(CHANGE_LOCK_SECONDS)} seconds; try again in a moment."
                    ) from None
                time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def begin_log(self) -> None:
        """Under the change lock: create a log if there is none, and complete the entry of a server that was killed
        while writing it: others have not heard of the name that it was about to change."""
        if self._number() is None:
            self._begin_anew()
        elif self._read[1] > LOG_BYTES // 2:
            with suppress(OSError):  # on a full disk it goes on with what it has
                self._begin_anew()
        lines = self._find_end()
        if self._read[0] == self._number() and self._read[1] > self._end:  # what was read there is gone
            self._begin_anew()
            lines = self._find_end()
        last = lines[:-1].rpartition(b"\n")[2].decode(errors="replace")
        if last.startswith("-"):
            self._append(f"+{last[1:]}")

    def _find_end(self) -> bytes:
        """Whole lines of the log, behind which the next one goes."""
        lines = _whole_lines(self._bytes_from(_HEADER_BYTES, LOG_BYTES).rstrip(b"\0"))
        self._end = _HEADER_BYTES + len(lines)
        return lines

    @contextmanager
    def announced(self, name: str) -> Iterator[None]:
        """Under the change lock: the name's file is changed inside."""
        self._append(f"-{name}")
        try:
            yield
        finally:
            self._append(f"+{name}")

    def log_replaced(self, digest: str) -> None:
        """Under the change lock: note that a digest's files were replaced."""
        self._append(f"!{self.member} {digest}")

    def _append(self, line: str) -> None:
        data = f"{line}\n".encode()
        torn = self._bytes_from(self._end + len(data), 512)
        with self._log.open("r+b", buffering=0) as file:
            # The rest of a line by a killed server lies behind the end, and is ignored.
            os.pwrite(file.fileno(), data + b"\0" * len(torn.rstrip(b"\0")), self._end)
        self._end += len(data)

    def _begin_anew(self) -> None:
        number = max(self._number() or 0, self._read[0], *self._numbers_read()) + 1
        replace_file(self._log, (b"%016d\n" % number).ljust(LOG_BYTES, b"\0"))  # zeros: a change needs no more space

    def _numbers_read(self) -> Iterator[int]:
        """Numbers of the logs that servers have read, by their last sign of life: the next log has none of these, even
        if the log is lost."""
        yield 0
        for path in self._members.iterdir():
            with suppress(FileNotFoundError):
                yield _member_in(path.read_bytes()).position[0]

    def _number(self) -> int | None:
        """The number of the log; None where it is missing or damaged."""
        try:
            descriptor = os.open(self._log, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return _number_of(descriptor)
        finally:
            os.close(descriptor)

    def _bytes_from(self, offset: int, num_bytes: int) -> bytes:
        with self._log.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), num_bytes, offset)

    # ---- what others have changed

    def news(self) -> News:
        """Since the last call. Opens a file and reads a little of it, which is all that a look-up costs. Where the log
        is missing or damaged all names must be read each time, until the next change, or sweep, begins another."""
        lines, is_all = self._new_lines()
        names: dict[str, None] = {}
        replaced: list[str] = []
        for line in lines:
            kind, rest = line[:1], line[1:]
            if kind == "+":
                names[rest] = None
            elif kind == "!":
                replaced += [] if rest.startswith(self.member) else [rest.rpartition(" ")[2]]
            elif kind != "-":
                is_all = True  # the damaged line may have named any name
        return News((), tuple(replaced), True) if is_all else News(tuple(names), tuple(replaced))

    def _new_lines(self) -> tuple[list[str], bool]:
        """Lines that were not read before, and whether others that were not may be lost."""
        number, offset = self._read
        try:
            descriptor = os.open(self._log, os.O_RDONLY)
        except FileNotFoundError:
            self._read = (number, 0)
            return [], True
        data = b""
        try:
            found = _number_of(descriptor)
            goes_on = found == number and offset > 0 and os.pread(descriptor, 1, offset - 1) == b"\n"
            if not goes_on:
                offset = 0 if found is None else _HEADER_BYTES
            while offset and (lines := _whole_lines(os.pread(descriptor, _READ_BYTES, offset))):
                offset += len(lines)
                data += lines
        finally:
            os.close(descriptor)
        self._read = (number if found is None else found, offset)
        return data.decode(errors="replace").split("\n")[:-1], not goes_on

    # ---- what may go

    def report_alive(self, held: Iterable[str]) -> None:
        """Write a sign of life: the digests without a name that this server's requests use, as of the last `news`."""
        path = self._members / self.member
        said = msgspec.json.encode(_Member(self._read, tuple(sorted(held))))
        said += b" " * (-len(said) % _MEMBER_BYTES)
        try:
            replace_file(path, said, is_durable=False)
        except OSError:
            # On a full disk in what the file has already: else it would be taken for dead, and no file could go.
            has_bytes = path.stat().st_size if path.exists() else 0
            if len(said) > has_bytes:
                raise
            with path.open("r+b", buffering=0) as file:
                file.write(said.ljust(has_bytes))

    def removable(self, unused: set[str]) -> list[str]:
        """Under the change lock, after `report_alive`: the digests among `unused`, which no name keeps, that no server
        uses. Each server has read that the name is gone, and reports that it holds none. Forgets dead servers, with
        their staging directories."""
        members = list(self._alive())
        self._unused = {digest: self._unused.get(digest, (self._read[0], self._end)) for digest in unused}
        return [
            digest
            for digest, since in self._unused.items()
            if all(digest not in one.held and one.position >= since for one in members)
        ]

    def _alive(self) -> Iterator[_Member]:
        now_seconds = (self._members / self.member).stat().st_mtime  # by the clock of whoever keeps the files
        alive = set()
        for path in self._members.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < now_seconds - DEAD_SECONDS:
                    path.unlink()
                elif not path.name.startswith("."):
                    alive.add(path.name)
                    yield _member_in(path.read_bytes())
        for path in self._staging.iterdir():
            with suppress(FileNotFoundError):
                if path.name not in alive and path.lstat().st_mtime < now_seconds - DEAD_SECONDS:
                    remove(path)


def _member_in(data: bytes) -> _Member:
    """The content of a server's file; for a file that is being written, a server that has read nothing, so that nothing
    is removed."""
    try:
        return msgspec.json.decode(data, type=_Member)
    except UNREADABLE:
        return _Member((0, 0), ())


def _number_of(descriptor: int) -> int | None:
    """The number of an open log; None where it is damaged: a whole log is never shorter than at its start."""
    header = os.pread(descriptor, _HEADER_BYTES, 0)
    is_whole = _HEADER.fullmatch(header) is not None and os.fstat(descriptor).st_size >= LOG_BYTES
    return int(header) if is_whole else None


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]
