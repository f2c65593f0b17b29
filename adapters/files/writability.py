"""Test whether a directory can be written, by writing in it: the free space that the system reports ignores quotas."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from adapters.files.store_faults import FULL, READ_ONLY

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
