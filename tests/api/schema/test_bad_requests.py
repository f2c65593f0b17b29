"""What clients do wrong: the right status, OpenAI's shape, and a sentence that names the thing."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import httpx
import pytest

from service.api.admission.prompts import MAX_TEXT_CHARS
from service.api.schema.requests import MAX_DETOKENIZED
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, wait_for
from tests.support.http.uploads import parts_of
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import VOCAB_SIZE

COMPLETION = {"model": BASE, "prompt": "the", "max_tokens": 2}
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def with_message(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **message}]}


IMAGE = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
AUDIO = [{"type": "text", "text": "hear"}, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# (what is added to a good body, the `param`, words of the message)
BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "must be a text"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": ["a", 1]}, "prompt", "must be a text"),
    ({"prompt": [-1]}, "prompt", "must be a text"),
    ({"prompt": [10**6]}, "prompt", "out of vocabulary: the last token is 303"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": {"text": "a"}}, "prompt", "must be a text"),
    ({"prompt": "x " * 2000}, "prompt", "holds 512 tokens"),
    ({"max_tokens": 5000}, "max_tokens", "holds 512 tokens"),
    ({"max_tokens": 0}, "max_tokens", "`echo`"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": "2"}, "max_tokens", "valid integer"),
    ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
    ({"min_tokens": 3}, "min_tokens", "lower it"),
    ({"model": ""}, "model", "empty"),
    ({"model": 3}, "model", "valid string"),
    ({"model": "\ud800"}, "model", "`?` does not exist"),
    ({"prompt": "\ud800"}, None, "surrogate"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
    ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"min_p": 2}, "min_p", "less than or equal to 1"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 17}, "n", "allows 16"),
    ({"seed": 2**63}, "seed", "less than"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"stop": ""}, "stop", "`stop`: it is empty; send at least 1 character"),
    ({"stop": ["a"] * 33}, "stop", "at most 32"),
    ({"stop": ["a" * 1000] * 4 + ["a" * 97]}, "stop", "4097 characters in all; this server takes 4096"),
    ({"stop": [1]}, "stop", "valid string"),
    ({"stop_token_ids": [9999]}, "stop_token_ids", "out of vocabulary: the last token is 303"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids from 0 to 303"),
    ({"logit_bias": {"400": 1}}, "logit_bias", "token ids from 0 to 303, as text: the vocabulary has 304 tokens"),
    ({"logit_bias": {"not_a_token": 1, "1": 1, "two": 1}}, "logit_bias", "has the keys 'not_a_token', 'two'; keys are"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with `stream`"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"max_completion_tokens": 2}, "max_completion_tokens", "send `max_tokens`"),
    ({"top_logprobs": 2}, "top_logprobs", "send `logprobs`"),
    ({"enable_thinking": True}, "enable_thinking", "/v1/chat/completions"),
    ({"temprature": 1}, "temprature", "not a field"),
    ({"messages": []}, "messages", "not a field"),
    ({"max-tokens": 5}, "max-tokens", "`max-tokens` is not a field"),
    ({"content": "x"}, "content", "`content` is not a field"),
    ({"\0": 5}, "\0", "is not a field of this request"),
    ({"a\ud800": 5}, None, "`a?` holds half of a surrogate pair"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", "at most 300"),
    ({"stop_token_ids": [1] * 513}, "stop_token_ids", "at most 512 items, and has 513"),
    ({"bad_words": [""]}, "bad_words[0]", "it is empty; send at least 1 character"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "it is empty; send at least 1 item"),
    ({"guided_json": False}, "guided_json", "`guided_json` is the schema that nothing fits"),
    ({"structured_outputs": {"json": "false"}}, "structured_outputs.json", "leave it out"),
    ({"response_format": {"type": "json"}}, "response_format", '{"type": "json_object"}'),
    ({"adapter_id": "nobody"}, "adapter_id", "does not exist"),
]
BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "`messages`: it is empty; send at least 1 item"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "it must match"),
    ({"messages": None}, "messages", "valid list"),
    (
        with_message(role=""),
        "messages[0].role",
        "it is empty; send at least 1 character",
    ),
    (with_message(content=None), "messages[0].content", "must be a text or a list of text parts"),
    (with_message(content=[]), "messages[0].content", "must be a text or a list of text parts"),
    (with_message(content=IMAGE), None, "image_url"),
    (with_message(content=AUDIO), None, "input_audio"),
    (with_message(content=[]), "messages[0].content", "must be a text"),
    (with_message(content=["hi"]), "messages[0].content", "must be a text"),
    (with_message(content=[{"type": "text"}]), "messages[0].content", "must be a text"),
    (with_message(content=[{"type": "refusal", "text": "no"}]), "messages[0].content", "must be a text"),
    (with_message(name=3), "messages[0].name", "valid string"),
    (with_message(tool_calls={}), "messages[0].tool_calls", "valid list"),
    (with_message(tool_calls=[{**CALL, "type": "custom"}]), "messages[0].tool_calls[0].type", "'function'"),
    (with_message(tool_calls=[{"id": "c"}]), "messages[0].tool_calls[0].function", "is missing"),
    (with_message(tool_calls=[{"function": {}}]), "messages[0].tool_calls[0].function.name", "is missing"),
    (
        with_message(tool_calls=[{"function": {"name": "f", "arguments": 3}}]),
        "messages[0].tool_calls[0].function.arguments",
        "valid string",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"response_format": "json_object"}, "response_format", '{"type": "json_object"}'),
    # What other APIs write flat is told where it belongs.
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "strict": True}},
        "response_format.strict",
        "put it into `response_format.json_schema`",
    ),
    (
        {"response_format": {"type": "json_object", "schema": {}}},
        "response_format.schema",
        '"json_schema": {"schema": ...}}',
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}, "strict": True}]},
        "tools[0].strict",
        "put it into `tools[0].function`",
    ),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].name", "put it into `tools[0].function`"),
    (
        {"tool_choice": {"type": "function", "name": "f"}},
        "tool_choice.name",
        "put it into `tool_choice.function`",
    ),
    (
        {"response_format": {"type": "json_schema", "name": "x", "schema": {}}},
        "response_format.name",
        "put it into `response_format.json_schema`",
    ),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"verbosity": "huge"}, "verbosity", "'low', 'medium' or 'high'"),
    ({"reasoning_effort": 3}, "reasoning_effort", "valid string"),
    ({"prompt": "x"}, "prompt", "not a field"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, None, "differ"),
    ({"max_tokens": 0}, None, "at least 1"),
    ({"top_logprobs": 2}, "top_logprobs", "only allowed with `logprobs`"),
    ({"logprobs": 2}, "logprobs", "valid boolean"),
    ({"continue_final_message": True, "add_generation_prompt": True}, None, "exclude each other"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not hold messages"),
    ({"max_completion_tokens": 5000, "max_tokens": None}, "max_completion_tokens", "holds 512 tokens"),
    (with_message(content="x " * 2000), "messages", "holds 512 tokens"),
]


def check_error(answer: Any, status: int, param: str | None, words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert error["message"].endswith(".")
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(("change", "param", "words"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_completion_is_refused(server: Server, change: dict[str, Any], param: str | None, words: str) -> None:
    body = json.dumps({**COMPLETION, **change})
    answer = server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    check_error(answer, 404 if "does not exist" in words else 400, param, words)


@pytest.mark.parametrize(("change", "param", "words"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_chat_is_refused(server: Server, change: dict[str, Any], param: str | None, words: str) -> None:
    check_error(server.post("/v1/chat/completions", json={**CHAT, **change}), 400, param, words)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"null", b"[" * 15_000, b"[" * 15_000 + b" " * 60_000,
        b'{"model": "a", "model"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/completions/batch", "/tokenize"])
def test_a_body_that_is_no_json_object_is_refused(server: Server, path: str, body: bytes) -> None:
    answer = server.post(path, content=body, headers={"Content-Type": "application/json"})
    check_error(answer, 400, None, "")


@pytest.mark.parametrize("items", [None, {}, []])
def test_a_batch_that_is_no_list_is_refused(server: Server, items: Any) -> None:
    check_error(server.post("/v1/completions/batch", json={"items": items}), 400, None, "items")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a", "add_generation_prompt": True},
        {"prompt": "a", "reasoning_effort": "high"},
        {"prompt": "a", "model": 5},
        {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_bad_tokenize_requests_are_refused(server: Server, body: dict[str, Any]) -> None:
    check_error(server.post("/tokenize", json=body), 400, None, "")


@pytest.mark.parametrize("prompt", [["a"], {"role": "user"}, 5])
def test_what_is_counted_is_one_text(server: Server, prompt: Any) -> None:
    error = server.post("/tokenize", json={"prompt": prompt}).json()["error"]
    assert error["message"] == "`prompt` must be a text."


def test_a_text_is_counted_beyond_the_context_but_not_without_end(server: Server) -> None:
    answer = server.post("/tokenize", json={"prompt": "x" * 1_000_000})
    assert answer.json()["count"] > answer.json()["max_model_len"]
    check_error(server.post("/tokenize", json={"prompt": "x" * (MAX_TEXT_CHARS + 1)}), 400, "prompt", "in parts")


@pytest.mark.parametrize("tokens", [None, "x", [-1], [999], [1.5], ["1"]])
def test_bad_detokenize_requests_are_refused(server: Server, tokens: Any) -> None:
    check_error(server.post("/detokenize", json={"tokens": tokens}), 400, None, "tokens")


def test_an_id_without_a_text_that_the_model_may_answer_with_is_none_of_them(server: Server) -> None:
    assert server.post("/detokenize", json={"tokens": [5, VOCAB_SIZE - 1]}).status_code == 200


def test_what_is_wrong_in_a_long_list_is_told_by_its_place(server: Server) -> None:
    """Such a list is looked at in pieces."""
    for wrong, words in ((-1, "greater than or equal to 0"), ("5", "integer"), (None, "integer")):
        tokens: list[Any] = [5] * 40_000
        tokens[33_333] = wrong
        check_error(server.post("/detokenize", json={"tokens": tokens}), 400, "tokens[33333]", words)
    tokens = [5] * 40_000 + [VOCAB_SIZE]
    check_error(server.post("/detokenize", json={"tokens": tokens}), 400, "tokens", f"holds {VOCAB_SIZE}")
    check_error(server.post("/detokenize", json={"tokens": [5] * (MAX_DETOKENIZED + 1)}), 400, "tokens", "1048576")


def test_unknown_paths_and_methods_have_the_same_shape(server: Server) -> None:
    check_error(server.get("/v1/nothing"), 404, None, "/openapi.json")
    answer = server.get("/v1/completions")
    check_error(answer, 405, None, "POST")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/adapters", ["GET", "HEAD", "POST"]),
        ("POST", "/v1/adapters/x", ["DELETE", "GET", "HEAD", "PATCH", "PUT"]),
        ("PUT", "/v1/adapters/x/history", ["GET", "HEAD"]),
        ("PUT", "/v1/adapters/x/rollback", ["POST"]),
        ("GET", "/v1/adapters/x/pin", ["DELETE", "PUT"]),
        ("POST", "/health", ["GET", "HEAD"]),
        ("PUT", "/ping", ["GET", "HEAD", "POST"]),
        ("BREW", "/v1/models", ["GET", "HEAD"]),
        ("OPTIONS", "/", ["GET", "HEAD"]),
    ],
)
def test_a_wrong_method_is_told_all_that_the_path_takes(
    server: Server, method: str, path: str, allowed: list[str]
) -> None:
    answer = server.http.request(method, f"{server.url}{path}")
    check_error(answer, 405, None, f"send {' or '.join(allowed)}.")
    assert answer.headers["allow"] == ", ".join(allowed)


def test_a_json_body_too_large_is_refused_before_it_is_read(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        answer = connection.makefile("rb").read(2000)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"4194304" in answer
    assert b"--max-body-bytes of the server raises that" in answer


def test_a_chunked_body_too_large_is_stopped(server: Server) -> None:
    def endless() -> Any:
        yield b'{"model": "' + b"x" * 100
        for _ in range(40):
            yield b"x" * (1 << 20)

    answer = server.post("/v1/completions", content=endless(), headers={"Content-Type": "application/json"})
    check_error(answer, 413, None, "4194304")


def test_a_compressed_body_is_refused_by_name(server: Server) -> None:
    body = json.dumps(COMPLETION).encode()
    for encoding, content in (("gzip", gzip.compress(body)), ("br", body), ("identity, gzip", body)):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        check_error(server.post("/v1/completions", content=content, headers=headers), 400, None, encoding)
    headers = {"Content-Type": "application/json", "Content-Encoding": "Identity"}
    assert server.post("/v1/completions", content=body, headers=headers).status_code == 200
    assert server.get("/health", headers={"Content-Encoding": "gzip"}).status_code == 200


def test_broken_http_does_not_hurt_the_server(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for garbage in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 70_000,
    ):
        with socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS) as connection:
            connection.sendall(garbage)
            head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
            assert b" 400 " in head.splitlines()[0]
            assert json.loads(body)["error"]["code"] == "bad_request"
            assert f"content-length: {len(body)}".encode() in head.lower()
    assert server.get("/health").status_code == 200


def test_every_answer_names_its_request(server: Server) -> None:
    for answer in (server.get("/health"), server.get("/nothing"), server.post("/v1/completions", json={})):
        request_id = answer.headers["x-request-id"]
        assert len(request_id) == 32
        if answer.status_code != 200:
            wait_for(lambda request_id=request_id: request_id in server.log, "the request's log line")


def test_a_client_s_own_name_of_a_request_is_kept(server: Server) -> None:
    def named(given: str) -> str:
        return str(server.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"])

    assert named("req 7f/3:a") == "req 7f/3:a"
    for unfit in ("", "x" * 201, "a\tb"):
        assert named(unfit) != unfit and len(named(unfit)) == 32
    refused = server.post("/v1/completions", json={}, headers={"X-Request-Id": "mine-17"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine-17")
    wait_for(lambda: "mine-17" in server.log, "the request's log line")


@pytest.mark.parametrize(
    "wrong",
    [
        1,
        "x",
        [],
        {"model": BASE, "prompt": "a", "logit_bias": {"1" * 5000: 1}},
        {"model": BASE, "prompt": "a", "repetition_penalty": 1e-40},
        {"model": BASE, "prompt": "a", "stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 2, "max_tokens": 4},
        {"model": BASE, "prompt": "a", "messages": [{"role": "user", "content": "a"}]},
        {"model": BASE, "prompt": "a", "adapter_id": ""},
    ],
    ids=["number", "text", "list", "long key", "tiny penalty", "no token left", "both forms", "empty adapter"],
)
def test_a_wrong_item_fails_alone_and_leaves_nothing_behind(server: Server, wrong: Any) -> None:
    good = {"model": BASE, "prompt": "the", "max_tokens": 2, "temperature": 0}
    answer = server.post("/v1/completions/batch", json={"items": [good, wrong, good]})
    assert answer.status_code == 200
    first, second, third = answer.json()["items"]
    assert first["choices"] == third["choices"]
    assert second["error"]["code"] == "bad_request"
    wait_for(lambda: server.metric("num_requests_open") == 0, "all places to be free again")


def test_any_top_k_is_understood(server: Server) -> None:
    body = {"model": BASE, "prompt": "the", "max_tokens": 2, "seed": 1, "top_k": 10**30}
    assert server.post("/v1/completions", json=body).status_code == 200


def test_a_template_variable_may_have_any_name(server: Server) -> None:
    body = {**CHAT, "chat_template_kwargs": {"self": 1, "a b": 2}}
    assert server.post("/v1/chat/completions", json=body).status_code == 200


def test_half_a_surrogate_pair_is_the_request_s_own_fault(server: Server) -> None:
    body = json.dumps({**COMPLETION, "prompt": "\ud800"})
    answer = server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")


def test_an_image_is_refused_by_name(server: Server) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    body = {"model": BASE, "messages": [{"role": "user", "content": parts}]}
    message = server.post("/v1/chat/completions", json=body).json()["error"]["message"]
    assert "image_url" in message
    assert "images, audio and files are not supported" in message


def test_invented_methods_make_no_series(server: Server) -> None:
    for method in ("EVIL1", "EVIL2"):
        httpx.request(method, f"{server.url}/v1/models")
    assert "EVIL" not in server.get("/metrics").text


def test_a_template_that_a_request_makes_too_costly_is_that_request_s_fault(
    server: Server, checkpoints: Checkpoints
) -> None:
    source = (
        b"{% if messages[0].content == 'go' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
        b"{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    files = {**parts_of(checkpoints.spare), "chat_template": ("chat_template.jinja", source)}
    assert server.post("/v1/adapters", data={"name": "costly"}, files=files).status_code == 201
    try:
        said = [{**CHAT, "model": "costly", "messages": [{"role": "user", "content": text}]} for text in ("go", "stay")]
        refused, answered = (server.post("/v1/chat/completions", json=body) for body in said)
        check_error(refused, 400, None, "longer than 1 s")
        assert answered.status_code == 200
        items = server.post("/v1/completions/batch", json={"items": said}).json()["items"]
        assert (items[0]["error"]["code"], "choices" in items[1]) == ("chat_template_refused", True)
        wait_for(lambda: server.metric("num_requests_open") == 0, "all places to be free again")
    finally:
        server.http.delete(f"{server.url}/v1/adapters/costly")


@pytest.mark.parametrize("prompt", ["x" * 100_000, ["x" * 100_000], [1] * 100_000, [[1] * 100_000]])
def test_a_prompt_far_too_long_is_refused(server: Server, prompt: Any) -> None:
    answer = server.post("/v1/completions", json={**COMPLETION, "prompt": prompt})
    check_error(answer, 400, "prompt", "512 tokens")
