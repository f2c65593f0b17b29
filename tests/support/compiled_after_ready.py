"""Whether any engine has compiled a kernel when it was ready, which `tests/conftest.py` asks behind each test.

Engines of this process are looked at around each of their steps: ops that a test calls itself may compile what they
like. On a device an engine is ready as soon as its kernels were asked for. Engine processes count for themselves; what
they count the API process logs, be it a server's or this one. (Nothing here asks a server: a test may count requests.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from kernels.compile_ahead import num_variants
from service.engine.engine import Engine
from service.engine.ipc import link

# Of the sentence that is logged.
COMPILED = "compiled after it was ready"

_found: list[str] = []
# What was read of each.
_logs: dict[Path, int] = {}


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if COMPILED in (said := record.getMessage()):
            _found.append(said)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Look at all engines of this process, and of the processes that it starts, within this block."""
    listener = _Listener()
    link.log.addHandler(listener)
    with pytest.MonkeyPatch.context() as patch:
        _watch_steps(patch)
        yield
    link.log.removeHandler(listener)


def watch_log(path: Path) -> None:
    """Look at what a server logs there, too."""
    _logs.setdefault(path, 0)


def take() -> list[str]:
    """What was compiled since the last call, one sentence for each time."""
    for path, start in _logs.items():
        with path.open("rb") as log:
            log.seek(start)
            lines = log.read()
        end = lines.rfind(b"\n") + 1  # the rest may still be written
        _logs[path] += end
        _found.extend(line for line in lines[:end].decode(errors="replace").splitlines() if COMPILED in line)
    found = _found.copy()
    _found.clear()
    return found


def check() -> None:
    """AssertionError if there was anything since the last call."""
    found = take()
    assert not found, found


def _watch_steps(patch: pytest.MonkeyPatch) -> None:
    asked: WeakSet[Engine] = WeakSet()
    compile_kernels, step = Engine.compile_kernels, Engine.step

    @functools.wraps(compile_kernels)
    def note_ready(engine: Engine) -> None:
        compile_kernels(engine)
        asked.add(engine)

    @functools.wraps(step)
    def count_around(engine: Engine) -> Any:
        device = engine.capacity.device
        before = num_variants(device)
        events = step(engine)
        num_new = num_variants(device) - before
        if num_new and (engine in asked or device.type == "cpu"):
            _found.append(f"step {engine.num_steps}: {num_new} variants {COMPILED}")
        return events

    patch.setattr(Engine, "compile_kernels", note_ready)
    patch.setattr(Engine, "step", count_around)
