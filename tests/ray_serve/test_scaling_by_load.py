"""Engines on Ray Serve that come with the load, go without it, and stand still for good. Ray has an environment: make
clients."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.support.http.server import Server, is_alive, on_ray, running_server, wait_for
from tests.support.limits import LIMIT_SECONDS
from tests.support.on_ray.checkpoints import NAMES, make_checkpoints
from tests.support.processes import command_line, descendants, parent

pytestmark = pytest.mark.wide

_ARGS = {
    "max_engines": 2,
    "tokens_per_engine": 2_000,
    "upscale_delay_seconds": 0,
    "downscale_delay_seconds": 0,
    # As long as in deploy/ray: what stands still may not be waited for so long.
    "drain_seconds": 600,
}
_FILES = {"adapter_config": "adapter_config.json", "adapter_model": "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scaling")
    make_checkpoints(root)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    settings = {"model_name": "tiny", "preload_adapters_dir": root / "adapters", "kv_bytes": "24MiB", "replicas": 1}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
        patch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
        patch.setenv("TEST_RAY_ARGS", json.dumps(_ARGS))
        yield stack.enter_context(running_server(root / "base", root / "ray", **on_ray(), **settings))


def _body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "the cat", "max_tokens": 200, "temperature": 0, "ignore_eos": True, **fields}


def _states(server: Server) -> dict[str, str]:
    states: dict[str, str] = server.get("/health").json()["replicas"]
    return states


def _text(server: Server, model: str) -> str:
    answer = server.post("/v1/completions", json=_body(model, n=8))
    assert answer.status_code == 200, answer.text
    (text,) = {choice["text"] for choice in answer.json()["choices"]}
    return str(text)


def _is_streamed_whole(server: Server) -> None:
    text = server.post("/v1/completions", json=_body("tiny", max_tokens=2_000, stream=True)).text
    assert text.endswith("data: [DONE]\n\n"), text[-500:]
    assert '"error"' not in text, text[-500:]


@contextmanager
def _again_and_again(num_clients: int, call: Any) -> Iterator[None]:
    """`call` is called with the client's number and how often it was called before; what it raises is raised here."""
    ended = Event()

    def ask(client: int) -> None:
        num_calls = 0
        while not ended.is_set():
            call(client, num_calls)
            num_calls += 1

    with ThreadPoolExecutor(num_clients) as pool:
        asking = [pool.submit(ask, client) for client in range(num_clients)]
        try:
            yield
        finally:
            ended.set()
        for one in asking:
            one.result()


def test_engines_come_with_the_load_and_go_without_it_and_no_request_fails(server: Server, root: Path) -> None:
    files = {part: (root / "uploaded" / name).read_bytes() for part, name in _FILES.items()}
    (first,) = _states(server)
    expected = {name: _text(server, name) for name in NAMES}
    assert server.http.put(f"{server.url}/v1/adapters/{NAMES[0]}/pin").status_code == 200

    def load(client: int, num_calls: int) -> None:
        name = NAMES[(client + num_calls) % len(NAMES)]
        assert _text(server, name) == expected[name]

    with _again_and_again(16, load):
        wait_for(lambda: list(_states(server).values()) == ["ready"] * 2, "the second engine")
        (joined,) = _states(server).keys() - {first}
        assert server.http.put(f"{server.url}/v1/adapters/mine", files=files).status_code == 201
        sent = f'multilora_replica_requests_total{{replica="{joined}"'
        wait_for(lambda: sent in server.get("/metrics").text, "requests for adapters at the second engine")
        # Pins are told to who joins.
        path, both = f"/v1/adapters/{NAMES[0]}", dict.fromkeys((first, joined), "device")
        wait_for(lambda: server.get(path).json()["replicas"] == both, "both to have what is pinned")
    with _again_and_again(4, lambda *_: _is_streamed_whole(server)):
        wait_for(lambda: len(_states(server)) == 1, "one engine to go")
        _is_streamed_whole(server)
    assert list(_states(server).values()) == ["ready"]
    assert {name: _text(server, name) for name in NAMES} == expected
    assert _text(server, "mine")


def test_a_replica_that_stands_still_for_good_is_killed_and_its_streams_end(server: Server) -> None:
    (engine,) = [pid for pid in descendants(server.process.pid) if b"service.engine.process" in command_line(pid)]
    (first,) = _states(server)
    with (
        httpx.Client(base_url=server.url, timeout=LIMIT_SECONDS) as http,
        http.stream("POST", "/v1/completions", json=_body("tiny", max_tokens=15_000, stream=True)) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(replica := parent(engine), signal.SIGSTOP)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["error"]["message"]
    wait_for(lambda: not is_alive(replica) and not is_alive(engine), "its processes to be gone")
    wait_for(lambda: list(_states(server).values()) == ["ready"] and first not in _states(server), "the next one")
    assert _text(server, NAMES[0])
