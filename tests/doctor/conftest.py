"""Runs the command as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import LIMIT_SECONDS

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
