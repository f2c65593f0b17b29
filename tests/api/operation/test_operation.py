"""What operators see: OpenAPI, metrics, logs, settings and the command line."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from adapters.files.paths import MANIFEST_FILE
from service import server_version
from service.api.access.auth import Need, route_of
from service.api.http_rules import PROBE_PATHS
from service.api.metrics.metrics import Metrics
from service.cli.client import ClientError, checked, server_url
from service.cli.load_test import percentiles
from service.cli.main import main
from service.engine.ipc.messages import Stats
from service.server.app import create_app
from service.settings import Settings, SettingsError, load_settings
from tests.api.conftest import ADAPTERS, BASE, Checkpoints
from tests.support.http.server import Server, wait_for
from tests.support.http.terminal import terminal
from tests.support.http.uploads import parts_of, upload
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import LINEAR_MODULES, make_adapter

CHAT = [{"role": "user", "content": "hi"}]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def openapi(server: Server) -> dict[str, Any]:
    return server.get("/openapi.json").json()


def check_answer(openapi: dict[str, Any], method: str, path: str, answer: Any, data: Any = None) -> None:
    """The answer, or one event of it, is what OpenAPI says of this status and media type."""
    response = openapi["paths"][path][method]["responses"][str(answer.status_code)]
    content = response["content"][answer.headers["content-type"].split(";")[0]]
    if data is None:
        schema = content["schema"]
    else:
        schema = content["itemSchema"]["properties"]["data"]["anyOf"][0]["contentSchema"]
    jsonschema.validate(answer.json() if data is None else data, {**schema, "components": openapi["components"]})


SCORING = ("/classify", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
# Operation: what it can answer of its own, and what besides where API keys are set. What is wrong with one item of a
# batch is told in the item's place, with 200. 500 stands where files may be damaged, or the disk or engine fail,
# 503 also where the store may be away.
STATUSES: dict[str, tuple[str, str]] = {
    "post /v1/chat/completions": ("200 400 404 413 429 500 503", "401 403"),
    "post /v1/completions": ("200 400 404 413 429 500 503", "401 403"),
    "post /v1/chat/completions/batch": ("200 400 404 413 429 500 503", "401 403"),
    "post /v1/completions/batch": ("200 400 413 429 503", "401 403"),
    "post /inference/v1/generate": ("200 400 404 413 429 500 503", "401 403"),
    "post /invocations": ("200 400 404 413 429 500 503", "401 403"),
    "post /v1/responses": ("200 400 404 413 429 500 503", "401 403"),
    "post /v1/responses/input_tokens": ("200 400 404 413 429 500 503", "401 403"),
    "get /v1/responses/{response_id}": ("200 400 404 429 503", "401 403"),
    "delete /v1/responses/{response_id}": ("200 400 404 413 429 503", "401 403"),
    "post /v1/responses/{response_id}/cancel": ("200 400 404 413 429 503", "401 403"),
    "get /v1/responses/{response_id}/input_items": ("200 400 404 429 503", "401 403"),
    "post /v1/messages": ("200 400 404 413 429 500 503", "401 403"),
    "post /v1/messages/count_tokens": ("200 400 404 413 429 500 503", "401 403"),
    "post /v1/embeddings": ("200 400 404 413 429 500 503", "401 403"),
    **{f"post {path}": ("200 400 404 413 429 500 503", "401 403") for path in SCORING},
    "post /tokenize": ("200 400 404 413 429 500 503", "401 403"),
    "post /detokenize": ("200 400 404 413 429 500 503", "401 403"),
    "get /tokenizer_info": ("200 400 404 429 500 503", "401 403"),
    "get /v1/models": ("200 400 429", "401"),
    "get /v1/models/{model}": ("200 400 404 500 503", "401"),
    "get /v1/adapters": ("200 400 429", "401"),
    "get /v1/adapters/{name}": ("200 400 404 500 503", "401"),
    "post /v1/adapters": ("200 201 400 409 413 429 500 503 507", "401 403"),
    "put /v1/adapters/{name}": ("200 201 400 409 412 413 429 500 503 507", "401 403"),
    "patch /v1/adapters/{name}": ("200 400 404 413 429 500 503 507", "401 403"),
    "delete /v1/adapters/{name}": ("200 400 404 412 413 429 500 503 507", "401 403"),
    "get /v1/adapters/{name}/history": ("200 400 404", "401"),
    "get /v1/adapters/{name}/archive": ("200 400 404 429 500 503", "401 403"),
    "post /v1/adapters/{name}/rollback": ("200 400 404 412 413 429 500 503 507", "401 403"),
    "put /v1/adapters/{name}/pin": ("200 400 404 409 413 500 503 507", "401 403"),
    "delete /v1/adapters/{name}/pin": ("200 400 404 413 500 503 507", "401 403"),
    # 403 without keys too: where --lora-path-root is not set, and for paths outside it.
    "post /v1/load_lora_adapter": ("200 400 403 404 409 413 429 500 503 507", "401"),
    "post /load_lora_adapter": ("200 400 403 404 409 413 429 500 503 507", "401"),
    "post /skyrl/v1/load_lora_adapter": ("200 400 403 404 409 413 429 500 503 507", "401"),
    "post /v1/unload_lora_adapter": ("200 400 403 404 413 429 500 503 507", "401"),
    "post /load_lora_adapter_from_tensors": ("200 400 409 413 429 500 503 507", "401 403"),
    "post /unload_lora_adapter": ("200 400 404 413 429 500 503 507", "401 403"),
    "post /reset_prefix_cache": ("200 400 413 503", "401 403"),
    "post /flush_cache": ("200 400 413 503", "401 403"),
    "get /flush_cache": ("200 400 503", "401 403"),
    "get /server_info": ("200 400 503", "401 403"),
    "get /get_world_size": ("200 400", "401 403"),
    "post /abort_requests": ("200 400 413 503", "401 403"),
    "post /abort_request": ("200 400 413 503", "401 403"),
    "post /pause": ("200 400 413 503", "401 403"),
    "post /resume": ("200 400 413 503", "401 403"),
    "get /is_paused": ("200 400", "401 403"),
    "post /sleep": ("200 400 413 503", "401 403"),
    "post /wake_up": ("200 400 413 503", "401 403"),
    "get /is_sleeping": ("200 400", "401 403"),
    "post /pause_generation": ("200 400 413 503", "401 403"),
    "post /continue_generation": ("200 400 413 503", "401 403"),
    "get /health": ("200 503", ""),
    "get /ping": ("200 503", ""),
    "post /ping": ("200 413 503", ""),
    "get /liveness": ("200 503", ""),
    "get /ready": ("200 503", ""),
    "get /health_generate": ("200 503", ""),
    "get /version": ("200", ""),
    "get /load": ("200", "401"),
    "get /metrics": ("200 400 429", "401"),
}


WITHOUT_BODY = {
    "post /ping",
    "post /v1/responses/{response_id}/cancel",
    "post /reset_prefix_cache",
    "post /flush_cache",
    "post /pause",
    "post /resume",
    "post /sleep",
    "post /wake_up",
    "post /continue_generation",
}


class TestOpenapi:
    @pytest.mark.parametrize("keys", [(), ("a-key",)], ids=["open", "with keys"])
    def test_every_operation_tells_its_errors_and_only_real_ones(
        self, checkpoints: Checkpoints, tmp_path: Path, keys: tuple[str, ...]
    ) -> None:
        app = create_app(load_settings(model_dir=checkpoints.base, store_dir=tmp_path, api_keys=keys))
        app.state.services.store.close()
        told = {
            f"{method} {path}": operation
            for path, operations in app.openapi()["paths"].items()
            for method, operation in operations.items()
        }
        wanted = {
            name: {*always.split(), *(with_keys.split() if keys else ())}
            for name, (always, with_keys) in STATUSES.items()
        }
        assert {name: set(operation["responses"]) for name, operation in told.items()} == wanted
        for name, operation in told.items():
            assert operation["summary"]
            assert operation["description"]
            if name.startswith("post") and name not in WITHOUT_BODY:
                assert operation["requestBody"]["required"]

    def test_whatever_answers_a_get_answers_a_head_with_the_same_headers(
        self, server: Server, openapi: dict[str, Any]
    ) -> None:
        labels = {"method": "HEAD", "route": "/version", "status": "200"}
        before = server.metric("http_requests_total", **labels)
        gets = [path for path, operations in openapi["paths"].items() if "get" in operations]
        assert len(gets) >= 11
        for path in (*gets, "/", "/openapi.json", "/v1/models?prefix=nobody", "/v1/models?bad=1", "/v1/nothing"):
            url = server.url + path.format(model="alpha", name="alpha", response_id="resp_1")
            got, head = server.http.get(url), server.http.head(url)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            # Of errors the sentence names the method, and counters go up between the two.
            untold = {"date", "x-request-id"} | (
                {"content-length"} if not got.is_success or "metrics" in path else set()
            )
            told, told_alone = (
                {name: value for name, value in answer.headers.items() if name not in untold} for answer in (got, head)
            )
            assert told_alone == told, path
        refused = server.http.head(f"{server.url}/v1/completions")
        assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
        assert server.metric("http_requests_total", **labels) == before + 1

    def test_answers_are_what_it_says(self, server: Server, openapi: dict[str, Any], checkpoints: Checkpoints) -> None:
        completion = {"model": "alpha", "prompt": "the", "max_tokens": 3}
        chat = {"model": "alpha", "messages": CHAT, "max_tokens": 3}
        rich = {"n": 2, "return_token_ids": True, "stop_token_ids": [3], "prompt_logprobs": 1}
        posts: list[tuple[str, Any]] = [
            ("/v1/completions", {**completion, **rich, "logprobs": 2, "echo": True}),
            ("/v1/completions", {**completion, "max_tokens": 10**6}),
            ("/v1/completions", {**completion, "model": "nobody"}),
            ("/v1/chat/completions", {**chat, **rich, "logprobs": True, "top_logprobs": 2}),
            ("/v1/completions/batch", {"items": [completion, chat, {}]}),
            ("/v1/responses", {"model": "alpha", "input": "the", "max_output_tokens": 3, "top_logprobs": 2}),
            ("/v1/responses", {"input": "the", "store": True, "metadata": {"a": "b"}, "logit_bias": {"2": 100}}),
            ("/v1/responses", {"input": "the", "previous_response_id": "x"}),
            ("/v1/messages", {"model": "alpha", "messages": CHAT, "max_tokens": 3}),
            ("/v1/messages", {"messages": CHAT, "max_tokens": 3, "logit_bias": {"2": 100}}),
            ("/v1/messages", {"messages": CHAT}),
            ("/v1/messages", {"model": "nobody", "messages": CHAT, "max_tokens": 3}),
            ("/v1/messages/count_tokens", {"messages": CHAT}),
            ("/v1/messages/count_tokens", {"messages": []}),
            ("/v1/embeddings", {"model": "alpha", "input": ["the", "tin"]}),
            ("/v1/embeddings", {"input": [[7, 8]], "encoding_format": "base64"}),
            ("/v1/embeddings", {"input": ""}),
            ("/classify", {"model": "alpha", "input": "the"}),
            ("/pooling", {"model": "alpha", "input": ["the", "tin"], "task": "embed"}),
            ("/v1/score", {"model": "alpha", "text_1": "the", "text_2": "tin"}),
            ("/v2/rerank", {"query": "the", "documents": []}),
            ("/tokenize", {"prompt": "a", "return_token_strs": True}),
            ("/detokenize", {"tokens": [9]}),
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"}),
        ]
        for path, body in posts:
            check_answer(openapi, "post", path, server.post(path, json=body))
        for path in ("/v1/models", "/v1/adapters", *PROBE_PATHS, "/version", "/tokenizer_info"):
            check_answer(openapi, "get", path, server.get(path))
        for content in (b"", b" " * ((16 << 20) + 1)):
            check_answer(openapi, "post", "/ping", server.post("/ping", content=content))
        check_answer(openapi, "get", "/v1/models/{model}", server.get("/v1/models/alpha"))
        files = parts_of(checkpoints.adapters / "alpha")
        check_answer(openapi, "post", "/v1/adapters", server.post("/v1/adapters", data={"name": "alpha"}, files=files))
        check_answer(openapi, "post", "/v1/adapters", server.post("/v1/adapters", data={"name": "beta"}, files=files))
        missing = server.http.delete(f"{server.url}/v1/adapters/nobody")
        check_answer(openapi, "delete", "/v1/adapters/{name}", missing)

    def test_a_damaged_adapter_is_a_500_that_it_tells(
        self, server: Server, openapi: dict[str, Any], checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        damaged = make_adapter(checkpoints.base, tmp_path / "damaged", rank=2, target_modules=["q_proj"], seed=77)
        digest = upload(server, "damaged", damaged).json()["digest"]
        try:
            (manifest,) = server.store_dir.glob(f"*/adapters/{digest}/{MANIFEST_FILE}")
            manifest.write_bytes(b"{")
            for path, parameter in (("/v1/adapters", "name"), ("/v1/models", "model")):
                answer = server.get(f"{path}/damaged")
                assert (answer.status_code, answer.json()["error"]["code"]) == (500, "damaged")
                check_answer(openapi, "get", f"{path}/{{{parameter}}}", answer)
        finally:
            server.http.delete(f"{server.url}/v1/adapters/damaged").raise_for_status()

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("delete", "/v1/adapters/{name}"),
            ("post", "/v1/unload_lora_adapter"),
            ("post", "/v1/load_lora_adapter"),
        ],
    )
    def test_what_changes_adapters_tells_that_bodies_have_limits_and_that_it_may_fail(
        self, server: Server, openapi: dict[str, Any], method: str, path: str
    ) -> None:
        too_large = server.http.request(method, f"{server.url}{path}", content=b" " * ((16 << 20) + 1))
        assert too_large.status_code == 413
        check_answer(openapi, method, path, too_large)
        assert "500" in openapi["paths"][path][method]["responses"]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": "the", "logprobs": 1, "echo": True}),
            ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "return_token_ids": True}),
        ],
    )
    def test_every_event_of_a_stream_is_what_it_says(
        self, server: Server, openapi: dict[str, Any], path: str, body: dict[str, Any]
    ) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
        answer = server.post(path, json={"model": BASE, **body, **options})
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            check_answer(openapi, "post", path, answer, json.loads(event))

    def test_every_event_of_a_response_is_what_it_says(self, server: Server, openapi: dict[str, Any]) -> None:
        answer = server.post("/v1/responses", json={"input": "the", "stream": True, "max_output_tokens": 3})
        events = [line.partition("data: ")[2] for line in answer.text.split("\n\n") if line]
        for event in events:
            check_answer(openapi, "post", "/v1/responses", answer, json.loads(event))
        message = server.post("/v1/messages", json={"messages": CHAT, "stream": True, "max_tokens": 3})
        for event in message.text.strip().split("\n\n"):
            check_answer(openapi, "post", "/v1/messages", message, json.loads(event.partition("data: ")[2]))
        whole = {"$ref": "#/components/schemas/ResponseObject", "components": openapi["components"]}
        jsonschema.validate(json.loads(events[0])["response"], whole)
        jsonschema.validate(json.loads(events[-1])["response"], whole)

    def test_a_batch_holds_completions_and_chats(self, openapi: dict[str, Any]) -> None:
        schemas = openapi["components"]["schemas"]
        item = {**schemas["BatchRequest"]["properties"]["items"]["items"], "components": openapi["components"]}
        jsonschema.validate({"model": "alpha", "prompt": "a"}, item)
        jsonschema.validate({"model": "alpha", "messages": CHAT}, item)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"model": "alpha"}, item)

    def test_every_path_has_a_scope(self, openapi: dict[str, Any]) -> None:
        needs: dict[Need, set[str]] = {}
        for path, operations in openapi["paths"].items():
            for method in operations:
                route = route_of(method.upper(), path)
                assert route is not None, f"{path} is in no line of the table"
                needs.setdefault(route.need, set()).add(f"{method} {path}")
        assert needs["open"] == {"post /ping", *(f"get {path}" for path in PROBE_PATHS)}
        assert needs["upload"] == {
            "post /v1/adapters",
            "put /v1/adapters/{name}",
            "patch /v1/adapters/{name}",
            "post /v1/adapters/{name}/rollback",
            "post /load_lora_adapter_from_tensors",
        }
        assert needs["delete"] == {"delete /v1/adapters/{name}", "post /unload_lora_adapter"}
        assert needs["download"] == {"get /v1/adapters/{name}/archive"}
        assert needs["admin"] == {
            "post /v1/load_lora_adapter",
            "post /load_lora_adapter",
            "post /skyrl/v1/load_lora_adapter",
            "post /v1/unload_lora_adapter",
            "put /v1/adapters/{name}/pin",
            "delete /v1/adapters/{name}/pin",
        }
        assert needs["control"] == {
            "post /reset_prefix_cache",
            "post /flush_cache",
            "get /flush_cache",
            "post /abort_requests",
            "post /abort_request",
            "get /server_info",
            "get /get_world_size",
            "post /pause",
            "post /resume",
            "get /is_paused",
            "post /sleep",
            "post /wake_up",
            "get /is_sleeping",
            "post /pause_generation",
            "post /continue_generation",
        }
        assert all(name.startswith("get ") for name in needs["any"])


class TestMetrics:
    def test_an_adapter_s_requests_and_tokens_are_counted(self, server: Server) -> None:
        def counts() -> tuple[float, float, float]:
            return (
                server.metric("requests_total", adapter="gamma", outcome="length"),
                server.metric("prompt_tokens_total", adapter="gamma"),
                server.metric("generation_tokens_total", adapter="gamma"),
            )

        before = counts()
        body = {"model": "gamma", "prompt": "xyz", "max_tokens": 5, "ignore_eos": True, "n": 2}
        usage = server.post("/v1/completions", json=body).json()["usage"]
        after = [now - then for now, then in zip(counts(), before, strict=True)]
        assert after == [2, 2 * usage["prompt_tokens"], usage["completion_tokens"]] == [2, 6, 10]

    def test_vllm_s_names_tell_the_same(self, server: Server) -> None:
        """For dashboards: its names, labels and bounds."""
        body = {"prompt": "xyz", "max_tokens": 5, "ignore_eos": True}
        assert server.post("/v1/completions", json=body).status_code == 200
        samples = {
            (one.name, *(one.labels.get(name) for name in ("finished_reason", "le", "outcome"))): one
            for family in text_string_to_metric_families(server.get("/metrics").text)
            for one in family.samples
            if not one.labels.get("adapter")
        }

        def value(name: str, *labels: str | None) -> float:
            return samples[name, *(labels or (None, None, None))].value

        for theirs, own in (
            ("num_requests_running", "num_requests_running"),
            ("num_requests_waiting", "num_requests_waiting"),
            ("prompt_tokens_total", "all_prompt_tokens_total"),
            ("generation_tokens_total", "all_generation_tokens_total"),
            ("num_preemptions_total", "preemptions_total"),
            ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_sum"),
            ("request_time_per_output_token_seconds_count", "time_per_output_token_seconds_count"),
            ("e2e_request_latency_seconds_count", "request_seconds_count"),
            ("request_queue_time_seconds_count", "request_queue_seconds_count"),
            ("request_prefill_time_seconds_sum", "request_prefill_seconds_sum"),
            ("request_decode_time_seconds_sum", "request_decode_seconds_sum"),
            ("request_inference_time_seconds_sum", "request_inference_seconds_sum"),
            ("request_prompt_tokens_sum", "all_prompt_tokens_total"),
            ("iteration_tokens_total_count", "step_tokens_count"),
        ):
            assert value(f"vllm:{theirs}") == value(f"multilora_{own}"), theirs
            labels = samples[f"vllm:{theirs}", None, None, None].labels
            assert (labels["model_name"], labels["engine"]) == (BASE, "0")
        ended = value("vllm:request_success_total", "length", None, None)
        assert ended == value("multilora_all_requests_total", None, None, "length") > 0
        assert value("vllm:kv_cache_usage_perc") == value("multilora_kv_blocks_used") / value(
            "multilora_kv_blocks_total"
        )
        gaps = value("vllm:inter_token_latency_seconds_count")
        assert gaps == value("vllm:time_per_output_token_seconds_count") >= 4
        assert gaps == value("vllm:inter_token_latency_seconds_bucket", None, "+Inf", None)
        for name, bound in (
            ("time_to_first_token", "0.04"),
            ("inter_token_latency", "0.025"),
            ("e2e_request_latency", "0.3"),
        ):
            assert value(f"vllm:{name}_seconds_bucket", None, bound, None) >= 0
        config = samples["vllm:cache_config_info", None, None, None].labels
        assert (config["block_size"], int(config["num_gpu_blocks"])) == ("16", value("multilora_kv_blocks_total"))

    def test_a_requests_time_is_that_in_the_queue_the_prompt_and_the_answer(self, server: Server) -> None:
        parts = ("request_queue_seconds", "request_prefill_seconds", "request_decode_seconds")
        whole = ("time_to_first_token_seconds", "request_inference_seconds", "request_seconds")

        def sums() -> dict[str, float]:
            return {name: server.metric(f"{name}_sum") for name in (*parts, *whole)}

        wait_for(lambda: not server.metric("num_requests_open"), "nothing to run")
        before = sums()
        assert server.post("/v1/completions", json={"prompt": "xyz" * 9, "max_tokens": 20}).status_code == 200
        now = sums()
        seconds = {name: now[name] - before[name] for name in now}
        assert all(one > 0 for one in seconds.values()), seconds
        queue, prefill, decode = (seconds[name] for name in parts)
        assert queue + prefill == pytest.approx(seconds["time_to_first_token_seconds"])
        assert prefill + decode == pytest.approx(seconds["request_inference_seconds"])
        assert queue + prefill + decode == pytest.approx(seconds["request_seconds"])

    def test_the_load_is_what_has_not_ended(self, server: Server) -> None:
        assert server.get("/load").json() == {"server_load": server.metric("num_requests_open")}

    def test_steps_caches_and_times_are_there(self, server: Server) -> None:
        items = [{"model": name, "prompt": "the", "max_tokens": 12} for name in (BASE, *ADAPTERS)]
        assert server.post("/v1/completions/batch", json={"items": items}).status_code == 200
        wait_for(lambda: server.metric("step_adapters_sum") >= len(ADAPTERS), "the steps to be reported")
        for name in ("time_to_first_token_seconds_count", "time_per_output_token_seconds_count", "step_tokens_count"):
            assert server.metric(name) > 0
        for name in ("kv_blocks_total", "state_lines_total", "adapter_rows_total", "adapter_loads_total", "engine_up"):
            assert server.metric(name) > 0
        assert server.metric("engine_steps_eager_total", reason="no graphs on cpu") > 0
        assert server.metric("engine_steps_replayed_total") == 0
        assert server.metric("adapters", tier="store") >= len(ADAPTERS)
        assert server.metric("http_requests_total", route="/v1/completions/batch", status="200") > 0


class TestLivesOfTheEngine:
    """What /metrics shows of one engine after the other."""

    def stats(self, num_steps: int) -> Stats:
        names = ("num_waiting", "num_running", "kv_blocks_used", "state_lines_used", "rows_used", "row_bytes_used")
        gauges = dict.fromkeys((*names, "prefix_cache_host_bytes_used"), 3)
        totals = dict.fromkeys(("kv_blocks_total", "state_lines_total", "rows_total", "row_bytes_total"), 9)
        counters = dict.fromkeys(
            ("num_preemptions", "num_adapter_loads", "num_adapter_evictions", "num_lora_op_calls"), num_steps
        ) | dict.fromkeys(("num_kernel_variants", "num_kernel_variants_after_ready", "num_steps_replayed"), num_steps)
        return Stats(
            **gauges,
            **totals,
            **counters,
            num_steps=num_steps,
            num_steps_eager={"asked for": num_steps},
            num_adapters_on_device=1,
            num_adapters_on_host=2,
            steps=((4, 2, 1, 1.5),),
        )

    def shown(self, metrics: Metrics) -> dict[str, float]:
        families = text_string_to_metric_families(metrics.render().decode())
        return {
            sample.name.removeprefix("multilora_") + "".join(sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    def test_a_dead_engine_holds_nothing_and_what_it_has_done_still_counts(self) -> None:
        metrics = Metrics("base")
        metrics.take_stats(self.stats(10), 0)
        metrics.show_engine(self.stats(10), 0)
        living = self.shown(metrics)
        held = [name for name in living if name.endswith(("_used", "_waiting", "_running"))]
        held += ["kv_blocks_total", "adaptersdevice", "adaptershost"]
        assert len(held) == 10
        assert all(living[name] > 0 for name in held)
        metrics.show_engine(None, 1)
        dead = self.shown(metrics)
        assert {name: dead[name] for name in held} == dict.fromkeys(held, 0)
        assert (dead["engine_steps_total"], dead["step_tokens_count"]) == (10, 1)

    def test_totals_go_on_where_the_last_engine_ended(self) -> None:
        metrics = Metrics("base")
        counters = (
            *("engine_steps", "preemptions", "adapter_loads", "adapter_evictions", "lora_op_calls"),
            *("kernel_variants_compiled", "kernel_variants_compiled_after_ready", "engine_steps_replayed"),
        )
        for life, num_steps, total in ((0, 10, 10), (0, 12, 12), (1, 3, 15), (1, 20, 32), (3, 1, 33)):
            metrics.take_stats(self.stats(num_steps), life)
            metrics.show_engine(self.stats(num_steps), life)
            shown = self.shown(metrics)
            assert {shown[f"{name}_total"] for name in counters} == {total}
            assert shown["engine_steps_eager_totalasked for"] == total

    def test_restarts_are_those_of_the_client_also_of_engines_that_never_got_ready(self) -> None:
        metrics = Metrics("base")
        metrics.take_stats(self.stats(10), 0)
        for num_restarts in (0, 1, 2, 2):
            metrics.show_engine(None, num_restarts)
            assert self.shown(metrics)["engine_restarts_total"] == num_restarts


def test_a_request_is_one_json_line(server: Server) -> None:
    answer = server.post(
        "/v1/completions", json={"model": "beta", "prompt": "a b c", "max_tokens": 2, "ignore_eos": True}
    )
    request_id = answer.headers["x-request-id"]
    wait_for(lambda: request_id in server.log, "the line")
    lines = [line for line in server.log.splitlines() if request_id in line]
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert (line["method"], line["path"], line["status"], line["model"]) == ("POST", "/v1/completions", 200, "beta")
    assert line["completion_tokens"] == 2
    assert line["first_token_ms"] > 0
    assert "a b c" not in lines[0]


@pytest.mark.parametrize("model", [BASE, "alpha"])
def test_the_line_names_the_adapter_that_answers_whichever_field_named_it(server: Server, model: str) -> None:
    body = {"model": model, "adapter_id": "alpha", "prompt": "a", "max_tokens": 1}
    for path, sent in (("/v1/completions", body), ("/v1/completions/batch", {"items": [body]})):
        request_id = server.post(path, json=sent).headers["x-request-id"]
        wait_for(lambda request_id=request_id: request_id in server.log, "the line")
        (line,) = (json.loads(line) for line in server.log.splitlines() if request_id in line)
        assert line["model"] == "alpha"


def test_the_line_says_why_a_request_was_refused(server: Server) -> None:
    good = {"prompt": "a", "max_tokens": 1}
    for index, (path, body, error, param) in enumerate(
        [
            ("/v1/completions", {**good, "suffix": "x"}, "`suffix` is not supported by this server", "suffix"),
            ("/v1/completions", {**good, "model": "nobody"}, "The model `nobody` does not exist", "model"),
            ("/v1/nothing", {}, "There is no POST /v1/nothing here", None),
            ("/v1/completions/batch", {"items": [good, {"prompt": 3}, {}]}, "`prompt` must be a text", "prompt"),
        ]
    ):
        name = f"why-{index}"
        answer = server.post(path, json=body, headers={"X-Request-Id": name})
        (line,) = wait_for(lambda name=name: server.log_lines(name), "the line")
        assert line["status"] == answer.status_code
        assert line["error"].startswith(error)
        assert line.get("param") == param
        assert line.get("failed_items") == (2 if "items" in body else None)


def test_the_line_says_how_an_answer_ended(server: Server) -> None:
    ends = {"stop": {"logit_bias": {"2": 100}}, "length": {"ignore_eos": True}}
    for stream in (False, True):
        for reason, options in ends.items():
            name = f"ended-{reason}-{stream}"
            body = {"prompt": "a", "max_tokens": 2, "stream": stream, **options}
            assert server.post("/v1/completions", json=body, headers={"X-Request-Id": name}).status_code == 200
            (line,) = wait_for(lambda name=name: server.log_lines(name), "the line")
            assert (line["ended"], line["model"], "error" in line) == (reason, BASE, False)


def test_every_line_of_both_processes_is_json(server: Server) -> None:
    """The fixture's server logs JSON; its engine tells of the loaded model."""
    loggers = {json.loads(line)["logger"] for line in server.log.splitlines()}
    assert "service.models.loader" in loggers


class TestSettings:
    def test_each_is_described_and_frozen(self) -> None:
        assert all(field.description for field in Settings.model_fields.values())
        with pytest.raises(ValueError, match="frozen"):
            load_settings().port = 1  # type: ignore[misc]

    def test_the_base_keeps_its_name_although_the_link_to_it_is_turned_elsewhere(
        self, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        link = tmp_path / "current"
        link.symlink_to(checkpoints.base)
        settings = load_settings(model_dir=link)
        link.unlink()
        link.symlink_to(tmp_path)
        assert settings.base_name == checkpoints.base.name

    def test_flags_go_before_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MULTILORA_PORT", "1234")
        monkeypatch.setenv("MULTILORA_KV_BYTES", "2MiB")
        monkeypatch.setenv("MULTILORA_API_KEYS", "a, b")
        assert (load_settings().port, load_settings(port="99").port) == (1234, 99)
        assert load_settings().kv_bytes == 2 << 20
        assert [key.get_secret_value() for key in load_settings().api_keys] == ["a", "b"]
        assert "'a'" not in repr(load_settings())

    @pytest.mark.parametrize(
        ("given", "words"),
        [({"port": 99999}, "--port"), ({"bogus": 1}, "--bogus"), ({"max_batch_items": 5000}, "max_batch_items")],
    )
    def test_a_wrong_one_is_named(self, given: dict[str, Any], words: str) -> None:
        with pytest.raises(SettingsError, match=words):
            load_settings(**given)

    def test_origins_are_a_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MULTILORA_CORS_ORIGINS", "https://a.example, http://b:3000")
        assert load_settings().cors_origins == ("https://a.example", "http://b:3000")
        assert load_settings(cors_origins="*").cors_origins == ("*",)
        for wrong in ("a.example", "https://a.example/", "https://a/b"):
            with pytest.raises(SettingsError, match=r"cors-origins.*is no origin"):
                load_settings(cors_origins=wrong)

    @pytest.mark.parametrize("name", ["api_keys", "admin_api_keys"])
    @pytest.mark.parametrize("keys", ["", ",", " ", ", ,"])
    def test_keys_that_are_blank_leave_no_server_open(self, name: str, keys: str) -> None:
        with pytest.raises(SettingsError, match="no key"):
            load_settings(**{name: keys})

    @pytest.mark.parametrize("name", ["MULTILORA_API_KEYS", "MULTILORA_ADMIN_API_KEYS"])
    @pytest.mark.parametrize("keys", ["", ",", " "])
    def test_nor_do_variables_that_hold_none(self, name: str, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A Secret whose values are empty, say. The variable must be unset where no key is wanted."""
        monkeypatch.setenv(name, keys)
        with pytest.raises(SettingsError, match=rf"^Setting .*\({name}\): .*no key.*unset") as caught:
            load_settings()
        assert "\n" not in str(caught.value)
        given = load_settings(**{name.removeprefix("MULTILORA_").lower(): "a"})  # a flag goes before the variable
        assert (len(given.api_keys), len(given.admin_api_keys)) in ((1, 0), (0, 1))

    def test_other_variables_that_are_empty_are_as_if_unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MULTILORA_MODEL_NAME", "")
        monkeypatch.setenv("MULTILORA_PORT", "")
        assert (load_settings().model_name, load_settings().port) == (None, 8000)


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """The URL of a server that reads one request and sends these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection = listener.accept()[0]
            with connection, connection.makefile("rb") as reader:
                lines = iter(lambda: reader.readline().strip().lower(), b"")
                reader.read(next(int(line[15:]) for line in list(lines) if line.startswith(b"content-length:")))
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(LIMIT_SECONDS)


@contextmanager
def another_server(content_type: str, body: str) -> Iterator[str]:
    """The URL of a server that gives this one answer to everything, with status 200."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()
            thread.join()


HTML, JSON, EVENTS = "text/html", "application/json", "text/event-stream"
PAGE = "<html>It works!</html>"


class TestCommands:
    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "service.cli.main", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )

    def test_upload_ls_chat_bench_and_rm(self, server: Server, checkpoints: Checkpoints) -> None:
        at = f"--url={server.url}"
        uploaded = self.run("upload", str(checkpoints.spare), "--name=sent", at)
        assert (uploaded.returncode, "sent@1 is there: rank 2" in uploaded.stdout) == (0, True), uploaded.stderr
        assert "sent" in self.run("ls", at).stdout
        assert self.run("chat", "--adapter=sent", "--max-tokens=3", "hello", at).returncode == 0
        bench = self.run("bench", "--requests=4", "--max-tokens=3", "--model=sent", f"--model={BASE}", "--json=-", at)
        figures = json.loads(bench.stdout)
        assert {name: one["output_tokens"] for name, one in figures["models"].items()} == {"sent": 6, BASE: 6}
        assert self.run("rm", "sent", at).returncode == 0
        again = self.run("rm", "sent", at)
        assert (again.returncode, again.stderr) == (1, "multilora: The adapter 'sent' does not exist.\n")

    def test_an_upload_imports_nothing_slow(self, server: Server, checkpoints: Checkpoints) -> None:
        """They would take longer than the adapter."""
        arguments = ["upload", str(checkpoints.spare), "--name=light", f"--url={server.url}"]
        slow = ("httpx", "rich", "importlib.metadata", "dataclasses", "asyncio")
        code = (
            f"import sys; from service.cli.main import main; print(main({arguments}), {{*{slow}}} & {{*sys.modules}})"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        server.http.delete(f"{server.url}/v1/adapters/light").raise_for_status()
        assert done.stdout.splitlines()[-1] == "0 set()"

    def test_a_large_file_comes_whole(
        self, server: Server, checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One that is sent in blocks of its own, between the pieces of the multipart body."""
        targets = LINEAR_MODULES["lfm2"]
        large = make_adapter(checkpoints.base, tmp_path / "large", rank=512, target_modules=targets, seed=3)
        assert (large / "adapter_model.safetensors").stat().st_size > 4 << 20
        try:
            assert main(["upload", str(large), "--note=of many blocks", f"--url={server.url}"]) == 0
            assert "large@1 is there: rank 512" in capsys.readouterr().out
            assert (
                upload(server, "by-httpx", large).json()["digest"] == server.get("/v1/adapters/large").json()["digest"]
            )
            assert server.get("/v1/adapters/large/history").json()["data"][0]["note"] == "of many blocks"
        finally:
            for name in ("large", "by-httpx"):
                server.http.delete(f"{server.url}/v1/adapters/{name}")

    def test_a_server_that_refuses_before_the_end_is_heard(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It answers and closes the connection with most of the body unread."""
        (tmp_path / "sent.zip").write_bytes(bytes(32 << 20))
        body = b'{"error": {"message": "That is too large."}}'

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                head = b"HTTP/1.1 413 Too Large\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                connection.sendall(head % len(body) + body)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=refuse)
            thread.start()
            assert (
                main(["upload", str(tmp_path / "sent.zip"), f"--url=http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
            )
            thread.join()
        assert capsys.readouterr().err == "multilora: That is too large.\n"

    def test_a_proxy_of_the_environment_is_used(
        self,
        server: Server,
        checkpoints: Checkpoints,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The server itself stands in for one: it takes a whole URL for a path that it has not, and answers."""
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", server.url)
        assert main(["upload", str(checkpoints.spare), "--name=sent", "--url=http://behind.invalid"]) == 1
        said = capsys.readouterr().err
        assert said and "There is no server" not in said

    def test_a_load_shows_percentiles_and_writes_them(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        written = tmp_path / "load.json"
        loading = ["bench", "--requests=6", "--max-tokens=4", "--model=alpha", "--model=beta", f"--url={server.url}"]
        assert main([*loading, f"--json={written}"]) == 0
        shown = capsys.readouterr().out
        report = json.loads(written.read_text())
        assert (report["format"], report["load"]["requests"], list(report["models"])) == (1, 6, ["alpha", "beta"])
        for summary in (*report["models"].values(), report["all"]):
            for kind in ("first_token_ms", "between_tokens_ms", "answer_ms"):
                p50, p90, p99 = (summary[kind][percent] for percent in ("p50", "p90", "p99"))
                assert 0 <= p50 <= p90 <= p99
            assert summary["first_token_ms"]["p99"] <= summary["answer_ms"]["p99"]
        assert (report["all"]["requests"], report["all"]["output_tokens"]) == (6, 24)
        last = next(line for line in reversed(shown.splitlines()) if " all " in line)
        for kind, cell in zip(("first_token_ms", "between_tokens_ms", "answer_ms"), last.split("│")[2:], strict=False):
            figures = [float(figure) for figure in cell.split("/")]
            assert figures == pytest.approx(list(report["all"][kind].values()), rel=0.01, abs=0.01)

        # Answers of one token have nothing between tokens.
        assert main([*loading, "--max-tokens=1", "--json=-"]) == 0
        assert json.loads(capsys.readouterr().out)["all"]["between_tokens_ms"] is None

    def test_a_load_whose_json_cannot_be_written_does_not_begin(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", f"--json={tmp_path}", "--url=http://127.0.0.1:9"]) == 1
        assert capsys.readouterr().err.startswith(f"multilora: {tmp_path} cannot be written: Is a directory")

    def test_percentiles_lie_between_the_nearest_values(self) -> None:
        assert percentiles([one / 1e3 for one in range(101)]) == pytest.approx({"p50": 50, "p90": 90, "p99": 99})
        assert percentiles([0.002]) == pytest.approx({"p50": 2, "p90": 2, "p99": 2})

    def test_rm_goes_on_past_what_is_missing(
        self, server: Server, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("first", "last"):
            upload(server, name, checkpoints.spare).raise_for_status()
        assert main(["rm", "first", "nobody", "..", "last", f"--url={server.url}"]) == 1
        shown = capsys.readouterr()
        assert shown.out == "first is deleted\nlast is deleted\n"
        missing, dots = shown.err.splitlines()
        assert missing == "multilora: The adapter 'nobody' does not exist."
        assert dots.startswith("multilora: '..' is no adapter's name")
        assert {one["name"] for one in server.get("/v1/adapters").json()["data"]}.isdisjoint({"first", "last"})

    @pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "//"])
    def test_a_url_may_be_that_of_the_api(self, server: Server, end: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ls", f"--url={server.url}{end}"]) == 0
        assert main(["bench", "--requests=1", "--max-tokens=1", f"--model={BASE}", f"--url={server.url}{end}"]) == 0
        assert "alpha" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("given", "url"),
        [
            ("http://v1", "http://v1"),
            ("http://host/team/v1/", "http://host/team"),
            ("http://host/v1/models", "http://host/v1/models"),
            ("host/v1", "host"),
        ],
    )
    def test_only_the_last_part_of_a_path_is_the_api(self, given: str, url: str) -> None:
        assert server_url(given) == url

    @pytest.mark.parametrize(
        "arguments",
        [["ls", "--ur=x"], ["--versio"], ["chat", "--temp=0", "hi"], ["doctor", "--dev=cpu"], ["serve", "--por=0"]],
    )
    def test_no_flag_may_be_abbreviated(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        shown = capsys.readouterr()
        assert (shown.out, "usage: multilora" in shown.err) == ("", True)

    def test_the_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            main(["--version"])
        assert capsys.readouterr().out == f"multilora {server_version()}\n"

    def test_bars_are_for_terminals(self, server: Server, checkpoints: Checkpoints) -> None:
        uploading = ["upload", str(checkpoints.spare), "--name=sent", f"--url={server.url}"]
        loading = ["bench", "--requests=1", "--max-tokens=1", f"--model={BASE}", f"--url={server.url}"]
        try:
            for arguments, bar in ((uploading, "spare 100% of"), (loading, "100%")):
                done = self.run(*arguments)
                assert (done.returncode, done.stderr) == (0, "")
                with terminal([sys.executable, "-m", "service.cli.main", *arguments], ROOT) as at_terminal:
                    code, shown = at_terminal.read_to_end()
                assert (code, bar in shown) == (0, True), shown
        finally:
            server.http.delete(f"{server.url}/v1/adapters/sent")

    def test_a_pickle_is_refused_with_what_converts_it(
        self, server: Server, checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        directory = tmp_path / "it's old"
        directory.mkdir()
        shutil.copy(checkpoints.spare / "adapter_config.json", directory)
        torch.save(load_file(checkpoints.spare / "adapter_model.safetensors"), directory / "adapter_model.bin")
        uploading = ["upload", str(directory), "--name=converted", f"--url={server.url}"]
        assert main(uploading) == 1
        sentence, command = capsys.readouterr().err.split("\n", 1)
        assert sentence.startswith(f"multilora: {directory} has its weights in adapter_model.bin, a pickle")
        subprocess.run(["sh", "-c", command.replace("python", sys.executable, 1)], check=True, timeout=LIMIT_SECONDS)
        try:
            assert main(uploading) == 0
        finally:
            server.http.delete(f"{server.url}/v1/adapters/converted")

    @pytest.mark.parametrize(
        ("below", "said"),
        [
            (("checkpoint-10", "checkpoint-20"), "give one of those below it: {0}/checkpoint-10, {0}/checkpoint-20."),
            (("snapshots/0a1b",), "give one of those below it: {0}/snapshots/0a1b."),
            ((), "give a directory that PEFT's save_pretrained wrote."),
        ],
    )
    def test_a_directory_above_adapters_is_told_with_them(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], below: tuple[str, ...], said: str
    ) -> None:
        for name in below:
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "adapter_config.json").write_text("{}")
        assert main(["upload", str(tmp_path), "--url=http://127.0.0.1:9"]) == 1
        assert capsys.readouterr().err.endswith(f"; {said.format(tmp_path)}\n")
        assert main(["upload", str(tmp_path / "none"), "--url=http://127.0.0.1:9"]) == 1
        assert f"There is no {tmp_path / 'none'} on this machine" in capsys.readouterr().err

    def test_a_name_is_one_part_of_the_path_whatever_is_in_it(
        self, server: Server, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
    ) -> None:
        at = f"--url={server.url}"
        assert upload(server, "kept", checkpoints.spare).status_code == 201
        try:
            for name in ("kept?y", "kept#y", "kept/../kept", "", ".", ".."):
                assert main(["rm", name, at]) == 1, name
                shown = capsys.readouterr()
                assert (shown.out, shown.err.startswith("multilora: ")) == ("", True), name
            assert server.get("/v1/adapters/kept").status_code == 200
        finally:
            server.http.delete(f"{server.url}/v1/adapters/kept")

    def test_what_lies_beside_an_adapter_is_sent_too(
        self, server: Server, checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Older versions of transformers keep the chat template in tokenizer_config.json."""
        directory, at = tmp_path / "talker", f"--url={server.url}"
        shutil.copytree(checkpoints.spare, directory)
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": "TALK {{ messages[0].content }}"})
        )
        try:
            assert main(["upload", str(directory), at]) == 0
            assert server.get("/v1/adapters/talker").json()["has_chat_template"]
            (directory / "added_tokens.json").write_text(json.dumps({"<tool>": 10**6}))
            assert main(["upload", str(directory), "--name=other", at]) == 1
            assert "<tool>" in capsys.readouterr().err
        finally:
            server.http.delete(f"{server.url}/v1/adapters/talker")

    def test_a_long_name_is_listed_whole(
        self, server: Server, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
    ) -> None:
        name = "-".join(["customer-support-summariser"] * 4)
        upload(server, name, checkpoints.spare).raise_for_status()
        try:
            assert main(["ls", f"--url={server.url}"]) == 0
            table = capsys.readouterr().out
            cells = [line.replace("│", " ").split() for line in table.splitlines()]
            assert name in "".join(cell[0] for cell in cells if cell)
        finally:
            server.http.delete(f"{server.url}/v1/adapters/{name}")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["bench", "--requests=abc"], "'abc' is not a whole number of at least 1"),
            (["bench", "--requests=0"], "'0' is not a whole number of at least 1"),
            (["chat", "--temperature=hot", "hi"], "'hot' is not a finite number"),
        ],
    )
    def test_what_is_no_number_is_a_sentence(
        self, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main(arguments)
        assert words in capsys.readouterr().err

    def test_a_redirect_is_an_error(self) -> None:
        """Of a proxy in between, say; following it would send the key and the file somewhere else."""
        moved = httpx.Response(307, headers={"location": "http://127.0.0.1:9/"})
        with pytest.raises(ClientError, match="307"):
            checked(moved)

    def test_a_file_that_cannot_be_read_is_a_sentence(
        self, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(path: Path, *_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "open", refuse)
        assert main(["upload", str(checkpoints.spare), "--url=http://127.0.0.1:9"]) == 1
        assert capsys.readouterr().err.endswith("adapter_config.json cannot be read: Permission denied.\n")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["chat", "\udcff"], "The message is not UTF-8"),
            (["chat", "--adapter=\udcff", "hi"], "The adapter is not UTF-8"),
            (["rm", "kept", "\udcff"], "The name is not UTF-8"),
            (["bench", "--model=\udcff"], "The model is not UTF-8"),
            (["ls", "--api-key=schl\u00fcssel"], "The API key is not printable ASCII"),
            (["ls", "--api-key=one\ntwo"], "The API key is not printable ASCII"),
            (["ls", "--url=http://a..b"], "'http://a..b' is no URL"),
        ],
    )
    def test_what_no_request_can_hold_is_a_sentence(
        self, server: Server, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([arguments[0], f"--url={server.url}", *arguments[1:]]) == 1
        shown = capsys.readouterr()
        assert (shown.out, shown.err.startswith(f"multilora: {words}"), shown.err.count("\n")) == ("", True, 1)
        assert "two" not in shown.err, "a key is shown"

    @pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
    def test_input_that_is_not_utf_8_is_a_sentence(
        self, errors: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """How Python reads it depends on the locale."""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8", errors))
        assert main(["chat", "--adapter=x", "--url=http://127.0.0.1:9"]) == 1
        assert capsys.readouterr().err.startswith("multilora: The message is not UTF-8")

    def test_a_file_s_name_that_is_not_utf_8_is_a_sentence(
        self, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        archive = tmp_path / "\udcff.zip"
        archive.write_bytes(b"")
        assert main(["upload", str(archive), f"--url={server.url}"]) == 1
        assert "multilora: An adapter's name has 1 to 128 letters" in capsys.readouterr().err

    @pytest.mark.parametrize("value", ["nan", "inf"])
    def test_a_temperature_that_json_does_not_know_is_refused(
        self, value: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["chat", f"--temperature={value}", "hi"])
        assert f"--temperature: '{value}' is not a finite number" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "content_type", "body"),
        [
            (["ls"], HTML, PAGE),
            (["ls"], JSON, "[]"),
            (["ls"], JSON, '{"data": [{"name": "x"}]}'),
            (["rm", "x"], HTML, PAGE),
            (["rm", "x"], JSON, "{}"),
            (["chat", "hi"], HTML, PAGE),
            (["chat", "hi"], JSON, '{"data": []}'),
            (["chat", "--adapter=x", "hi"], HTML, PAGE),
            (["chat", "--adapter=x", "hi"], EVENTS, "data: hello\n\n"),
            (["chat", "--adapter=x", "hi"], EVENTS, 'data: {"choices": []}\n\n'),
            (["upload"], HTML, PAGE),
            (["upload"], JSON, "{}"),
            (["bench"], HTML, PAGE),
            (["bench"], JSON, '{"data": [1]}'),
        ],
    )
    def test_another_server_is_a_sentence(
        self,
        checkpoints: Checkpoints,
        arguments: list[str],
        content_type: str,
        body: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        with another_server(content_type, body) as url:
            path = [str(checkpoints.spare)] if arguments == ["upload"] else []
            assert main([*arguments, *path, f"--url={url}"]) == 1
        shown = capsys.readouterr()
        last = shown.err.splitlines()[-1]  # before it, the progress of an upload
        assert (shown.out, last.startswith(f"multilora: The server at {url}/")) == ("", True), shown
        assert last.endswith(" is not multilora; set --url (MULTILORA_URL) to one that is.")

    @pytest.mark.parametrize("head", ["", "HTTP/1.1 100 Continue\r\n\r\n"])
    @pytest.mark.parametrize("length", ["Content-Length: {}", "Connection: close", "transfer-encoding: Chunked"])
    def test_an_upload_reads_answers_however_they_are_framed(
        self, head: str, length: str, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = {"name": "x", "version": 3, "rank": 4, "modules": [], "bytes": 5, "digest": "0" * 64, "notes": []}
        body = json.dumps(report)
        framed = f"10;a=b\r\n{body[:16]}\r\n{len(body) - 16:X}\r\n{body[16:]}\r\n0\r\n\r\n"
        answer = f"{head}HTTP/1.1 201 Created\r\n{length.format(len(body))}\r\n\r\n"
        answer += framed if "Chunked" in length else body
        with raw_server(answer.encode()) as url:
            assert main(["upload", str(checkpoints.spare), f"--url={url}"]) == 0
        assert capsys.readouterr().out.startswith("x@3 is there: rank 4, 0 modules, 5 bytes")

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (b"", "no answer came"),
            (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP answer came"),
            (b"HTTP/1.1 201 Created\r\nContent-Le", "the answer ends in the middle"),
            (b"HTTP/1.1 201 Created\r\nContent-Length: 9\r\n\r\n{", "the answer ends in the middle"),
            (b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{", "the answer ends in the middle"),
        ],
    )
    def test_an_answer_that_breaks_off_is_a_sentence(
        self, answer: bytes, reason: str, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with raw_server(answer) as url:
            assert main(["upload", str(checkpoints.spare), f"--url={url}"]) == 1
        assert capsys.readouterr().err.endswith(f"multilora: The connection to {url} broke: {reason}.\n")

    def test_a_load_on_a_server_without_models_is_a_sentence(self, capsys: pytest.CaptureFixture[str]) -> None:
        with another_server(JSON, '{"data": []}') as url:
            assert main(["bench", f"--url={url}"]) == 1
        assert capsys.readouterr().err.startswith(f"multilora: The server at {url} has no models")

    def test_what_looks_like_markup_is_shown_as_it_is(
        self,
        server: Server,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """As tokens of chat templates do, which a server's sentence may quote."""
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        assert main(["chat", "--adapter=[/INST]", f"--url={server.url}"]) == 0
        shown = capsys.readouterr().out
        assert "[/INST] - /help lists" in shown
        assert "`[/INST]` does not exist" in shown

        assert main(["bench", "--model=[/INST]", "--requests=1", f"--url={server.url}"]) == 1
        shown_by_bench = capsys.readouterr()
        assert "[/INST]" in shown_by_bench.out
        assert "`[/INST]` does not exist" in shown_by_bench.err

        row = {"name": "[/INST]", "version": 1, "rank": 1, "bytes": 1, "state": "[/x]", "digest": "0"}
        with another_server(JSON, json.dumps({"data": [row]})) as url:
            assert main(["ls", f"--url={url}"]) == 0
        assert {"[/INST]", "[/x]"} <= set(capsys.readouterr().out.split())

        (tmp_path / "[bold].zip").write_bytes(b"")
        uploading = ["upload", str(tmp_path / "[bold].zip"), f"--url={server.url}"]
        with terminal([sys.executable, "-m", "service.cli.main", *uploading], ROOT) as at_terminal:
            at_terminal.read_until("[bold].zip")
            assert at_terminal.read_to_end()[0] == 1

    def test_no_server_is_a_sentence(self) -> None:
        done = self.run("ls", "--url=http://127.0.0.1:9")
        assert done.returncode == 1
        assert done.stderr.startswith("multilora: There is no server at http://127.0.0.1:9")
