"""Commands at a real terminal: a child process on a pseudo-terminal, read until what is awaited has come."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.limits import LIMIT_SECONDS


class Terminal:
    """A process on a terminal of its own, whose Ctrl-C reaches it as a person's does."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._unread = ""

    def type(self, text: str) -> None:
        """As from the keyboard: `\\n` is Enter, `\\x03` Ctrl-C, `\\x04` Ctrl-D, `\\t` Tab."""
        os.write(self._descriptor, text.encode())

    def read_until(self, awaited: str) -> str:
        """All that was shown since the last call, to the end of `awaited`. AssertionError if it does not come."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while awaited not in self._unread:
            assert self._read(deadline), f"{awaited!r} has not come:\n{self._unread}"
        shown, self._unread = self._unread.split(awaited, 1)
        return shown + awaited

    def read_to_end(self) -> tuple[int, str]:
        """The exit code, and what else was shown."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(LIMIT_SECONDS), self._unread

    def interrupt_to_end(self) -> tuple[int, str]:
        """`read_to_end` after Ctrl-C at a prompt, and Enter behind it.

        Python's readline prints its prompt, then waits for keys; an interrupt that comes between the two is seen when
        the line is whole. Another one instead might meet an interpreter that is about to end, and kill it.
        """
        self.type("\x03\n")
        return self.read_to_end()

    def _read(self, deadline: float) -> bool:
        """Whether something came, before the process ended."""
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing came for {LIMIT_SECONDS} s after:\n{self._unread}"
        try:
            new = os.read(self._descriptor, 65536)
        except OSError:  # EIO: nobody holds the other side any more
            return False
        self._unread += new.decode(errors="replace")
        return bool(new)


@contextmanager
def terminal(command: list[str], cwd: Path, **environment: str) -> Iterator[Terminal]:
    """Run the command at a terminal; it is killed at the end if it still runs."""
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MULTILORA_")}
    process = subprocess.Popen(
        # setsid makes the terminal the controlling one, which Ctrl-C needs.
        ["setsid", "--ctty", "--wait", *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env={**kept, "TERM": "xterm", "COLUMNS": "200", **environment},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        os.close(ours)  # hangs up: who still runs gets SIGHUP
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_SECONDS)
