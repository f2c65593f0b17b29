"""The report's directory: one command at a time writes it, and findings survive any process that is killed.

`report.json` and `report.html` are each replaced by one rename, so that a reader, and a command that is resumed after
`kill -9`, sees a whole file or the one before. The lock is the kernel's and ends with its process.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from adapters.files.durable_files import replace_file
from service.doctor.deep_report import DeepReport, page_of, read_report

JSON_NAME, PAGE_NAME = "report.json", "report.html"
_LOCK_NAME = ".in-use"


class JournalError(Exception):
    """The directory cannot be used; one sentence."""


class Journal:
    """See the module's docstring. Use it inside `opened`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def page(self) -> Path:
        return self.directory / PAGE_NAME

    def read(self) -> DeepReport | None:
        """The report of an earlier command; None if there is none. Raises JournalError if it cannot be read."""
        path = self.directory / JSON_NAME
        try:
            return read_report(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise JournalError(f"{path} is no report of this command ({error}); name another --report-dir.") from error

    def write(self, report: DeepReport) -> None:
        """Both files. JournalError, with the files as they were, if the disk is full or the directory has gone."""
        try:
            replace_file(self.directory / JSON_NAME, report.as_json())
            replace_file(self.directory / PAGE_NAME, page_of(report).encode())
        except OSError as error:
            raise JournalError(
                f"The report cannot be written to {self.directory}: {error.strerror}. Make room, and go on with "
                "--resume; what was written before is whole."
            ) from error


@contextmanager
def opened(directory: Path) -> Iterator[Journal]:
    """A journal that no other command writes. JournalError if there is one, or the directory cannot be made."""
    lock: IO[bytes] | None = None
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = (directory / _LOCK_NAME).open("wb")
        except OSError as error:
            raise JournalError(
                f"The report's directory {directory} cannot be written: {error.strerror}; name another --report-dir."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(
                f"Another multilora doctor --deep is at work on {directory}; wait for its end. Two at a time would "
                "spoil each other's times."
            ) from error
        except OSError as error:
            raise JournalError(
                f"The report's directory {directory} cannot be locked: {error.strerror}; name another --report-dir, on "
                "a disk of this machine."
            ) from error
        yield Journal(directory)
    finally:
        if lock is not None:
            lock.close()
