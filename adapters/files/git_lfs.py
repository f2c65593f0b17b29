"""Git LFS pointers: the small texts that `git clone` leaves in the place of files where Git LFS is not installed."""

from __future__ import annotations

from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a pointer. OSError where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER
