"""A small file system of one's own that can be filled."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk_if_allowed(directory: Path) -> Iterator[str | None]:
    """One of 16 MiB in memory, mounted there; the directory is made. Why not, where that is not allowed."""
    directory.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "multilora-test", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        refusal = done.stderr.strip() if done.returncode else None
    except OSError as error:
        refusal = str(error)
    if refusal is not None:
        yield f"NOT RUN: no disk can be mounted to be filled: {refusal}"
        return
    try:
        yield None
    finally:
        # At once for names, and in fact when nothing is open on it any more.
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """The same; skips where that is not allowed."""
    with small_disk_if_allowed(directory) as refusal:
        if refusal is not None:
            pytest.skip(refusal)
        yield


@contextlib.contextmanager
def filled(directory: Path) -> Iterator[Callable[[], None]]:
    """Nothing more can be written there, unless who writes there lets go of something; what is yielded fills it
    again."""
    filler = directory / "filler"

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass

    try:
        fill()
        yield fill
    finally:
        filler.unlink()
