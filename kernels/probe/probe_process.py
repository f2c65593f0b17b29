"""The process that probes ops (`child.py`), as its parent holds it.

Imports no torch: started before its parent imports torch, it does so at the same time, which takes seconds in each.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernels.probe.child import DEVICE_IS_LOST

# Importing torch and what it loads, from a slow disk, and compiling ahead.
START_SECONDS = 300.0
_ROOT = Path(__file__).resolve().parents[2]
_MAX_SAID_CHARACTERS = 300


class ProbeProcess:
    """One probing process, which begins at once with what needs no request; `close` ends it.

    is_early  it is started before it is known what to ask, and gets ready meanwhile
    hung      whether it was silent for too long
    ending    how it ended, as the end of a sentence, once `lines` is exhausted
    """

    def __init__(self, *, is_early: bool = False) -> None:
        self.hung = False
        self.ending = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close
        reader, writer = os.pipe()
        paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kernels.probe.child", str(writer), *(["early"] if is_early else [])],
                stdin=subprocess.PIPE,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=(writer,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        finally:
            os.close(writer)
        self._channel = os.fdopen(reader)

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, whatever it does. May be called again."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._channel.close()
        self._errors.close()

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send its one request, which `child.py` describes."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already; `lines` reports that
            self._process.stdin.write(json.dumps(request).encode())
            self._process.stdin.close()

    def lines(self, hang_seconds: float) -> Iterator[dict[str, Any]]:
        """Lines of the process, until its end or `hang_seconds` of silence."""
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
