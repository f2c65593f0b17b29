"""The short form of `make test-hostile`: hostile input of all kinds, the same each time, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.targets import writes_outside
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_hostile_input_is_answered_and_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile", "--cases=240", "--runs=0", "--seed=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "2,400 cases" in done.stdout


def test_a_write_elsewhere_would_be_seen(tmp_path: Path) -> None:
    """What the hook is told by Python, as `sys.addaudithook` would."""
    hook, seen = writes_outside(tmp_path / "inside")
    for event, arguments in (
        ("open", (str(tmp_path / "inside" / "a"), "w", 0)),
        ("open", ("/etc/passwd", "r", 0)),
        ("open", (3, "w", 0)),
        ("os.remove", ("entry", 5)),
        ("os.rename", (str(tmp_path / "inside" / "a"), str(tmp_path / "inside" / "b"), -1, -1)),
    ):
        hook(event, arguments)
    assert seen == []
    for event, arguments in (
        ("open", ("/tmp/x", "wb", 0)),
        ("open", (b"/tmp/x", None, 0o101)),
        ("os.mkdir", ("/tmp/x", 511, -1)),
        ("os.rename", (str(tmp_path / "inside" / "a"), "/tmp/x", -1, -1)),
    ):
        hook(event, arguments)
    assert len(seen) == 4
