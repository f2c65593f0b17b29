"""A child process for untrusted input that may loop, grow or crash: it can only end itself.

The parent's side of `adapters.isolation.confinement`: one JSON line in, one JSON line out, until the input ends.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from adapters.isolation.confinement import MAX_NEW_BYTES, OUT_OF_MEMORY
from kernels.child_process import child_environment

log = logging.getLogger(__name__)

# Added to the child's niceness: where processors are short, the engine and the event loop have three times its part of
# them. Not more: people wait for its answers too, and its limits count its own time.
_LESS_PRIORITY, _MOST_NICENESS = 5, 19
# Beginnings of the variables that the child gets: it runs strangers' programs.
_ENVIRONMENT = ("PYTHON", "PATH", "LD_LIBRARY_PATH", "LANG", "LC_", "TZ")


class BoundedChild:
    """Owns the child: the first job starts it, and the next one after a job that ended it; one job runs at a time.
    Callers should wait in a thread that uploads and other chats do not need (`service.fairness.thread_pool`)."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        """module  run as `python -m module ARGUMENTS`; it calls `confinement.serve`"""
        self._arguments = ["-P", "-m", module, *arguments]
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, line: bytes) -> dict[str, Any] | int:
        """The answer to a job, one line of JSON, or the child's exit code if it ended instead. OSError if it cannot be
        started."""
        with self._lock:
            was_fresh = self._child is None
            answer = self._ask(line)
            # The child may have been killed while it was idle, and what others had left there may have been too much.
            # SIGKILL comes from outside, whatever the job does.
            if isinstance(answer, int) and answer != -signal.SIGPROF and (not was_fresh or answer == -signal.SIGKILL):
                answer = self._ask(line)
        return answer

    def close(self) -> None:
        """End the child after its current job."""
        with self._lock:
            if self._child is not None:
                self._end(self._child)

    def _ask(self, line: bytes) -> dict[str, Any] | int:
        if self._child is None:
            self._child = _start([sys.executable, *self._arguments])
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            encoded = child.stdout.readline()
        except BrokenPipeError:
            encoded = b""
        if encoded.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(encoded)
            return answer
        return self._end(child)

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        self._child = None
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
        return child.wait()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """The child knows what an interpreter needs, and the time zone; nothing but answers may come out of it."""
    environment = {name: value for name, value in child_environment().items() if name.startswith(_ENVIRONMENT)}
    # Named, the C library reads the zone once; otherwise it looks at the file again at each date.
    environment.setdefault("TZ", ":/etc/localtime")
    # numpy's threads, which nobody needs here, would have started before the child is confined.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    with contextlib.suppress(OSError):  # it has ended already
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _LESS_PRIORITY, _MOST_NICENESS)
        os.setpriority(os.PRIO_PROCESS, child.pid, niceness)
    assert child.stdout is not None
    first = child.stdout.readline()
    if first:  # else it has ended, and whoever asks it will see
        _say_missing(tuple(json.loads(first)))
    return child


@functools.cache
def _say_missing(missing: tuple[str, ...]) -> None:
    """Log missing confinement once, however many children there are."""
    if missing:
        log.warning("The processes for strangers' programs are confined, but: %s.", "; ".join(missing))


def excess_of(code: int, max_seconds: float) -> str | None:
    """The excess of a job that made the child end with this exit code, as the end of a sentence; None if the child
    ended by itself."""
    if code == -signal.SIGPROF:
        return f"takes longer than {max_seconds:g} s"
    if code == OUT_OF_MEMORY:
        return f"takes more than {MAX_NEW_BYTES >> 20} MiB of memory"
    return f"got its process killed by signal {-code}" if code < 0 else None
