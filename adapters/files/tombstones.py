"""Version numbers of deleted names: a name that returns continues after its old numbers, so one number never means two
contents.

The file of a deleted name is moved here, which needs no space on a full disk. Beyond `max_files` the older half is
replaced by its largest number; returning and new names then start after that number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from adapters.files.durable_files import refuse_shortage, replace_file, sync_renamed
from adapters.files.name_versions import decode_name

MAX_FILES = 4096
# No name begins with a dot.
_FLOOR = ".floor"
log = logging.getLogger(__name__)


class Tombstones:
    """Callers serialise changes, as for names.

    max_files  when there are more, the older half is removed
    """

    def __init__(self, directory: Path, max_files: int = MAX_FILES) -> None:
        self._directory = directory
        self._max_files = max_files
        directory.mkdir(exist_ok=True)
        self._num_files = sum(1 for _ in directory.iterdir())

    def move_in(self, path: Path) -> None:
        """Move the file of a deleted name here. Where that fails, remove it."""
        try:
            path.rename(self._directory / path.name)
        except OSError:
            path.unlink(missing_ok=True)  # somebody else's removal of it is as good
            return
        sync_renamed(self._directory)
        self._count()

    def add(self, file_name: str, record: bytes) -> None:
        """The same for a deleted name that has no file: `record` would be in it. What fails is logged."""
        try:
            replace_file(self._directory / file_name, record, is_durable=False)
        except OSError:
            log.exception("the numbers of a deleted name are not kept: retired/%s", file_name)
            return
        self._count()

    def _count(self) -> None:
        self._num_files += 1
        if self._num_files > self._max_files:
            self._forget_older_half()

    def first_number(self, file_name: str) -> int:
        """The first version number of a new name with this file name."""
        return 1 + max(self._last_number(self._directory / file_name), self._floor())

    def _floor(self) -> int:
        return _number(self._directory / _FLOOR, int)

    def _last_number(self, path: Path) -> int:
        return _number(path, lambda data: decode_name(data).current.number)

    def _forget_older_half(self) -> None:
        try:
            files = [path for path in self._directory.iterdir() if not path.name.startswith(".")]
            files.sort(key=lambda path: path.stat().st_ctime_ns)  # when it came here
            old = files[: len(files) // 2]
            floor = max(self._floor(), *map(self._last_number, old))
            replace_file(self._directory / _FLOOR, str(floor).encode())
            for path in old:
                path.unlink(missing_ok=True)
            self._num_files = len(files) - len(old)
        except OSError:
            log.exception("numbers of deleted names could not be summed up; the next deletion tries again")


def _number(path: Path, decode: Callable[[bytes], int]) -> int:
    """The number in a file, 0 if there is no file. An unreadable file is logged."""
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        refuse_shortage(error)
        log.error("the adapter store's file retired/%s is ignored: %s", path.name, error)
        return 0
