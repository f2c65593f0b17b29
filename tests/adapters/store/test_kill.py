"""kill -9 at any moment leaves the whole adapter or nothing, and the store opens again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[3]


def run(module: str, *arguments: str) -> dict[str, int]:
    """What the driver says in the end."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,  # it ends by itself; many hundreds of processes take long on a slow machine
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, int] = json.loads(done.stdout)
    return result


def test_kill_at_every_file_system_operation_leaves_whole_adapters(tmp_path: Path) -> None:
    result = run("tests.adapters.store.kill_driver", str(tmp_path))
    assert result["deaths"] > 50
    assert result["recovery_deaths"] > 10
    assert result["states"] == result["all"], "a state of the scenario was never seen: the kills are too coarse"


def test_random_kills_lose_no_version_that_was_acknowledged(tmp_path: Path) -> None:
    """The command in the driver has 200 kills."""
    result = run("tests.adapters.store.random_kills", str(tmp_path), "--kills=24")
    assert result["changes"] > 24
    assert result["as acknowledged"] > 0
    assert result["with the change under way"] > 0
