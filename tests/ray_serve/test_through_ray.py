"""Tests of the single server, unchanged, through HAProxy and Ray Serve before two replicas: as many as time allows.

All of them: tests/ray_serve/README.md. What does not hold there, and why: `tests/support/on_ray/through_ray.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.blocks import ROOT
from tests.support.http.client_environments import environment
from tests.support.limits import LIMIT_SECONDS

pytestmark = pytest.mark.wide


@pytest.mark.parametrize(
    "chosen",
    [
        ["tests/clients/test_clients.py::test_openai[1]"],
        [f"tests/api/schema/{name}.py" for name in ("test_bad_requests", "test_bad_tools", "test_bad_constraints")]
        + [
            f"tests/api/http/test_connections.py::{name}"
            for name in ("TestFraming", "TestHeads", "TestPipelining", "TestTime")
        ]
        + ["tests/api/operation/test_operation.py::test_a_request_is_one_json_line"],
        ["tests/hostile/test_hostile.py"],
    ],
    ids=["client", "bad input", "hostile"],
)
def test_what_holds_of_one_server_holds_through_ray(chosen: list[str]) -> None:
    environment("ray")
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--tier", "all", "-n", "0", "-q", "-rxs", "-p", "no:cacheprovider", *chosen],
        cwd=ROOT,
        env={**ours, "TEST_SERVED_BY": "ray"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
