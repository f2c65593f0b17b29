"""Where commands with planted steps run, and meet the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.first_host_steps import MEETING
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "service" / "bundled" / "base"


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
        self, steps: str, *flags: str, limit: str = "300", before: tuple[str, ...] = (), **environment: str
    ) -> subprocess.Popen[str]:
        """before: what the command is started by."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MULTILORA_")}
        variables = {MEETING: str(self.directory), "PYTHONPATH": str(ROOT), "FIRST_HOST_LIMIT": limit, **environment}
        return subprocess.Popen(
            [*before, sys.executable, "-m", "tests.support.first_host_steps", steps, "--device", "cpu", *flags],
            cwd=self.directory,
            env={**kept, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
