"""Pauses over HTTP: what stands still, what is served meanwhile, who may pause, and how a pause ends."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.tenants.edit import add_key
from service.tenants.keys_file import Scope
from tests.api.conftest import ENDLESS, Checkpoints
from tests.support.http.server import Server, running_server, wait_for
from tests.support.http.uploads import parts_of
from tests.support.limits import LIMIT_SECONDS

LONG = {**ENDLESS, "max_tokens": 400}
SHORT = {**ENDLESS, "max_tokens": 3}


@dataclass(frozen=True)
class Controlled:
    """A server with a keys file, and the key of one who may do everything."""

    server: Server
    path: Path
    admin: dict[str, str]

    def key(self, *scopes: Scope) -> dict[str, str]:
        return {"Authorization": f"Bearer {add_key(self.path, 'default', scopes)[0]}"}

    def call(self, method: str, path: str, key: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return self.server.http.request(method, self.server.url + path, headers=key or self.admin, **more)

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.call("POST", path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def pause(self, mode: str) -> None:
        assert self.post(f"/pause?mode={mode}") == {"status": "paused"}

    def resume(self) -> None:
        assert self.post("/resume") == {"status": "resumed"}

    @property
    def is_paused(self) -> bool:
        return self.call("GET", "/is_paused").json()["is_paused"]

    def metric(self, name: str) -> float:
        lines = self.call("GET", "/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    @contextmanager
    def running(self, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The choices of a stream that has had two tokens."""
        url = f"{self.server.url}/v1/completions"
        with self.server.http.stream("POST", url, headers=self.admin, json={**body, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            choices = (json.loads(line.removeprefix("data: "))["choices"][0] for line in lines)
            before = [next(choices), next(choices)]
            yield (choice for part in (before, choices) for choice in part)


@contextmanager
def controlled_server(checkpoints: Checkpoints, directory: Path, **settings: Any) -> Iterator[Controlled]:
    path = directory / "keys.toml"
    admin = {"Authorization": f"Bearer {add_key(path, 'default', ('admin',))[0]}"}
    settings |= {
        "lora_path_root": checkpoints.spare.parent,
        "keys_file": path,
        "preload_adapters_dir": checkpoints.adapters,
        "model_name": "tiny",
    }
    with running_server(checkpoints.endless_base, directory / "server", **settings) as server:
        yield Controlled(server, path, admin)


@pytest.fixture(scope="module")
def controlled(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controlled]:
    with controlled_server(checkpoints, tmp_path_factory.mktemp("control")) as made:
        yield made


@pytest.fixture(scope="module")
def unpaused(controlled: Controlled) -> tuple[str, str]:
    """The answer to LONG, and its finish_reason."""
    return whole(controlled)


@pytest.fixture(autouse=True)
def _resumed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "controlled" in request.fixturenames:
        request.getfixturevalue("controlled").resume()


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def text_of(choices: Iterator[dict[str, Any]]) -> tuple[str, str]:
    """The text of a stream, and its finish_reason."""
    parts = list(choices)
    return "".join(part["text"] for part in parts), parts[-1]["finish_reason"]


def whole(controlled: Controlled, body: dict[str, Any] = LONG) -> tuple[str, str]:
    choice = controlled.post("/v1/completions", body)["choices"][0]
    return choice["text"], choice["finish_reason"]


def queued(controlled: Controlled, clients: ThreadPoolExecutor) -> Future[tuple[str, str]]:
    """A request that has come to the paused engine."""
    before = controlled.metric("multilora_num_requests_waiting")
    asked = clients.submit(whole, controlled, SHORT)
    wait_for(lambda: controlled.metric("multilora_num_requests_waiting") == before + 1, "the request in the queue")
    return asked


def test_an_aborted_message_can_be_sent_back(controlled: Controlled) -> None:
    """In Anthropic's words it was paused: what is there goes on when it is sent back."""
    body = {"model": "alpha", "max_tokens": 15_000, "messages": [{"role": "user", "content": "the"}]}
    url, begun = f"{controlled.server.url}/v1/messages", {**body, "stream": True, "ignore_eos": True}
    with controlled.server.http.stream("POST", url, headers=controlled.admin, json=begun) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if "text_delta" in line)
        assert controlled.post("/abort_requests", {})["aborted"] == 1
        (end,) = (json.loads(line[6:]) for line in lines if '"message_delta"' in line and line.startswith("data"))
    assert end["delta"] == {"stop_reason": "pause_turn", "stop_sequence": None}


@pytest.mark.parametrize(
    ("pause", "resume"),
    [
        (("/pause?mode=keep", None), "/resume"),
        (("/pause_generation", {"mode": "in_place"}), "/continue_generation"),
        (("/pause_generation", {"mode": "retract"}), "/continue_generation"),
    ],
    ids=["keep", "in_place", "retract"],
)
def test_a_kept_request_stands_still_and_goes_on_where_it_was(
    controlled: Controlled,
    clients: ThreadPoolExecutor,
    checkpoints: Checkpoints,
    unpaused: tuple[str, str],
    pause: tuple[str, Any],
    resume: str,
) -> None:
    with controlled.running(LONG) as choices:
        controlled.post(*pause)
        assert controlled.is_paused
        # The engine may tell of its last steps after it has answered, and does with its queue.
        asked = [queued(controlled, clients)]
        num_steps = controlled.metric("multilora_engine_steps_total")
        for path in ("/health", "/ready", "/v1/models", "/v1/adapters"):
            assert controlled.call("GET", path).status_code == 200
        upload = controlled.call("PUT", "/v1/adapters/fresh", files=parts_of(checkpoints.spare))
        assert upload.status_code in (200, 201)
        asked.append(queued(controlled, clients))
        assert controlled.metric("multilora_engine_steps_total") == num_steps
        assert not any(one.done() for one in asked)
        held = controlled.metric("multilora_num_requests_running")
        assert held == (0 if pause[1] == {"mode": "retract"} else 1)
        controlled.post(resume)
        assert not controlled.is_paused
        assert text_of(choices) == unpaused
        assert [one.result()[1] for one in asked] == ["length", "length"]


def test_wait_lets_running_requests_end_and_later_ones_wait(
    controlled: Controlled, clients: ThreadPoolExecutor, unpaused: tuple[str, str]
) -> None:
    with controlled.running(LONG) as choices:
        controlled.pause("wait")
        assert text_of(choices) == unpaused
        # As above.
        asked = [queued(controlled, clients)]
        num_steps = controlled.metric("multilora_engine_steps_total")
        asked.append(queued(controlled, clients))
        assert controlled.metric("multilora_engine_steps_total") == num_steps
        controlled.resume()
        assert [one.result()[1] for one in asked] == ["length", "length"]


def test_a_wait_that_others_end_says_so(controlled: Controlled, clients: ThreadPoolExecutor) -> None:
    with controlled.running(ENDLESS):
        pausing = clients.submit(controlled.call, "POST", "/pause?wait_for_inflight_requests=true")
        wait_for(lambda: controlled.is_paused, "the pause")
        controlled.resume()
        answer = pausing.result()
        assert (answer.status_code, "resumed before" in answer.text) == (503, True)


def test_abort_ends_running_requests_with_their_text_so_far(
    controlled: Controlled, clients: ThreadPoolExecutor
) -> None:
    chat = {"model": "alpha", "max_tokens": 15_000, "ignore_eos": True}
    message = [{"role": "user", "content": "the"}]
    others = [
        clients.submit(controlled.post, "/v1/chat/completions", {**chat, "messages": message}),
        clients.submit(
            controlled.post,
            "/v1/responses",
            {"model": "alpha", "input": "the", "max_output_tokens": 15_000, "logit_bias": {"2": -100}},
        ),
    ]
    with controlled.running(ENDLESS) as choices:
        wait_for(lambda: controlled.metric("multilora_num_requests_running") == 3, "three running requests")
        controlled.pause("abort")
        text, reason = text_of(choices)
        assert text
        assert reason == "abort"
    assert others[0].result()["choices"][0]["finish_reason"] == "abort"
    response = others[1].result()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "abort"})
    asked = queued(controlled, clients)
    embedding = clients.submit(controlled.call, "POST", "/v1/embeddings", json={"input": "the"})
    wait_for(lambda: controlled.metric("multilora_num_requests_waiting") == 2, "both requests")
    controlled.post("/pause_generation", {})  # SGLang's default
    assert asked.result() == ("", "abort")
    assert embedding.result().status_code == 503
    assert controlled.metric("multilora_num_requests_running") == 0


def test_single_requests_are_ended_by_their_id(controlled: Controlled, clients: ThreadPoolExecutor) -> None:
    def ask(name: str) -> httpx.Response:
        key = {**controlled.admin, "X-Request-Id": name}
        return controlled.call("POST", "/v1/completions", key, json={**ENDLESS, "n": 2})

    asked = {name: clients.submit(ask, name) for name in ("one", "two", "three")}
    wait_for(lambda: controlled.metric("multilora_num_requests_running") == 6, "all choices")
    assert controlled.post("/abort_requests", {"request_ids": ["one", "nobody"]})["aborted"] == 1
    choices = asked["one"].result().json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
    assert controlled.post("/abort_request", {"rid": "two"})["aborted"] == 1
    assert asked["two"].result().status_code == 200
    assert controlled.call("POST", "/abort_request", json={}).status_code == 400
    assert not asked["three"].done()
    assert controlled.post("/abort_requests", {}) == {"status": "aborted", "aborted": 1}
    assert asked["three"].result().json()["choices"][0]["finish_reason"] == "abort"


def test_pausing_twice_and_resuming_the_unpaused_change_nothing(controlled: Controlled) -> None:
    for mode in ("keep", "keep", "wait", "abort"):
        controlled.pause(mode)
        assert controlled.is_paused
    for _ in range(2):
        controlled.resume()
        assert not controlled.is_paused
    assert controlled.post("/continue_generation")["status"] == "ok"
    assert whole(controlled, SHORT)[1] == "length"


@pytest.mark.parametrize("path", ["/pause?mode=now", "/pause?mod=keep", "/pause?mode=keep&mode=wait", "/resume?a=b"])
def test_a_wrong_query_is_a_bad_request_and_pauses_nothing(controlled: Controlled, path: str) -> None:
    assert controlled.call("POST", path).status_code == 400
    assert controlled.call("POST", "/pause_generation", json={"mode": "now"}).status_code == 400
    assert not controlled.is_paused


def sleeps(controlled: Controlled, path: str = "/sleep") -> bool:
    is_sleeping = bool(controlled.post(path)["is_sleeping"])
    assert controlled.call("GET", "/is_sleeping").json() == {"is_sleeping": is_sleeping}
    return is_sleeping


def refuses_what_needs_an_engine(controlled: Controlled) -> None:
    refused = [
        controlled.call("POST", "/v1/completions", json=SHORT),
        controlled.call("POST", "/v1/embeddings", json={"input": "the"}),
        controlled.call("POST", "/pause"),
        controlled.call("GET", "/ready"),
        controlled.call("GET", "/server_info"),
    ]
    assert {(one.status_code, "POST /wake_up" in one.text) for one in refused} == {(503, True)}
    assert controlled.call("GET", "/health").json()["engine"] == "asleep"
    for path in ("/v1/models", "/v1/adapters", "/metrics", "/is_paused", "/load"):
        assert controlled.call("GET", path).status_code == 200


def put(controlled: Controlled, name: str, directory: Path, query: str = "") -> None:
    assert controlled.call("PUT", f"/v1/adapters/{name}{query}", files=parts_of(directory)).status_code == 201


def test_an_engine_in_a_light_sleep_lives_on_and_reads_nothing_again(
    controlled: Controlled, checkpoints: Checkpoints, clients: ThreadPoolExecutor
) -> None:
    """With its adapters, those that are deleted meanwhile excepted; requests that came since the pause are refused."""
    for name, query in (("kept", ""), ("kept-in-memory", "?ephemeral=true"), ("unwanted", "?ephemeral=true")):
        put(controlled, name, checkpoints.spare, query)
    asked = [LONG, *({**SHORT, "model": name} for name in ("kept", "kept-in-memory"))]
    before, pids = [whole(controlled, body) for body in asked], controlled.server.engine_pids()
    restarts = controlled.metric("multilora_engine_restarts_total")
    with controlled.running(ENDLESS) as choices:
        controlled.pause("keep")
        late = clients.submit(controlled.call, "POST", "/v1/completions", json=SHORT)
        wait_for(lambda: controlled.metric("multilora_num_requests_waiting") == 1, "the request to wait")
        assert sleeps(controlled)
        assert text_of(choices)[1] == "abort"
    assert (late.result().status_code, "POST /wake_up" in late.result().text) in ((503, True), (200, False))
    assert sleeps(controlled, "/sleep?level=1&mode=wait")
    refuses_what_needs_an_engine(controlled)
    assert controlled.call("DELETE", "/v1/adapters/unwanted").status_code == 200
    put(controlled, "asleep", checkpoints.spare, "?ephemeral=true")
    assert sleeps(controlled, "/wake_up?tags=weights")
    woken = [clients.submit(controlled.post, "/wake_up?tags=kv_cache") for _ in range(2)]
    assert [one.result() for one in woken] == [{"is_sleeping": False}] * 2
    assert not controlled.is_paused
    assert [whole(controlled, body) for body in asked] == before
    assert whole(controlled, {**SHORT, "model": "asleep"}) == before[1]
    assert controlled.server.engine_pids() == pids
    assert controlled.metric("multilora_engine_restarts_total") == restarts
    for name in ("kept", "kept-in-memory", "asleep"):
        assert controlled.call("DELETE", f"/v1/adapters/{name}").status_code == 200


def test_a_light_sleep_may_become_a_deep_one(controlled: Controlled, unpaused: tuple[str, str]) -> None:
    assert sleeps(controlled)
    assert controlled.server.engine_pids() != []
    assert sleeps(controlled, "/sleep?level=2")
    assert controlled.server.engine_pids() == []
    assert sleeps(controlled, "/sleep?level=1")
    assert not sleeps(controlled, "/wake_up")
    assert whole(controlled) == unpaused


def test_an_engine_that_dies_asleep_is_started_when_it_is_woken(
    controlled: Controlled, unpaused: tuple[str, str]
) -> None:
    assert sleeps(controlled)
    (pid,) = controlled.server.engine_pids()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: controlled.server.engine_pids() == [], "its end")
    refuses_what_needs_an_engine(controlled)
    assert sleeps(controlled)
    assert not sleeps(controlled, "/wake_up")
    assert pid not in controlled.server.engine_pids()
    assert whole(controlled) == unpaused


def test_a_sleeping_engine_is_gone_until_it_is_woken(
    controlled: Controlled, clients: ThreadPoolExecutor, checkpoints: Checkpoints, unpaused: tuple[str, str]
) -> None:
    restarts = controlled.metric("multilora_engine_restarts_total")
    assert not sleeps(controlled, "/wake_up")
    pids = controlled.server.engine_pids()
    with controlled.running(ENDLESS) as choices:
        assert sleeps(controlled, "/sleep?level=2")
        assert text_of(choices)[1] == "abort"
    assert controlled.server.engine_pids() == []
    refuses_what_needs_an_engine(controlled)
    for name in ("slept", "slept-too"):
        put(controlled, name, checkpoints.spare, "?ephemeral=true" if name == "slept" else "")
    assert sleeps(controlled, "/sleep?level=2&mode=wait")
    assert sleeps(controlled, "/wake_up?tags=weights")
    assert controlled.server.engine_pids() == []
    woken = [clients.submit(controlled.post, "/wake_up?tags=kv_cache") for _ in range(2)]
    assert [one.result() for one in woken] == [{"is_sleeping": False}] * 2
    assert len(controlled.server.engine_pids()) == 1
    assert controlled.server.engine_pids() != pids
    assert whole(controlled) == unpaused
    assert whole(controlled, {**SHORT, "model": "slept"}) == whole(controlled, {**SHORT, "model": "slept-too"})
    assert controlled.metric("multilora_engine_restarts_total") == restarts + 1


@pytest.mark.parametrize(
    "path",
    ["/sleep?level=3", "/sleep?level=a", "/sleep?mode=keep", "/sleep?lvl=1", "/wake_up?tags=all", "/wake_up?a=b"],
)
def test_a_wrong_sleep_is_a_bad_request(controlled: Controlled, path: str) -> None:
    answer = controlled.call("POST", path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("level", "mode", "lvl", "tags", "tags[0]", "a")
    assert controlled.call("GET", "/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("path", "body"), [("/pause", {"mode": "keep"}), ("/sleep", {"level": 2}), ("/wake_up", {"tags": ["weights"]})]
)
def test_parameters_in_a_body_are_not_dropped(controlled: Controlled, path: str, body: dict[str, Any]) -> None:
    answer = controlled.call("POST", path, json=body)
    assert (answer.status_code, "in the query" in answer.text) == (400, True)
    assert not controlled.is_paused
    assert controlled.call("GET", "/is_sleeping").json() == {"is_sleeping": False}
    controlled.call("POST", "/wake_up", json={}).raise_for_status()


@pytest.mark.wide
def test_replicas_sleep_behind_what_runs_and_end_asleep(
    checkpoints: Checkpoints, tmp_path: Path, clients: ThreadPoolExecutor
) -> None:
    with controlled_server(checkpoints, tmp_path, replicas=2) as controlled:
        unpaused = whole(controlled)
        with controlled.running(LONG) as choices:
            asked = clients.submit(sleeps, controlled, "/sleep?mode=wait&level=2")
            assert text_of(choices) == unpaused
            assert asked.result()
        assert controlled.server.engine_pids() == []
        assert set(controlled.call("GET", "/health").json()["replicas"].values()) == {"asleep"}
        assert not sleeps(controlled, "/wake_up")
        pids = controlled.server.engine_pids()
        assert len(pids) == 2
        assert whole(controlled) == unpaused
        assert sleeps(controlled)
        assert not sleeps(controlled, "/wake_up")
        assert controlled.server.engine_pids() == pids
        assert whole(controlled) == unpaused
        assert sleeps(controlled)
        assert controlled.server.stop() == 0


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_server_that_is_to_end_resumes_what_a_pause_holds(
    checkpoints: Checkpoints, tmp_path: Path, clients: ThreadPoolExecutor, mode: str
) -> None:
    with controlled_server(checkpoints, tmp_path) as controlled:
        unpaused = whole(controlled)
        with controlled.running(LONG) as choices:
            controlled.pause("keep")
            if mode == "wait":
                pausing = clients.submit(controlled.call, "POST", "/pause?mode=wait")
                wait_for(lambda: controlled.metric("multilora_num_requests_running") == 1, "the request")
            controlled.server.process.send_signal(signal.SIGTERM)
            assert text_of(choices) == unpaused
        if mode == "wait":
            assert pausing.result().status_code in (200, 503)
        assert controlled.server.process.wait(LIMIT_SECONDS) == 0


def test_control_is_a_scope_of_its_own(controlled: Controlled) -> None:
    for scopes, status in ((("infer", "upload", "delete"), 403), (("control",), 200), (("admin",), 200)):
        key = controlled.key(*scopes)
        for path in ("/pause", "/resume", "/flush_cache", "/continue_generation", "/reset_prefix_cache"):
            assert controlled.call("POST", path, key).status_code == status
        assert controlled.call("POST", "/wake_up", key).status_code == status  # of one that does not sleep
        for path in ("/is_paused", "/server_info", "/get_world_size", "/is_sleeping"):
            assert controlled.call("GET", path, key).status_code == status
    assert controlled.call("POST", "/v1/completions", controlled.key("control"), json=SHORT).status_code == 403
    assert controlled.call("POST", "/sleep", controlled.key("infer", "upload", "delete")).status_code == 403
    assert controlled.server.http.post(f"{controlled.server.url}/pause").status_code == 401


def test_trl_s_calls_of_a_rollout_step(
    controlled: Controlled, checkpoints: Checkpoints, clients: ThreadPoolExecutor
) -> None:
    """The calls of TRL's `VLLMClient` (experimental.async_grpo) with an adapter, replayed as its published code makes
    them but for the key; the trainer itself does not run here."""
    assert controlled.call("GET", "/health").status_code == 200
    max_model_len = controlled.call("GET", "/v1/models").json()["data"][0]["max_model_len"]
    info = controlled.call("GET", "/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["model_config"]["max_model_len"] == max_model_len
    assert info["model_config"]["dtype"] == "torch.float32"
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert info["lora_config"]["max_lora_rank"] >= 16
    assert info["lora_config"]["max_loras"] >= 1
    assert controlled.call("GET", "/get_world_size").json()["world_size"] == 1
    text = controlled.call("GET", "/server_info").json()["vllm_config"]
    assert f"max_model_len={max_model_len}, tensor_parallel_size=1" in text

    load = {"lora_name": "policy-v1", "lora_path": str(checkpoints.spare), "load_inplace": False}
    assert controlled.call("POST", "/pause", params={"mode": "keep"}).status_code == 200
    assert controlled.call("POST", "/v1/load_lora_adapter", json=load).status_code == 200
    asked = clients.submit(whole, controlled, {**SHORT, "model": "policy-v1"})
    assert controlled.call("POST", "/resume").status_code == 200
    assert asked.result()[1] == "length"
    assert controlled.call("POST", "/v1/unload_lora_adapter", json={"lora_name": "policy-v1"}).status_code == 200


def generated(controlled: Controlled, model: str) -> tuple[list[int], list[float]]:
    """Tokens and log probabilities of the request that prime-rl's environments send: `generate` of renderers 0.1.12
    (renderers/client.py)."""
    sampling = {"temperature": 0, "max_tokens": 6, "stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": model, "token_ids": [5, 6, 7], "sampling_params": sampling, "cache_salt": "1"}
    (choice,) = controlled.post("/inference/v1/generate", body)["choices"]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    return choice["token_ids"], [one["logprob"] for one in content]


@pytest.mark.parametrize("route", ["/load_lora_adapter", "/skyrl/v1/load_lora_adapter"])
def test_prime_rl_s_calls_of_a_step(controlled: Controlled, checkpoints: Checkpoints, route: str) -> None:
    """The calls of prime-rl's orchestrator with an adapter, replayed as its code makes them but for the key
    (src/prime_rl/utils/client.py of 559b4477: `check_health`, `maybe_check_has_model`, `load_lora_adapter`,
    `prefill_logprobs`, `unload_lora_adapter`); the trainer itself does not run here. SkyRL's route takes the same."""
    assert controlled.call("GET", "/health").status_code == 200
    assert "tiny" in [one["id"] for one in controlled.call("GET", "/v1/models").json()["data"]]
    found, versions = [], []
    for step, directory in enumerate((checkpoints.spare, checkpoints.adapters / "alpha")):
        at_root = checkpoints.spare.parent / f"step-{step}"
        if not at_root.exists():
            shutil.copytree(directory, at_root)
        loaded = controlled.post(route, {"lora_name": "r16-a32", "lora_path": at_root.as_posix()})
        assert loaded["success"]
        versions.append(loaded["version"])
        assert controlled.call("PUT", f"/v1/adapters/same-{step}", files=parts_of(directory)).status_code < 300
        assert generated(controlled, "r16-a32") == generated(controlled, f"same-{step}")
        scoring = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
        body = {"model": "r16-a32", "token_ids": [5, 6, 7, 8], "sampling_params": scoring}
        scored = controlled.post("/inference/v1/generate", body)["prompt_logprobs"]
        # The first entry of each is what it takes for the prompt's own token.
        found.append([next(iter(one.items())) for one in scored[1:]])
        assert [token for token, _ in found[-1]] == ["6", "7", "8"]
    assert found[0] != found[1] and versions[1] == versions[0] + 1
    refused = controlled.call("POST", route, json={"lora_name": "r16-a32", "lora_path": "/etc"})
    assert refused.status_code == 403
    assert controlled.call("POST", "/v1/unload_lora_adapter", json={"lora_name": "r16-a32"}).status_code == 200


def test_verl_s_calls_of_a_step(controlled: Controlled, checkpoints: Checkpoints) -> None:
    """verl 0.9.1's calls to an SGLang server at a step with an adapter (verl/workers/rollout/sglang_rollout:
    `_update_weights` of sglang_rollout.py, AsyncHttpServerAdapter of http_server_engine.py), but for the key: its
    pickle is refused by the name of the form that is taken, and its calls work with that form."""
    name = "verl_sglang_lora"
    assert name not in [one["id"] for one in controlled.call("GET", "/v1/models").json()["data"]]
    config = json.loads((checkpoints.spare / "adapter_config.json").read_text())
    body = {"lora_name": name, "config_dict": config}
    pickled = base64.b64encode(pickle.dumps({"a.lora_A.weight": bytes(1 << 21)})).decode()
    for status, field in (
        (413, {"serialized_named_tensors": [pickled]}),
        (400, {"serialized_named_tensors": [pickled[:64]]}),
        (400, {"serialized_tensors": pickled}),
    ):
        refused = controlled.call("POST", "/load_lora_adapter_from_tensors", json={**body, **field})
        assert (refused.status_code, "safetensors in base64" in refused.text) == (status, True), refused.text
    tensors = base64.b64encode((checkpoints.spare / "adapter_model.safetensors").read_bytes()).decode()
    loaded = controlled.post("/load_lora_adapter_from_tensors", {**body, "serialized_tensors": tensors})
    assert loaded["success"]
    as_files = {"data": {"name": name}, "files": parts_of(checkpoints.spare)}
    assert controlled.call("POST", "/load_lora_adapter_from_tensors", **as_files).json() == loaded
    raw = controlled.call("POST", "/load_lora_adapter_from_tensors", content=pickle.dumps({"a": [1.0] * 9}))
    assert (raw.status_code, "safetensors in base64" in raw.text) == (400, True), raw.text
    assert controlled.call("GET", "/flush_cache").status_code == 200
    controlled.pause("keep")
    controlled.post("/continue_generation")
    assert controlled.call("PUT", "/v1/adapters/same", files=parts_of(checkpoints.spare)).status_code < 300
    assert generated(controlled, name) == generated(controlled, "same")
    assert controlled.post("/unload_lora_adapter", {"lora_name": name})["success"]


def test_art_s_calls_of_a_step(controlled: Controlled, checkpoints: Checkpoints) -> None:
    """ART 0.5.18 (art/unsloth/service.py: `_reload_adapter`, `_sleep_runtime`, `_wake_runtime`) starts a vLLM of its
    own and has a name for each step, `name@step`. Here that is a version of a name, so the load is refused."""
    load = {"lora_name": "agent@1", "lora_path": str(checkpoints.spare), "load_inplace": True}
    refused = controlled.call("POST", "/v1/load_lora_adapter", json=load)
    assert (refused.status_code, "`name@version` is one version" in refused.text) == (400, True), refused.text
    assert controlled.call("POST", "/v1/unload_lora_adapter", json={"lora_name": "agent@1"}).status_code == 404
    assert controlled.call("POST", "/sleep", params={"level": 1, "mode": "wait"}).status_code == 200
    assert controlled.call("POST", "/wake_up").status_code == 200
    assert whole(controlled, SHORT)[1] == "length"


def test_a_pause_of_a_client_that_has_died_ends_by_itself(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with controlled_server(checkpoints, tmp_path, pause_limit_seconds=0.5) as controlled:
        unpaused = whole(controlled)
        with controlled.running(LONG) as choices:
            controlled.pause("keep")
            assert text_of(choices) == unpaused
        assert not controlled.is_paused
        assert "ends by itself" in controlled.server.log


def test_all_replicas_pause_and_a_new_engine_is_not_paused(
    checkpoints: Checkpoints, tmp_path: Path, clients: ThreadPoolExecutor
) -> None:
    with controlled_server(checkpoints, tmp_path, replicas=2) as controlled:
        controlled.pause("keep")
        assert controlled.is_paused
        num_steps = controlled.metric("multilora_engine_steps_total")
        asked = [queued(controlled, clients) for _ in range(4)]
        assert controlled.metric("multilora_engine_steps_total") == num_steps
        controlled.resume()
        assert [one.result()[1] for one in asked] == ["length"] * 4
        controlled.pause("keep")
        os.kill(controlled.server.engine_pids()[0], signal.SIGKILL)
        wait_for(lambda: not controlled.is_paused, "the new engine")
