"""Upgrades on Ray Serve under traffic, with no room for one engine more. Ray has an environment: make clients."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.support.blocks import ROOT
from tests.support.http.client_environments import environment
from tests.support.http.server import Server, on_ray, running_server, wait_for
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_tiny_model
from tests.support.processes import command_line, descendants

pytestmark = pytest.mark.wide

# Of Ray's four CPUs one is left, for the ingress and the next one: there is no room for one engine more.
_ARGS = {"drain_seconds": 600, "num_cpus": 1.5}
_DEPLOY = """
import json, sys, ray
from ray import serve
from service.ray_serve.app import RayArgs, build
ray.init(sys.argv[1], log_to_driver=False)
serve.run(build(RayArgs(**json.loads(sys.argv[2]))), name="multilora", route_prefix="/")
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("upgrade")
    for seed, name in enumerate(("first", "second")):
        make_tiny_model("llama", root / name, seed=seed)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
        patch.setenv("TEST_RAY_ARGS", json.dumps(_ARGS))
        settings = {"model_name": "tiny", "kv_bytes": "24MiB"}
        yield stack.enter_context(running_server(root / "first", root / "ray", **on_ray(), **settings))


def _deploy(server: Server, model_dir: Path) -> subprocess.CompletedProcess[str]:
    """As from another process of the cluster; ends when the application serves, or cannot."""
    raylet = next(line for line in map(command_line, descendants(server.process.pid)) if b"/raylet\0" in line)
    (address,) = (part.split(b"=")[1].decode() for part in raylet.split(b"\0") if part.startswith(b"--gcs-address="))
    its_own = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
    env = dict(line.decode().split("=", 1) for line in its_own if line)
    settings = {"model_dir": str(model_dir), "store_dir": str(server.store_dir), "model_name": "tiny"}
    args = {"settings": {**settings, "kv_bytes": "24MiB"}, "engines": 2, **_ARGS}
    command = [str(environment("ray") / "bin" / "python"), "-c", _DEPLOY, address, json.dumps(args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def _text(server: Server) -> str:
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@contextmanager
def _asked_meanwhile(server: Server) -> Iterator[list[str]]:
    """Texts of all answers, none of which may fail; complete on leaving."""
    texts: list[str] = []
    ended = Event()

    def ask() -> None:
        while not ended.is_set():
            texts.append(_text(server))

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            yield texts
        finally:
            ended.set()
        for one in asking:
            one.result()


def _states(server: Server) -> dict[str, Any]:
    states: dict[str, Any] = server.get("/health").json()["replicas"]
    return states


def test_a_model_that_cannot_be_read_is_refused_before_anything_is_stopped(server: Server, root: Path) -> None:
    before = _states(server)
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text('{"model_type": "unheard-of"}')
    for name, said in (("broken", "unheard-of"), ("nowhere", "config.json")):
        done = _deploy(server, root / name)
        assert done.returncode != 0 and said in done.stderr, done.stderr
    assert _states(server) == before
    assert list(before.values()) == ["ready"] * 2


def test_another_model_takes_over_and_no_answer_is_of_neither(server: Server, root: Path) -> None:
    before = _text(server)
    with _asked_meanwhile(server) as texts:
        done = _deploy(server, root / "second")
        assert done.returncode == 0, done.stderr
        wait_for(lambda: list(_states(server).values()) == ["ready"] * 2, "both engines of the new model")
    after = _text(server)
    assert {*texts} == {before, after} and before != after, {*texts}


def test_an_ingress_that_cannot_start_leaves_the_one_before(server: Server, root: Path) -> None:
    """What its model lacks nobody has seen: Ray gives it up after three attempts. That ingress keeps the last of its
    engines, which Ray counts as going: another upgrade would wait until drain_seconds are over."""
    make_tiny_model("llama", root / "without", seed=2)
    (root / "without" / "tokenizer.json").unlink()
    expected = _text(server)
    with _asked_meanwhile(server) as texts:
        done = _deploy(server, root / "without")
        assert done.returncode != 0, done.stderr
    assert {*texts} == {expected}
