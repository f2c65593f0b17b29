"""A child process for untrusted input that may loop, grow or crash: it can only end itself.

`BoundedChild` is the parent's side, `serve` the child's: one JSON line in, one JSON line out, until its input ends.
Time is bounded by a kernel timer on the child's processor time whose signal has no handler; memory by the child's
address space. Files, network and other processes are out of its reach as far as `adapters.isolation.confinement` holds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adapters.isolation.confinement import confine
from kernels.child_process import child_environment

log = logging.getLogger(__name__)

OUT_OF_MEMORY = 3  # the child's exit code
# Bytes that a child's jobs may take, all together, beside what there is at its start.
MAX_NEW_BYTES = 512 << 20
# Added to the child's niceness: where processors are short, the engine and the event loop have three times its part of
# them. Not more: people wait for its answers too, and its limits count its own time.
_LESS_PRIORITY, _MOST_NICENESS = 5, 19
# Beginnings of the variables that the child gets: it runs strangers' programs.
_ENVIRONMENT = ("PYTHON", "PATH", "LD_LIBRARY_PATH", "LANG", "LC_", "TZ")


class BoundedChild:
    """Owns the child: the first job starts it, and the next one after a job that ended it; one job runs at a time.
    Callers should wait in a thread that uploads and other chats do not need (`service.fairness.thread_pool`)."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        """module  run as `python -m module ARGUMENTS`; it calls `serve`"""
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


# ---- the child's side


def serve(answer: Callable[[bytes], dict[str, Any]], *, max_seconds: float, is_confined: bool = False) -> int:
    """Answer jobs until the parent ends, or one has taken too much. Returns the exit code, for `os._exit`: a job may
    have left little memory for the interpreter's clean-up, and there is nothing to save.

    max_seconds  of processor time for one job
    is_confined  whether jobs need neither files nor threads: then the child gives those up, and the rest of
                 `adapters.isolation.confinement`
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the parent judges them
        signal.signal(ignored, signal.SIG_IGN)
    _bound_memory()
    sys.stdout.buffer.write(json.dumps(confine() if is_confined else []).encode() + b"\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        try:
            # As it is, since the parent's other requests wait while this is read: escapes are two to six times as long.
            encoded = json.dumps(answer(line), ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
        except MemoryError:  # nobody knows what is left of the child
            return OUT_OF_MEMORY
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(encoded)
        sys.stdout.buffer.flush()
    return 0


def _bound_memory() -> None:
    """Limit the address space to MAX_NEW_BYTES more than now, and disable core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = num_pages * resource.getpagesize() + MAX_NEW_BYTES
    bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
