"""The processes that a test's code starts, to look at from outside."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest


def noted_children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """All that `subprocess` starts from now on, in their order."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return started
