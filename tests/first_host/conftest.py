"""Where commands with planted steps run, and meet the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.first_host_steps import MEETING
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
# Makes what it reads from the terminal of its session, and becomes the command.
_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
BUNDLED = ROOT / "service" / "bundled" / "base"


@contextmanager
def _signals(ignored: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Children of this block begin with these signals ignored and the other endings not, whatever pytest began with."""
    before = {
        one: signal.signal(one, signal.SIG_IGN if one in ignored else signal.SIG_DFL)
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@dataclass(frozen=True)
class Meeting:
    """Where commands run, and meet the test."""

    directory: Path

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "first-host" / "report.json").read_text())
        return found

    @property
    def page(self) -> str:
        return (self.directory / "first-host" / "report.html").read_text()

    def step(self, name: str) -> dict[str, Any]:
        return next(step for step in self.report["steps"] if step["name"] == name)

    def start(
        self,
        steps: str,
        *flags: str,
        limit: str = "300",
        before: tuple[str, ...] = (),
        ignored: tuple[signal.Signals, ...] = (),
        terminal: int | None = None,
        **environment: str,
    ) -> subprocess.Popen[str]:
        """before: what the command is started by; ignored: signals that it is started to ignore; terminal: the
        descriptor of the one that is its own, in place of pipes."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MULTILORA_")}
        variables = {MEETING: str(self.directory), "PYTHONPATH": str(ROOT), "FIRST_HOST_LIMIT": limit, **environment}
        own = () if terminal is None else (sys.executable, "-c", _ON_TERMINAL)
        to = subprocess.PIPE if terminal is None else terminal
        command = (sys.executable, "-m", "tests.support.first_host_steps", steps, "--device", "cpu", *flags)
        with _signals(ignored):
            return subprocess.Popen(
                [*own, *before, *command],
                cwd=self.directory,
                env={**kept, **variables},
                stdin=terminal,
                stdout=to,
                stderr=to,
                text=True,
                start_new_session=terminal is not None,
            )

    def run(self, steps: str, *flags: str, limit: str = "300", **environment: str) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        with self.start(steps, *flags, limit=limit, **environment) as command:
            out, err = command.communicate(timeout=LIMIT_SECONDS)
        assert "Traceback" not in err, err
        return command.returncode, out, err


@pytest.fixture
def meeting(tmp_path: Path) -> Meeting:
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "begun").touch()
    return Meeting(tmp_path)
