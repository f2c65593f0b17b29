"""One step in a process of its own: whatever it does, crash, hang or flood its output, costs that step alone.

The process is the leader of a session, so that everything it starts is killed with it. It dies with this process, by
the kernel's parent-death signal (see `step_process.py`), so that no killed process leaves a device in use.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import IO, Any

from adapters.isolation.child_process import child_environment
from service.doctor.deep_report import Fault, Outcome
from service.doctor.plan import Step

_MAX_SAID_BYTES = 4000
_MAX_SENTENCE_CHARACTERS = 300
# For a process that was killed to be gone; a driver may hold it back.
_END_SECONDS = 20.0
# For one that has said its last word to end by itself, so that its exit code is its own.
_EXIT_SECONDS = 10.0


def run_step(
    step: Step, request: Mapping[str, Any], outcome: Outcome, limit_seconds: float, tell: Callable[[str], None]
) -> None:
    """Fill in the outcome: status, reason, facts, faults, seconds. Raises nothing that the step has done.

    request  what `step_process.py` reads, beside the step's own
    tell     shows what is being done, in a few words
    """
    started = time.monotonic()
    outcome.status, outcome.reason, outcome.facts, outcome.faults = "running", None, {}, []
    asked = {**request, "step": step.name, "work": step.work, "devices": step.devices, "changed": dict(step.options)}
    with ExitStack() as stack:
        try:
            said = stack.enter_context(tempfile.TemporaryFile())
            child = _Child(asked, {**child_environment(), **step.environment}, said)
        except OSError as error:  # no temporary directory has room, or there are too many processes
            outcome.status, outcome.reason = "crashed", f"its process could not be started ({error.strerror})"
            return
        try:
            _follow(child, outcome, started + limit_seconds, tell)
        finally:
            is_gone = child.end()
            outcome.seconds = round(time.monotonic() - started, 1)
        if outcome.status == "running":
            outcome.status, outcome.reason = "crashed", child.ending(said)
        elif outcome.status == "timed out":
            outcome.reason = f"did not end within {limit_seconds:.0f} s, and was killed{child.last_words(said)}"
    if not is_gone:
        outcome.reason = f"{outcome.reason}; its process {child.pid} does not end even so"


class _Child:
    def __init__(self, request: Mapping[str, Any], environment: Mapping[str, str], said: IO[bytes]) -> None:
        reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.doctor.checks.step_process", str(writer)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=(writer,),
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        self.pid = self._process.pid
        self._channel = os.fdopen(reader, errors="replace")
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, as its exit code shows
            self._process.stdin.write(json.dumps(request).encode())
            self._process.stdin.close()

    def _read(self) -> None:
        with suppress(ValueError):  # closed by `end`
            for line in self._channel:
                self.lines.put(line)
        self.lines.put(None)

    def end(self) -> bool:
        """Kill what is left of the session; False if the process does not go."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ending(self, said: IO[bytes]) -> str:
        """How it ended, with its last words."""
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return how + self.last_words(said)

    def last_words(self, said: IO[bytes]) -> str:
        size = said.seek(0, os.SEEK_END)
        said.seek(max(0, size - _MAX_SAID_BYTES))
        last = said.read().decode(errors="replace").strip().rpartition("\n")[2][-_MAX_SENTENCE_CHARACTERS:]
        return f" ({last})" if last else ""


def _follow(child: _Child, outcome: Outcome, deadline: float, tell: Callable[[str], None]) -> None:
    """Read the process's reports, up to the last one, its end or the deadline."""
    while True:
        try:
            line = child.lines.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            outcome.status = "timed out"
            return
        if line is None:
            with suppress(subprocess.TimeoutExpired):  # its exit code, before it is killed for good measure
                child._process.wait(_EXIT_SECONDS)
            return
        if _take(line, outcome, tell):
            return


def _take(line: str, outcome: Outcome, tell: Callable[[str], None]) -> bool:
    """One line of the process; True for its last. What is no line of the protocol is passed over."""
    try:
        word = json.loads(line)
    except ValueError:
        return False
    match word:
        case {"tell": str(text)}:
            tell(text)
        case {"facts": dict(facts)}:
            outcome.facts = {**outcome.facts, **facts}
        case {"fault": dict(fault)}:
            outcome.faults = [*outcome.faults, Fault(step=outcome.name, **fault)]
        case {"end": status, "reason": reason}:
            outcome.status, outcome.reason = status, reason
            return True
    return False
