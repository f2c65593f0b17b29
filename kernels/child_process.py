"""Child processes: their environment, their end with their parent, and those that report in JSON lines."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
# Parts of the names of variables that hold what no child needs: HF_TOKEN, AWS_SECRET_ACCESS_KEY and their like.
_SECRET_PARTS = frozenset({"KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS"})
# For a process that was killed to be gone; a driver may hold it back.
_END_SECONDS = 20.0
_MAX_LAST_BYTES, _MAX_LAST_CHARACTERS = 4000, 300


def child_environment() -> dict[str, str]:
    """The environment of a child: the same import path as this process, but no settings, which hold keys, and no other
    secrets. The child is passed what it needs."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: value for name, value in os.environ.items() if not _may_be_secret(name.upper())}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def ending_of(code: int | None) -> str:
    """The end of a process by its exit code, as the end of a sentence about it."""
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends; a no-op on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _may_be_secret(name: str) -> bool:
    return name.startswith("MULTILORA_") or not _SECRET_PARTS.isdisjoint(name.split("_"))


class ReportingChild:
    """`python -m module FD ARGUMENTS`: a process that reads one JSON request from stdin and writes JSON lines to the
    descriptor. It leads a session, so that all that it starts is killed with it. OSError if it cannot be started.

    pid         of the process, and of its session
    code        its exit code; None until `end`
    last_words  the last line that it printed, as " (line)", once `end` was called; "" if there is none
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(writer), *arguments],
                stdin=subprocess.PIPE,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=(writer,),
                env={**child_environment(), **(environment or {})},
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            self._printed.close()
            raise
        finally:
            os.close(writer)
        self.pid = self._process.pid
        self.code: int | None = None
        self.last_words = ""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        channel = os.fdopen(reader, errors="replace")
        self._reader = threading.Thread(target=self._read, args=(channel,), daemon=True)
        self._reader.start()

    def _read(self, channel: IO[str]) -> None:
        with channel:
            for line in channel:
                self._lines.put(line)
        self._lines.put(None)

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send its one request."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, as its exit code shows
            self._process.stdin.write(json.dumps(request).encode())
            self._process.stdin.close()

    def line(self, limit_seconds: float) -> str | None:
        """Its next line, None behind the last one. Raises TimeoutError."""
        try:
            return self._lines.get(timeout=max(limit_seconds, 0.0))
        except queue.Empty:
            raise TimeoutError from None

    def end(self, grace_seconds: float = 0.0) -> bool:
        """Kill what is left of the session after `grace_seconds` for the process to end by itself; False if it does not
        go. May be called again."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self.code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._note_last_words()
        self._reader.join(_END_SECONDS)
        return True

    def _note_last_words(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._printed.closed:
            return
        with self._printed as printed:
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - _MAX_LAST_BYTES))
            last = printed.read().decode(errors="replace").strip().rpartition("\n")[2][-_MAX_LAST_CHARACTERS:]
        self.last_words = f" ({last})" if last else ""
