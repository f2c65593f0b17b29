"""Probes in a process apart, so that a kernel that kills its process, never ends or breaks the device costs a fallback.

After such an end the rest is probed by a new process, which passes over the implementation at fault.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from kernels.platform import IMPLEMENTATIONS, REGIME_OF_CASE, BackendError, Platform
from kernels.probe.child import DEVICE_IS_LOST
from kernels.probe.results import OpReport, Status, Trial
from kernels.probe.run import report_of
from kernels.probe.shapes import ProbeShapes

# A kernel's first call compiles it, which takes up to a minute on an NPU.
HANG_SECONDS = 300.0
# Importing torch and what it loads, from a slow disk.
START_SECONDS = 300.0
_ROOT = Path(__file__).resolve().parents[2]
_MAX_SAID_CHARACTERS = 300


def probe_apart(
    platform: Platform,
    device: str,
    shapes: ProbeShapes,
    *,
    num_repeats: int = 0,
    on_begin: Callable[[str, str], None] | None = None,
    hang_seconds: float = HANG_SECONDS,
) -> list[OpReport]:
    """Reports on all ops of the platform, in its order.

    device        as the probing process names it: "cuda:1"
    on_begin      told of the op and implementation that are about to be probed
    hang_seconds  without a word from the probing process, after which its implementation is said to hang

    Raises BackendError if nothing can be probed at all.
    """
    work = _Work(platform, on_begin or (lambda _op, _implementation: None))
    while work.left:
        request = {"device": device, "shapes": asdict(shapes), "ops": work.left, "num_repeats": num_repeats}
        with _Child({**request, "excluded": work.excluded()}) as child:
            for line in child.lines(hang_seconds):
                work.take(line)
        if work.left:
            work.blame(child)
    return work.reports()


class _Work:
    """What is known so far, and what a process at work was about to do."""

    def __init__(self, platform: Platform, on_begin: Callable[[str, str], None]) -> None:
        self.left = list(platform.implementations)
        self._platform = platform
        self._on_begin = on_begin
        self._trials: dict[str, list[Trial]] = {op: [] for op in platform.implementations}
        self._at_work: dict[str, str] | None = None

    def take(self, line: dict[str, Any]) -> None:
        """One line of the process. Raises BackendError for a fault of the whole probe."""
        match line:
            case {"fault": sentence}:
                raise BackendError(sentence)
            case {"begin": op, "implementation": implementation}:
                self._at_work = line
                self._on_begin(op, implementation)
            case {"trial": fields}:
                self._note(Trial(**fields))
            case {"done": op}:
                self.left.remove(op)
                self._at_work = None

    def blame(self, child: _Child) -> None:
        """The process has ended too early: what it was at has failed. Raises BackendError if it was at nothing."""
        if self._at_work is None:
            raise BackendError(f"The process that probes the ops {child.ending}.")
        op, case, implementation = (self._at_work[name] for name in ("begin", "case", "implementation"))
        found = self._trials[op]
        if not found or found[-1].implementation != implementation or found[-1].status == "ok":
            status: Status = "hung" if child.hung else "crashed"
            sentence = f"{implementation} {child.ending} in {case or 'its import'}"
            self._note(Trial(op=op, case=case, implementation=implementation, status=status, sentence=sentence))
        self._at_work = None

    def excluded(self) -> dict[str, list[str]]:
        """Implementations that have failed, by op."""
        return {op: [_spelt(trial) for trial in found if trial.status != "ok"] for op, found in self._trials.items()}

    def _note(self, trial: Trial) -> None:
        """The last word on a case: a process that goes on for another tries some of them again."""
        found = self._trials[trial.op]
        same = [one for one in found if (one.implementation, one.case) == (trial.implementation, trial.case)]
        if same:
            found[found.index(same[0])] = trial
        else:
            found.append(trial)

    def reports(self) -> list[OpReport]:
        table = IMPLEMENTATIONS[self._platform.device]
        return [report_of(op, table[op][0], self._platform, tuple(found)) for op, found in self._trials.items()]


def _spelt(trial: Trial) -> str:
    """What has failed, for `excluded` of `run.try_op`: an implementation, or one in a regime."""
    if not trial.case:
        return trial.implementation
    return f"{trial.implementation}/{REGIME_OF_CASE.get(trial.case, '')}"


class _Child:
    """One probing process. `ending` says, once `lines` is exhausted, how it ended, as the end of a sentence."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.hung = False
        self.ending = ""
        self._request = request
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> _Child:
        reader, writer = os.pipe()
        paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kernels.probe.child", str(writer)],
                stdin=subprocess.PIPE,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=(writer,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        finally:
            os.close(writer)
        self._channel = os.fdopen(reader)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already; `lines` tells
            self._process.stdin.write(json.dumps(self._request).encode())
            self._process.stdin.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()
        self._errors.close()

    def lines(self, hang_seconds: float) -> Iterator[dict[str, Any]]:
        """What the process says, up to its end or its silence for `hang_seconds`."""
        said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(said,), daemon=True).start()
        limit_seconds = START_SECONDS
        while True:
            try:
                line = said.get(timeout=limit_seconds)
            except queue.Empty:
                self.hung, self.ending = True, f"did not end within {limit_seconds:.0f} s"
                return
            if line is None:
                self.ending = self._describe_end()
                return
            limit_seconds = hang_seconds
            yield json.loads(line)

    def _read(self, said: queue.SimpleQueue[str | None]) -> None:
        for line in self._channel:
            said.put(line)
        said.put(None)

    def _describe_end(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2][-_MAX_SAID_CHARACTERS:]
        if code == DEVICE_IS_LOST:
            ending = "left the device unusable"
        elif code < 0:
            ending = f"killed its process with signal {-code}"
        else:
            ending = f"ended its process with exit code {code}"
        return f"{ending} ({last})" if last else ending
