"""kill -9 at any moment leaves the whole adapter or nothing, and the store opens again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kill_at_every_file_system_operation_leaves_whole_adapters(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.kill_driver", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,  # it ends by itself; many hundreds of processes take long on a slow machine
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["deaths"] > 50
    assert result["recovery_deaths"] > 10
    assert result["states"] == result["all"], "a state of the scenario was never seen: the kills are too coarse"
