"""`examples/rollout/grpo.py` against a server, as a person runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.train_base import BASE_DIR
from tests.support.http.server import running_server
from tests.support.limits import LIMIT_SECONDS


@pytest.mark.wide
def test_the_reward_rises(tmp_path: Path) -> None:
    with running_server(BASE_DIR, tmp_path, kv_bytes="32MiB") as server:
        command = [sys.executable, "-m", "examples.rollout.grpo", f"--url={server.url}", "--steps=12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert max(float(one) for one in re.findall(r"distance (\S+)", done.stdout)) < 1e-4
