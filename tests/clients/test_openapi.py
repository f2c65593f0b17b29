"""schemathesis: what /openapi.json says is how the server answers, whatever is sent and in whatever order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.blocks import ROOT, run
from tests.support.http.client_environments import environment
from tests.support.http.server import running_server
from tests.support.limits import LIMIT_SECONDS

pytestmark = pytest.mark.wide

PINS = ROOT / "tests" / "clients" / "schemathesis"
ADAPTERS = ROOT / "service" / "bundled" / "adapters"


@pytest.mark.timeout(3 * LIMIT_SECONDS)  # thousands of requests, which take 600 s where other suites have the cores
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """With keys, of which an operation may ask for one, and with all that settings turn on."""
    program = environment("schemathesis") / "bin" / "schemathesis"
    keys = {"api_keys": "user", "admin_api_keys": "admin"}
    on = {"lora_path_root": ADAPTERS, "pause_limit_seconds": 0.1, "responses_store_bytes": "1MiB"}
    with running_server(None, tmp_path, **on, **keys) as server:
        flags = ["--config-file", str(PINS / "schemathesis.toml"), "run", f"{server.url}/openapi.json"]
        server.get("/openapi.json")  # made at its first request, which schemathesis does not wait for on a busy machine
        header = ["--header", "Authorization: Bearer admin"]
        header += ["--exclude-path", "/sleep"]  # all that came later would find no engine
        variables = {"ADAPTER_DIR": str(ADAPTERS / "pig-latin"), "SCHEMATHESIS_HOOKS": str(PINS / "hooks.py")}
        print(
            run([str(program), *flags, *header], server, cwd=tmp_path, limit_seconds=2.5 * LIMIT_SECONDS, **variables)
        )
        log = server.log
    # That it came to where adapters are uploaded and asked, and was not refused at the door: the hooks have the first
    # requests be some that can only end by their length. Of metrics nothing is certain: an adapter's are folded into
    # others when it is deleted, which is one of the things that are tried.
    for call in ("POST path=/v1/adapters status=201", "DELETE path=/v1/adapters/0 status=200"):
        assert f"method={call}" in log, call
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert re.search(rf"path={path} status=200 .* model=shout .* ended=length", log), path
    for call in ("GET path=/v1/responses/", "DELETE path=/v1/responses/"):
        assert re.search(rf"method={call}resp_\S+ status=200", log), call
