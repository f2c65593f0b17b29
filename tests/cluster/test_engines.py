"""One server with two engines: adapters stay where they are, and an engine that is lost loses no request."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.server.own_engines import environment_of
from service.settings import SettingsError, load_settings
from service.start_check import StartError
from tests.support.http.server import Server, running_server, standing_still, wait_for
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_adapter, make_tiny_model

ADAPTERS = [f"adapter-{seed}" for seed in range(6)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("engines")
    base = make_tiny_model("llama", root / "base", max_position_embeddings=16_384)
    for seed, name in enumerate(ADAPTERS):
        make_adapter(base, root / "adapters" / name, rank=4, target_modules=["q_proj", "v_proj"], seed=seed)
    settings = {"model_name": "tiny", "preload_adapters_dir": root / "adapters", "replicas": 2, "kv_bytes": "24MiB"}
    with running_server(base, root / "server", **settings) as running:
        yield running


def _body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


def _text(server: Server, model: str) -> str:
    answer = server.post("/v1/completions", json=_body(model))
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def _replicas(server: Server) -> dict[str, Any]:
    replicas: dict[str, Any] = server.get("/health").json()["replicas"]
    return replicas


def _is_whole(server: Server) -> bool:
    return set(_replicas(server).values()) == {"ready"}


def test_each_adapter_is_on_one_engine_and_both_have_some(server: Server) -> None:
    texts = {name: {_text(server, name) for _ in range(6)} for name in ADAPTERS}
    assert all(len(one) == 1 for one in texts.values())
    assert len(set.union(*texts.values())) == len(ADAPTERS)
    places = {one["name"]: one["replicas"] for one in server.get("/v1/adapters").json()["data"]}
    assert all(list(place.values()) == ["device"] for place in places.values()), places
    assert {name for place in places.values() for name in place} == {"engine-0", "engine-1"}
    assert server.metric("replica_requests_total") == 6 * len(ADAPTERS)
    # Where adapters are is told by reports, after the fact.
    assert server.metric("replica_requests_total", tier="device") > 3 * len(ADAPTERS)
    assert server.metric("adapter_loads_total") == len(ADAPTERS)
    assert server.metric("replica_up") == 2


def test_prompts_go_where_their_beginnings_are(server: Server) -> None:
    """Requests of the base, which has no home, and all choices of a request do so too."""
    for number, model in enumerate(("tiny", "tiny", "tiny", "tiny", ADAPTERS[0], ADAPTERS[1])):
        prompt = [10 + number, *(20 + one % 200 for one in range(520 + number))]
        for turn, least in enumerate((0, 512, 512)):
            body = _body(model, prompt=prompt, n=1 + turn)
            answer = server.post("/v1/completions", json=body).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= least
            prompt = [*prompt, 7, 8, 9]


def test_a_pinned_adapter_is_on_both(server: Server) -> None:
    path = f"{server.url}/v1/adapters/{ADAPTERS[0]}/pin"
    assert server.http.put(path).status_code == 200
    both = {"engine-0": "device", "engine-1": "device"}
    wait_for(lambda: server.get(f"/v1/adapters/{ADAPTERS[0]}").json()["replicas"] == both, "both to have it")
    assert server.http.delete(path).status_code == 200


def _stream(server: Server, begun: threading.Semaphore, is_over: threading.Event) -> str:
    """A long answer of the base: its last event, "" if nothing ended it before `is_over`."""
    body = _body("tiny", max_tokens=15_000, stream=True)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT_SECONDS) as answer:
        last = ""
        for line in answer.iter_lines():
            if line and not last:
                begun.release()
            last = line if line and line != "data: [DONE]" else last
            if is_over.is_set():
                return ""
        return last


def _ask(server: Server, model: str, is_over: threading.Event) -> set[str]:
    """Short requests one after another; what came of them."""
    outcomes = set()
    with httpx.Client(timeout=LIMIT_SECONDS) as http:
        while not is_over.is_set():
            answer = http.post(f"{server.url}/v1/completions", json=_body(model, max_tokens=1))
            outcomes.add("ok" if answer.status_code == 200 else f"{answer.status_code} {answer.text}")
    return outcomes


def test_what_had_nothing_yet_is_sent_elsewhere_when_an_engine_is_killed(server: Server) -> None:
    """A stream that had begun on it ends with an error event, and full service comes back."""
    wait_for(lambda: _is_whole(server), "both engines")
    begun, is_over = threading.Semaphore(0), threading.Event()
    with ThreadPoolExecutor(6) as pool:
        try:
            streams = []
            for _ in range(2):  # one after the other: the second goes to the engine that has less to do
                streams.append(pool.submit(_stream, server, begun, is_over))
                assert begun.acquire(timeout=LIMIT_SECONDS)
            asked = [pool.submit(_ask, server, name, is_over) for name in [*ADAPTERS[:3], "tiny"]]
            num_restarts = server.metric("engine_restarts_total")
            os.kill(server.engine_pids()[0], signal.SIGKILL)
            wait_for(lambda: any(one.done() for one in streams), "the end of a stream")
            wait_for(lambda: server.metric("engine_restarts_total") > num_restarts, "the next engine")
            wait_for(lambda: _is_whole(server), "both engines")
        finally:
            is_over.set()
        ends = sorted(one.result() for one in streams)
        assert set.union(*(one.result() for one in asked)) == {"ok"}
    assert ends[0] == "", ends
    assert "was killed by signal 9" in json.loads(ends[1].removeprefix("data: "))["error"]["message"]


def test_an_engine_that_stands_still_gets_nothing_and_its_waiting_requests_go_elsewhere(server: Server) -> None:
    wait_for(lambda: _is_whole(server), "both engines")
    with standing_still(server.engine_pids()[0]), ThreadPoolExecutor(len(ADAPTERS)) as pool:
        texts = list(pool.map(lambda name: _text(server, name), ADAPTERS))
        wait_for(lambda: "silent" in _replicas(server).values(), "the engine to leave the rotation")
        assert texts == [_text(server, name) for name in ADAPTERS]
        assert server.get("/ready").status_code == 200
    wait_for(lambda: _is_whole(server), "both engines")
    assert server.metric("requests_sent_again_total") > 0


def test_streams_of_both_engines_end_whole_when_the_server_is_told_to_end(tmp_path: Path) -> None:
    base = make_tiny_model("llama", tmp_path / "base", max_position_embeddings=1024)
    settings = {"model_name": "tiny", "replicas": 2, "shutdown_limit_seconds": LIMIT_SECONDS}
    body = _body("tiny", max_tokens=400)
    with running_server(base, tmp_path / "server", **settings) as server, ExitStack() as stack:
        streams = []
        for _ in range(2):  # the second goes to the engine that has less to do
            opened = httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=None)
            lines = stack.enter_context(opened).iter_lines()
            assert next(lines).startswith("data: {")
            streams.append(lines)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        with standing_still(*server.engine_pids()):
            num_open = server.metric("num_requests_open")
            whole = pool.submit(server.post, "/v1/completions", json=body)
            wait_for(lambda: server.metric("num_requests_open") > num_open, "the request to wait for an engine")
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.get("/ready").status_code == 503, "/ready to turn")
            assert server.post("/v1/completions", json=body).status_code == 503
        for lines in streams:
            *_, last, done = [line for line in lines if line]
            assert done == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert whole.result().status_code == 200
        assert server.process.wait(LIMIT_SECONDS) == 0


def test_an_engine_that_cannot_be_started_again_is_left_out(tmp_path: Path) -> None:
    """As when its device is gone: here nobody can read the model any more."""
    base = make_tiny_model("llama", tmp_path / "base")
    with running_server(base, tmp_path / "server", model_name="tiny", replicas=2) as server:
        base.rename(tmp_path / "gone")
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        wait_for(lambda: "down" in _replicas(server).values(), "it to be given up")
        assert sorted(_replicas(server).values()) == ["down", "ready"]
        assert len({_text(server, "tiny") for _ in range(8)}) == 1
        assert server.get("/ready").status_code == server.get("/health").status_code == 200
        assert server.metric("replica_up") == 1


def test_each_engine_sees_one_device_of_those_that_the_server_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert environment_of(1) == {"CUDA_VISIBLE_DEVICES": "GPU-abc", "ASCEND_RT_VISIBLE_DEVICES": "1"}
    with pytest.raises(StartError, match=r"CUDA_VISIBLE_DEVICES names 2 devices.*3 engines"):
        environment_of(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment_of(7)["CUDA_VISIBLE_DEVICES"] == ""


def test_several_engines_on_one_named_device_are_refused() -> None:
    with pytest.raises(SettingsError, match="leave out the index"):
        load_settings(device="cuda:1", replicas=2)
