"""Names that were deleted: one that comes back goes on behind its numbers, so that a number never tells two contents.

The file of a deleted name is moved here, which takes no room on a full disk. Of all but the newest only the largest
number is kept, for all names: what comes back, or is new, then begins behind that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from adapters.files.durable_files import refuse_shortage, sync_renamed, write_synced
from adapters.files.name_files import decode_name

MAX_FILES = 4096
# No name begins with a dot.
_FLOOR, _NEW_FLOOR = ".floor", ".floor-new"
log = logging.getLogger(__name__)


class Tombstones:
    """Callers serialise changes, as those of names. `max_files`: beyond so many the older half goes."""

    def __init__(self, directory: Path, max_files: int = MAX_FILES) -> None:
        self._directory = directory
        self._max_files = max_files
        directory.mkdir(exist_ok=True)
        self._num_files = sum(1 for _ in directory.iterdir())

    def take(self, path: Path) -> None:
        """The file of a name, away from where it is. Where it cannot be kept it is removed all the same."""
        try:
            path.rename(self._directory / path.name)
        except OSError:
            path.unlink(missing_ok=True)  # somebody else's removal of it is as good
            return
        sync_renamed(self._directory)
        self._num_files += 1
        if self._num_files > self._max_files:
            self._forget_older_half()

    def first_number(self, file_name: str) -> int:
        """Of the versions of a name that there is none of."""
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
            write_synced(self._directory / _NEW_FLOOR, str(floor).encode())
            (self._directory / _NEW_FLOOR).rename(self._directory / _FLOOR)
            sync_renamed(self._directory)
            for path in old:
                path.unlink(missing_ok=True)
            self._num_files = len(files) - len(old)
        except OSError:
            log.exception("numbers of deleted names could not be summed up; the next deletion tries again")


def _number(path: Path, decode: Callable[[bytes], int]) -> int:
    """What a file says, 0 if there is none. One that cannot be read is logged."""
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        refuse_shortage(error)
        log.error("the adapter store's file retired/%s is ignored: %s", path.name, error)
        return 0
