"""Runs the command as a person would, also with planted steps that meet the tests."""

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

from tests.support.limits import LIMIT_SECONDS
from tests.support.planted_checks import MEETING

ROOT = Path(__file__).resolve().parents[2]
BROKEN_OPS = ROOT / "tests" / "support" / "broken_ops"
BUNDLED = ROOT / "service" / "bundled" / "base"


@dataclass(frozen=True)
class Visit:
    """What `multilora doctor` said. `report` is empty without --json."""

    code: int
    out: str
    err: str
    report: dict[str, Any]

    def codes(self) -> dict[str, str]:
        """Code of each finding, and its level."""
        return {finding["code"]: finding["level"] for finding in self.report["findings"]}

    def ops(self) -> dict[str, dict[str, Any]]:
        return {op["op"]: op for op in self.report["sections"]["ops"]["ops"]}


def visit(*arguments: str, work_dir: Path, path: Path | None = None, as_json: bool = True, **environment: str) -> Visit:
    """Run the doctor in an empty directory with few variables set. `path` is put on PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MULTILORA_", "PYTORCH_"))}
    paths = os.pathsep.join(str(one) for one in (path, ROOT) if one is not None)
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", "doctor", *arguments, *(["--json"] if as_json else [])],
        cwd=work_dir,
        env={**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Visit(done.returncode, done.stdout, done.stderr, json.loads(done.stdout) if as_json else {})


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    return tmp_path


# Makes what it reads from the terminal of its session, and becomes the command.
_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


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
        found: dict[str, Any] = json.loads((self.directory / "doctor-report" / "report.json").read_text())
        return found

    @property
    def page(self) -> str:
        return (self.directory / "doctor-report" / "report.html").read_text()

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
        variables = {MEETING: str(self.directory), "PYTHONPATH": str(ROOT), "DOCTOR_LIMIT": limit, **environment}
        own = () if terminal is None else (sys.executable, "-c", _ON_TERMINAL)
        to = subprocess.PIPE if terminal is None else terminal
        command = (sys.executable, "-m", "tests.support.planted_checks", steps, "--device", "cpu", *flags)
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
