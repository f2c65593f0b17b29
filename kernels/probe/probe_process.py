"""The process that probes ops (`child.py`), as its parent holds it.

Imports no torch: started before its parent imports torch, it does so at the same time, which takes seconds in each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kernels.child_process import ReportingChild
from kernels.probe.child import DEVICE_IS_LOST

# Importing torch and what it loads, from a slow disk, and compiling ahead.
START_SECONDS = 300.0
# For one that has said its last word to end by itself, so that its exit code is its own.
_EXIT_SECONDS = 60.0


class ProbeProcess(ReportingChild):
    """One probing process, which begins at once with what needs no request; `end` ends it.

    is_early  it is started before it is known what to ask, and gets ready meanwhile
    hung      whether it was silent for too long
    ending    how it ended, as the end of a sentence, once `lines` is exhausted
    """

    def __init__(self, *, is_early: bool = False) -> None:
        super().__init__("kernels.probe.child", *(["early"] if is_early else []))
        self.hung = False
        self.ending = ""

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def lines(self, hang_seconds: float) -> Iterator[dict[str, Any]]:
        """Lines of the process, until its end or `hang_seconds` of silence."""
        limit_seconds = START_SECONDS
        while True:
            try:
                line = self.line(limit_seconds)
            except TimeoutError:
                self.hung, self.ending = True, f"did not end within {limit_seconds:.0f} s"
                return
            if line is None:
                self.end(_EXIT_SECONDS)
                self.ending = self._describe_end()
                return
            limit_seconds = hang_seconds
            yield json.loads(line)

    def _describe_end(self) -> str:
        if self.code == DEVICE_IS_LOST:
            ending = "left the device unusable"
        elif self.code is not None and self.code < 0:
            ending = f"killed its process with signal {-self.code}"
        else:
            ending = f"ended its process with exit code {self.code}"
        return ending + self.last_words
