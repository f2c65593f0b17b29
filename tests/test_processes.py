"""Processes that end while they are looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import children, command_line, parent


def test_a_process_that_has_just_ended_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end between two looks at /proc; the first of these, whatever there is, still finds it here."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(Path, "is_dir", lambda _path: True)
    assert children(ended.pid) == []
    assert command_line(ended.pid) == b""
    assert parent(ended.pid) == 0
