"""Errors of the operating system about the store's disk, as errors of the store."""

from __future__ import annotations

import errno
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from adapters.errors import AdapterError, StorageFull, StoreUnreachable

log = logging.getLogger(__name__)

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
