"""The image's HEALTHCHECK, run beside a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.http.server import start_server, still_loading, wait_for
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
DISCARD_PORT_PROXY = "http://127.0.0.1:9"


def _check(url: str) -> subprocess.CompletedProcess[str]:
    """As the container engine runs it, in a container that reaches the network through a proxy."""
    environment = {**os.environ, "MULTILORA_PORT": url.rsplit(":", 1)[1]}
    environment |= {"http_proxy": DISCARD_PORT_PROXY, "HTTP_PROXY": DISCARD_PORT_PROXY, "no_proxy": "", "NO_PROXY": ""}
    command = [sys.executable, str(ROOT / "deploy" / "image" / "health.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def test_healthy_once_the_model_is_loaded(tmp_path: Path) -> None:
    server = start_server(ROOT / "service" / "bundled" / "base", tmp_path, wait=False)
    try:
        with still_loading(server):
            loading = _check(server.url)
        assert loading.returncode == 1
        assert "/ready says 503" in loading.stderr
        wait_for(lambda: server.get("/ready").status_code == 200, "the model to be loaded")
        healthy = _check(server.url)
        assert healthy.returncode == 0, healthy.stderr
        assert server.stop() == 0
    finally:
        server.process.kill()
    gone = _check(server.url)
    assert gone.returncode == 1
    assert gone.stderr.startswith("unhealthy: ")
    assert "Traceback" not in gone.stderr
