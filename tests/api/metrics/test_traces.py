"""Traces: a real server sends them to a collector in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.datastructures import Headers

from service import server_version
from service.api.metrics.metrics import Metrics, SequenceTimer
from service.api.metrics.traces import Answered, Ended, Tracing
from service.settings import BUNDLED_ADAPTERS_DIR, SettingsError, load_settings
from tests.support.http.collector import Collector, Span, collecting
from tests.support.http.server import Server, posted, running_server, wait_for
from tests.support.http.uploads import parts_of, upload
from tests.support.limits import LIMIT_SECONDS

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
COMPLETED = "text_completion base"
METRICS = Metrics("base")
ENDLESS = {"model": "base", "prompt": "lamp", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with collecting() as running:
        yield running


def tracing_to(collector: Collector) -> Tracing:
    return Tracing(f"{collector.url}/v1/traces")


def end_one(tracing: Tracing, headers: dict[str, str] | None = None, timers: int = 0) -> str:
    """A request that comes and is over; its trace's id."""
    trace = tracing.begin("POST", "/v1/completions", Headers(headers or {}))
    assert trace is not None
    made = [SequenceTimer(METRICS, "base", 3) for _ in range(timers)]
    for timer in made:
        timer.token(0.0)
        timer.end("stop")
    answers = [Answered({"gen_ai.operation.name": "text_completion", "gen_ai.request.model": "base"}, made)]
    tracing.end(Ended(trace, {"http.request.method": "POST"}, answers, [], time.perf_counter()))
    return trace.trace_id


# ---- without a server


@pytest.mark.parametrize(
    ("traceparent", "is_kept"),
    [
        (TRACEPARENT, True),
        (f"01-{TRACE}-{PARENT}-01-later", True),
        (f"00-{TRACE}-{PARENT}-01-more", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        ("x" * 60_000, False),
        (f"00-{TRACE}-{PARENT}-01" + "-x" * 30_000, False),
        ("", False),
    ],
)
def test_a_traceparent_that_is_none_begins_a_trace(collector: Collector, traceparent: str, is_kept: bool) -> None:
    tracing = tracing_to(collector)
    trace_id = end_one(tracing, {"traceparent": traceparent, "tracestate": "a=1,b=2"})
    tracing.close()
    (span,) = collector.spans
    assert (span.trace_id, span.parent_id) == (trace_id, PARENT if is_kept else "")
    assert (trace_id == TRACE, span.trace_state) == (is_kept, "a=1,b=2" if is_kept else "")


def test_what_the_parent_does_not_sample_is_not_sent_and_has_its_trace_id(collector: Collector) -> None:
    tracing = tracing_to(collector)
    trace = tracing.begin("POST", "/v1/messages", Headers({"traceparent": TRACEPARENT[:-2] + "00"}))
    assert trace is not None
    assert trace.header == f"00-{TRACE}-{trace.span_id}-00"
    assert end_one(tracing, {"traceparent": TRACEPARENT[:-2] + "00"}) == TRACE
    tracing.close()
    assert not collector.bodies


def test_the_variables_of_the_sdk_hold(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # the setting goes first
    monkeypatch.setenv("OTEL_PROPAGATORS", "none")
    tracing = tracing_to(collector)
    end_one(tracing)
    tracing.close()
    (span,) = collector.spans
    assert (span.resource["service.name"], span.resource["deployment.environment"]) == ("ours", "test")
    assert span.resource["service.version"] == server_version()
    assert collector.headers[0]["authorization"] == "Bearer x"
    assert collector.headers[0][":path"] == "/v1/traces"


def test_the_sampler_of_the_sdk_holds(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracing = tracing_to(collector)
    end_one(tracing)
    sampled = end_one(tracing, {"traceparent": TRACEPARENT})
    tracing.close()
    assert {span.trace_id for span in collector.spans} == {sampled}


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match="http/protobuf"):
        Tracing("http://127.0.0.1:4318/v1/traces")


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/tokenize", "/v1/adapters/a/pin", "/nowhere"])
def test_other_requests_have_no_trace(collector: Collector, path: str) -> None:
    tracing = tracing_to(collector)
    assert tracing.begin("POST", path, Headers()) is None
    assert tracing.begin("GET", "/v1/adapters/a", Headers()) is None
    tracing.close()


def test_a_collector_that_hangs_delays_nothing(collector: Collector) -> None:
    """Neither the loop, whose calls return while it hangs, nor the end, which comes without an answer."""
    collector.answers.clear()
    tracing = tracing_to(collector)
    end_one(tracing)
    wait_for(lambda: collector.bodies, "the collector to be asked")
    for _ in range(10_000):
        end_one(tracing)
    tracing.close()
    assert not collector.spans


def test_a_collector_that_is_down_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    tracing = Tracing("http://127.0.0.1:9/v1/traces")
    end_one(tracing)
    tracing.close()
    told = [record.getMessage() for record in caplog.records if record.name.startswith("multilora")]
    assert told in ([], ["Traces are lost: http://127.0.0.1:9/v1/traces does not take them."])


def test_a_collector_that_refuses_is_told_once_and_again_when_it_takes(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    collector.status = 400
    tracing = tracing_to(collector)
    end_one(tracing)
    wait_for(lambda: "lost" in caplog.text, "the line")
    end_one(tracing)
    wait_for(lambda: len(collector.bodies) == 2, "the second refusal")
    collector.status = 200
    end_one(tracing)
    wait_for(lambda: "sent again" in caplog.text, "the line")
    tracing.close()
    names = [record.name.split(".")[0] for record in caplog.records if record.levelno >= 30]
    assert sorted(names) == ["multilora", "opentelemetry"], "the SDK's own line has the reason, once"


def test_a_request_of_many_sequences_has_spans_of_some(collector: Collector) -> None:
    tracing = tracing_to(collector)
    end_one(tracing, timers=2000)
    tracing.close()
    assert [span.name for span in collector.spans].count("sequence") == 64


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("https://collector/otlp/v1/traces/", "https://collector/otlp/v1/traces"),
        ("http://[::1]:4318/base", "http://[::1]:4318/base/v1/traces"),
    ],
)
def test_endpoints(given: str, url: str) -> None:
    assert load_settings(otlp_endpoint=given).otlp_endpoint == url


@pytest.mark.parametrize(
    "given",
    [
        "collector:4318",
        "grpc://collector:4317",
        "http://",
        "http://a:99999",
        "http://a:0",
        "http://[::1",
        "http://a b",
        "http://a?x=1",
        "http://a/#x",
        "http://a\n",
        "http://ü",
    ],
)
def test_wrong_endpoints(given: str) -> None:
    with pytest.raises(SettingsError, match="no address of a collector"):
        load_settings(otlp_endpoint=given)


def test_a_password_in_the_endpoint_is_refused_and_not_repeated() -> None:
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        load_settings(otlp_endpoint="http://me:secret@collector")
    assert "secret" not in str(refused.value)


def test_nothing_imports_the_sdk_without_an_endpoint() -> None:
    code = "import sys, service.server.app; print([name for name in sys.modules if 'opentelemetry.sdk' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.stdout.strip() == "[]", done.stderr


# ---- of a server


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Collector]]:
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        settings = {"otlp_endpoint": collector.url, "log_format": "json", "responses_store_bytes": "16MiB"}
        with running_server(None, tmp_path_factory.mktemp("traced"), kv_bytes="32MiB", **settings) as server:
            yield server, collector


@pytest.fixture
def client(traced: tuple[Server, Collector]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=traced[0].openai_url, api_key="sk-secret", max_retries=0, timeout=LIMIT_SECONDS) as one:
        yield one


def spans_of(collector: Collector, trace_id: str) -> list[Span]:
    """All of them: the request's own is sent last, with those below it."""

    def found() -> list[Span]:
        spans = collector.of(trace_id)
        return spans if any(span.kind == 2 for span in spans) else []

    return wait_for(found, "the trace")


def trace_of(answer: Any) -> str:
    """From the header that answers have."""
    return str(answer.headers["traceresponse"]).split("-")[1]


def check_nesting(spans: list[Span]) -> None:
    by_id = {span.id: span for span in spans}
    for span in spans:
        assert span.began <= span.ended
        if (above := by_id.get(span.parent_id)) is not None:
            assert above.began <= span.began, (above.name, span.name)
            assert span.ended <= above.ended, (above.name, span.name)


@pytest.mark.wide
def test_a_chat_with_a_tool_by_an_adapter_from_the_disk(
    traced: tuple[Server, Collector], client: openai.OpenAI
) -> None:
    server, collector = traced
    raw = client.chat.completions.with_raw_response.create(
        model="calculator",
        messages=[{"role": "user", "content": "What is 12 times 34?"}],
        tools=[CALCULATOR],  # type: ignore[list-item]
        temperature=0.5,
        top_p=0.9,
        max_tokens=200,
        seed=1,
        extra_headers={"traceparent": TRACEPARENT, "tracestate": "vendor=x", "X-Request-Id": "by-hand"},
    )
    answer = raw.parse()
    assert raw.headers["traceresponse"].startswith(f"00-{TRACE}-")
    assert raw.headers["traceresponse"].endswith("-01")
    root, *below = spans_of(collector, TRACE)
    assert (root.name, root.parent_id, root.trace_state, root.kind) == ("chat calculator", PARENT, "vendor=x", 2)
    assert root.id == raw.headers["traceresponse"].split("-")[2]
    told = root.attributes
    assert answer.usage is not None
    assert told["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert told["gen_ai.response.id"] == answer.id
    assert told["gen_ai.response.finish_reasons"] == [answer.choices[0].finish_reason]
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.max_tokens"]) == (0.5, 200)
    assert told["gen_ai.request.top_p"] == pytest.approx(0.9)
    assert told["gen_ai.request.id"] == "by-hand"
    assert raw.headers["x-multilora-adapter"] == f"calculator@1 sha256:{told['multilora.adapter.digest']}"
    assert [span.name for span in below if span.parent_id == root.id] == ["queue", "prefill", "decode", "tool_parsing"]
    queue, prefill, decode = (
        next(span for span in below if span.name == name) for name in ("queue", "prefill", "decode")
    )
    assert queue.ended == pytest.approx(prefill.began, abs=1000)
    assert prefill.ended == pytest.approx(decode.began, abs=1000)
    loads = [span for span in below if span.name == "adapter_load"]
    assert [(load.attributes["multilora.tier"], load.parent_id) for load in loads] == [
        ("host", queue.id),
        ("device", queue.id),
    ]
    assert told["gen_ai.latency.time_in_queue"] == pytest.approx((queue.ended - queue.began) / 1e9, abs=1e-5)
    assert told["gen_ai.latency.e2e"] == pytest.approx((root.ended - root.began) / 1e9, abs=1e-5)
    check_nesting([root, *below])
    assert not root.is_error
    (line,) = server.log_lines("by-hand")
    assert line["trace_id"] == TRACE
    sent = b"".join(collector.bodies)
    assert not [word for word in (b"12 times", b"sk-secret", b"expression") if word in sent]


@pytest.mark.wide
def test_an_adapter_on_the_device_is_not_loaded(traced: tuple[Server, Collector], client: openai.OpenAI) -> None:
    for _ in range(2):
        raw = client.completions.with_raw_response.create(model="shout", prompt="lamp", max_tokens=2)
    names = [span.name for span in spans_of(traced[1], trace_of(raw))]
    assert names[:3] == ["text_completion shout", "queue", "prefill"]
    assert "adapter_load" not in names


@pytest.mark.wide
def test_a_stream_ends_with_its_last_event(traced: tuple[Server, Collector], client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="base", messages=[{"role": "user", "content": "lamp"}], max_tokens=30, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(raw.parse())
    root, *_ = spans_of(traced[1], trace_of(raw))
    assert chunks[-1].usage is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == chunks[-1].usage.completion_tokens
    assert root.attributes["gen_ai.response.id"] == chunks[0].id
    assert not root.is_error


@pytest.mark.wide
def test_choices_and_items_have_spans_of_their_own(traced: tuple[Server, Collector], client: openai.OpenAI) -> None:
    server, collector = traced
    raw = client.completions.with_raw_response.create(model="base", prompt=["a", "b c"], n=2, max_tokens=3)
    usage = raw.parse().usage
    root, *below = spans_of(collector, trace_of(raw))
    assert usage is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert root.attributes["gen_ai.request.choice.count"] == 2
    sequences = [span for span in below if span.parent_id == root.id]
    assert [span.name for span in sequences] == ["sequence"] * 4
    assert sum(span.attributes["gen_ai.usage.output_tokens"] for span in sequences) == usage.completion_tokens
    check_nesting([root, *below])

    items = [{"model": name, "prompt": "lamp", "max_tokens": 2} for name in ("base", "shout", "nobody")]
    items.append({"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    batch = server.post("/v1/completions/batch", json={"items": items})
    root, *below = spans_of(collector, trace_of(batch))
    assert root.name == "POST /v1/completions/batch"
    names = sorted(span.name for span in below if span.parent_id == root.id)
    assert names == ["chat base", "text_completion base", "text_completion shout"]
    ids = {span.attributes["gen_ai.response.id"] for span in below if span.parent_id == root.id}
    assert ids == {item["id"] for item in batch.json()["items"] if "id" in item}
    check_nesting([root, *below])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("path", "body", "name", "usage"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}, "chat base", "output"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}, "chat base", "output"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 3}}, COMPLETED, "completion"),
        ("/invocations", {"prompt": "hi", "max_tokens": 3}, COMPLETED, "completion"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "embeddings base", ""),
        ("/pooling", {"input": "a"}, "pooling base", ""),
    ],
)  # fmt: skip
def test_every_route_that_runs_a_model(
    traced: tuple[Server, Collector], path: str, body: dict[str, Any], name: str, usage: str
) -> None:
    answer = traced[0].post(path, json={"model": "base", **body})
    assert answer.status_code == 200, answer.text
    root, *below = spans_of(traced[1], trace_of(answer))
    assert (root.name, root.attributes["http.route"]) == (name, path)
    assert {"queue", "prefill"} <= {span.name for span in below}
    if usage:
        assert root.attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"][f"{usage}_tokens"]
        assert root.attributes["gen_ai.response.id"] == answer.json()["id"]
    else:
        assert root.attributes["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]


@pytest.mark.wide
def test_an_answer_in_the_background_ends_its_span(traced: tuple[Server, Collector]) -> None:
    server, collector = traced
    body = {"model": "base", "input": "hi", "max_output_tokens": 20, "background": True}
    answer = server.post("/v1/responses", json=body)
    root, *below = spans_of(collector, trace_of(answer))
    assert root.attributes["gen_ai.response.id"] == answer.json()["id"]
    assert "decode" in {span.name for span in below}
    check_nesting([root, *below])


@pytest.mark.wide
def test_errors(traced: tuple[Server, Collector]) -> None:
    server, collector = traced
    for body, status, kind in (
        ({"model": "nobody", "prompt": "secret text"}, 404, "model_not_found"),
        ({"model": "base", "prompt": "secret text", "temperature": "hot"}, 400, "bad_request"),
    ):
        refused = server.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT[:-3] + "-01"})
        assert refused.status_code == status
        assert trace_of(refused) == TRACE
        span = wait_for(
            lambda kind=kind: next((one for one in collector.spans if one.attributes.get("error.type") == kind), None),
            "the span",
        )
        assert (span.name, span.is_error) == ("POST /v1/completions", True)
        assert span.attributes["http.response.status_code"] == status
    assert b"secret text" not in b"".join(collector.bodies)


@pytest.mark.wide
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes(traced: tuple[Server, Collector], stream: bool) -> None:
    server, collector = traced
    name = f"goes-{stream}"
    running = server.metric("num_requests_open")
    with posted(server, "/v1/completions", {**ENDLESS, "stream": stream}, name):
        wait_for(lambda: server.metric("num_requests_open") > running, "the request to run")
    (line,) = wait_for(lambda: server.log_lines(name), "the log line")
    root, *_ = spans_of(collector, line["trace_id"])
    assert root.is_error
    assert root.attributes["error.type"] == "client_disconnected"


@pytest.mark.wide
def test_uploads_and_moves(traced: tuple[Server, Collector]) -> None:
    server, collector = traced
    pig, shout = BUNDLED_ADAPTERS_DIR / "pig-latin", BUNDLED_ADAPTERS_DIR / "shout"
    answers = [
        ("upload", ["receive", "move"], upload(server, "mine", pig)),
        ("replacement", ["receive", "move"], server.http.put(f"{server.url}/v1/adapters/mine", files=parts_of(shout))),
        ("rollback", ["move"], server.post("/v1/adapters/mine/rollback", json={})),
    ]
    for number, (event, phases, answer) in enumerate(answers, start=1):
        assert answer.status_code in (200, 201), answer.text
        root, *below = spans_of(collector, trace_of(answer))
        told = root.attributes
        assert (told["multilora.change"], told["multilora.adapter.name"]) == (event, "mine")
        assert (told["multilora.adapter.version"], told["multilora.adapter.digest"]) == (
            number,
            answer.json()["digest"],
        )
        assert [span.name for span in below] == phases
        check_nesting([root, *below])
    gone = server.http.delete(f"{server.url}/v1/adapters/mine")
    root, *_ = spans_of(collector, trace_of(gone))
    assert root.attributes["multilora.change"] == "deletion"
    refused = server.post("/v1/adapters", data={"name": "mine"}, files={"adapter_config": b"{}"})
    assert spans_of(collector, trace_of(refused))[0].is_error


@pytest.mark.wide
def test_a_request_that_follows_a_move_says_when(traced: tuple[Server, Collector]) -> None:
    server, collector = traced
    upload(server, "moving", BUNDLED_ADAPTERS_DIR / "pig-latin")
    body = {**ENDLESS, "model": "moving", "stream": True, "on_new_version": "continue", "max_tokens": 1000}
    with server.http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        moved = server.http.put(f"{server.url}/v1/adapters/moving", files=parts_of(BUNDLED_ADAPTERS_DIR / "shout"))
        for line in lines:
            if "adapter_versions" in line and '"version":2' in line:
                break
    root, *_ = spans_of(collector, trace_of(answer))
    told = {"multilora.adapter.version": 2, "multilora.adapter.digest": moved.json()["digest"]}
    assert ("adapter_version", told) in root.events


@pytest.mark.wide
def test_many_at_once_are_all_there(traced: tuple[Server, Collector]) -> None:
    server, collector = traced

    def ask(_: int) -> str:
        return trace_of(server.post("/v1/completions", json={"model": "base", "prompt": "a", "max_tokens": 1}))

    with ThreadPoolExecutor(50) as pool:
        ids = list(pool.map(ask, range(500)))
    wait_for(lambda: set(ids) <= {span.trace_id for span in collector.spans if span.kind == 2}, "all traces")
    assert len(set(ids)) == 500


@pytest.mark.wide
def test_a_server_whose_collector_hangs_serves_and_ends(tmp_path: Path) -> None:
    with collecting() as collector:
        collector.answers.clear()
        with running_server(None, tmp_path, otlp_endpoint=collector.url) as server:
            for _ in range(20):
                assert server.post("/v1/completions", json={"model": "base", "prompt": "a", "max_tokens": 1}).is_success
            wait_for(lambda: collector.bodies, "the collector to be asked")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(LIMIT_SECONDS) == 0
        assert not collector.answers.is_set()


@pytest.mark.wide
def test_a_server_without_the_sdk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / "opentelemetry" / "sdk"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'opentelemetry.sdk'\")")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", "serve", "--port=0", "--device=cpu", f"--store-dir={tmp_path}/store",
         "--otlp-endpoint=http://127.0.0.1:9"],
        capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip install 'multilora[otel]'" in done.stderr.splitlines()[-1]
