"""What operators see: OpenAPI, metrics, logs, settings and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from rich.progress import Progress

from service.api.auth import OPEN_PATHS, required_scope
from service.cli import main
from service.client import ClientError, checked
from service.settings import Settings, SettingsError, load_settings
from tests.api.conftest import ADAPTERS, BASE, Checkpoints
from tests.support.server import Server, wait_for
from tests.support.uploads import parts_of, upload

CHAT = [{"role": "user", "content": "hi"}]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def openapi(server: Server) -> dict[str, Any]:
    return server.get("/openapi.json").json()


def check_answer(openapi: dict[str, Any], method: str, path: str, answer: Any, data: Any = None) -> None:
    """The answer, or one event of it, is what OpenAPI says of this status and media type."""
    response = openapi["paths"][path][method]["responses"][str(answer.status_code)]
    media_type = answer.headers["content-type"].split(";")[0]
    schema = {**response["content"][media_type]["schema"], "components": openapi["components"]}
    jsonschema.validate(answer.json() if data is None else data, schema)


class TestOpenapi:
    def test_every_operation_tells_its_errors_and_only_real_ones(self, openapi: dict[str, Any]) -> None:
        for path, operations in openapi["paths"].items():
            for method, operation in operations.items():
                statuses = set(operation["responses"])
                assert "422" not in statuses
                assert operation["summary"]
                assert operation["description"]
                if method == "post":
                    assert {"400", "413" if "adapter" not in path else "400"} <= statuses
                    assert operation["requestBody"]["required"]

    def test_answers_are_what_it_says(self, server: Server, openapi: dict[str, Any], checkpoints: Checkpoints) -> None:
        completion = {"model": "alpha", "prompt": "the", "max_tokens": 3}
        chat = {"model": "alpha", "messages": CHAT, "max_tokens": 3}
        rich = {"n": 2, "return_token_ids": True, "stop_token_ids": [3]}
        posts: list[tuple[str, Any]] = [
            ("/v1/completions", {**completion, **rich, "logprobs": 2, "echo": True}),
            ("/v1/completions", {**completion, "max_tokens": 10**6}),
            ("/v1/completions", {**completion, "model": "nobody"}),
            ("/v1/chat/completions", {**chat, **rich, "logprobs": True, "top_logprobs": 2}),
            ("/v1/completions/batch", {"items": [completion, chat, {}]}),
            ("/tokenize", {"prompt": "a", "return_token_strs": True}),
            ("/detokenize", {"tokens": [9]}),
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"}),
        ]
        for path, body in posts:
            check_answer(openapi, "post", path, server.post(path, json=body))
        for path in ("/v1/models", "/v1/adapters", "/health", "/ready", "/version"):
            check_answer(openapi, "get", path, server.get(path))
        check_answer(openapi, "get", "/v1/models/{model}", server.get("/v1/models/alpha"))
        files = parts_of(checkpoints.adapters / "alpha")
        check_answer(openapi, "post", "/v1/adapters", server.post("/v1/adapters", data={"name": "alpha"}, files=files))
        check_answer(openapi, "post", "/v1/adapters", server.post("/v1/adapters", data={"name": "beta"}, files=files))
        missing = server.http.delete(f"{server.url}/v1/adapters/nobody")
        check_answer(openapi, "delete", "/v1/adapters/{name}", missing)

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

    def test_every_path_has_a_scope(self, openapi: dict[str, Any]) -> None:
        admin = {
            (method, path)
            for path, operations in openapi["paths"].items()
            for method in operations
            if required_scope(method.upper(), path.replace("{name}", "x")) == "admin"
        }
        assert admin == {
            ("post", "/v1/adapters"),
            ("delete", "/v1/adapters/{name}"),
            ("post", "/v1/load_lora_adapter"),
            ("post", "/v1/unload_lora_adapter"),
        }
        assert {"/health", "/ready", "/version"} <= OPEN_PATHS


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

    def test_steps_caches_and_times_are_there(self, server: Server) -> None:
        items = [{"model": name, "prompt": "the", "max_tokens": 12} for name in (BASE, *ADAPTERS)]
        assert server.post("/v1/completions/batch", json={"items": items}).status_code == 200
        wait_for(lambda: server.metric("step_adapters_sum") >= len(ADAPTERS), "the steps to be reported")
        for name in ("time_to_first_token_seconds_count", "time_per_output_token_seconds_count", "step_tokens_count"):
            assert server.metric(name) > 0
        for name in ("kv_blocks_total", "state_lines_total", "adapter_rows_total", "adapter_loads_total", "engine_up"):
            assert server.metric(name) > 0
        assert server.metric("adapters", tier="store") >= len(ADAPTERS)
        assert server.metric("http_requests_total", route="/v1/completions/batch", status="200") > 0


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


def test_every_line_of_both_processes_is_json(server: Server) -> None:
    """The fixture's server logs JSON; its engine tells of the loaded model."""
    loggers = {json.loads(line)["logger"] for line in server.log.splitlines()}
    assert "service.models.loader" in loggers


class TestSettings:
    def test_each_is_described_and_frozen(self) -> None:
        assert all(field.description for field in Settings.model_fields.values())
        with pytest.raises(ValueError, match="frozen"):
            load_settings().port = 1  # type: ignore[misc]

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
        [({"port": 99999}, "--port"), ({"bogus": 1}, "--bogus"), ({"max_batch_items": 1000}, "max_batch_items")],
    )
    def test_a_wrong_one_is_named(self, given: dict[str, Any], words: str) -> None:
        with pytest.raises(SettingsError, match=words):
            load_settings(**given)


class TestCommands:
    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "service.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    def test_upload_ls_chat_bench_and_rm(self, server: Server, checkpoints: Checkpoints) -> None:
        at = f"--url={server.url}"
        uploaded = self.run("upload", str(checkpoints.spare), "--name=sent", at)
        assert (uploaded.returncode, "sent is there: rank 2" in uploaded.stdout) == (0, True), uploaded.stderr
        assert "sent" in self.run("ls", at).stdout
        assert self.run("chat", "--adapter=sent", "--max-tokens=3", "hello", at).returncode == 0
        bench = self.run("bench", "--requests=4", "--max-tokens=3", "--model=sent", f"--model={BASE}", "--json", at)
        figures = json.loads(bench.stdout)
        assert {name: one["output_tokens"] for name, one in figures.items()} == {"sent": 6, BASE: 6}
        assert self.run("rm", "sent", at).returncode == 0
        again = self.run("rm", "sent", at)
        assert (again.returncode, again.stderr) == (1, "multilora: The adapter 'sent' does not exist.\n")

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

    def test_a_redirect_is_an_error(self) -> None:
        """Of a proxy in between, say; following it would send the key and the file somewhere else."""
        moved = httpx.Response(307, headers={"location": "http://127.0.0.1:9/"})
        with pytest.raises(ClientError, match="307"):
            checked(moved)

    def test_a_file_that_cannot_be_read_is_a_sentence(
        self, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(_self: Progress, path: Path, *_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Progress, "open", refuse)
        assert main(["upload", str(checkpoints.spare), "--url=http://127.0.0.1:9"]) == 1
        assert capsys.readouterr().err.endswith("adapter_config.json cannot be read: Permission denied.\n")

    def test_no_server_is_a_sentence(self) -> None:
        done = self.run("ls", "--url=http://127.0.0.1:9")
        assert done.returncode == 1
        assert done.stderr.startswith("multilora: There is no server at http://127.0.0.1:9")
