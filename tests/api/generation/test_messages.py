"""A history is the client's own: what is in it reaches the template or is ignored, and is not refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from service.api.schema.chat_messages import ChatMessage
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server
from tests.support.http.uploads import parts_of

USER: dict[str, Any] = {"role": "user", "content": "hi"}
FOLLOW: dict[str, Any] = {"role": "user", "content": "and?"}
SAID: dict[str, Any] = {"role": "assistant", "content": "ho"}
# What clients make of the plain messages above.
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "litellm": [
        USER,
        {
            **SAID, "tool_calls": None, "function_call": None, "provider_specific_fields": {"refusal": None},
            "annotations": [], "thinking_blocks": [{"type": "thinking"}], "reasoning_items": [], "images": [],
        },
        FOLLOW,
    ],
    "openai's answer": [
        USER,
        {**SAID, "refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None},
        FOLLOW,
    ],
    "vLLM's answer": [USER, {**SAID, "refusal": None, "reasoning": None, "tool_calls": []}, FOLLOW],
    "other things where thoughts are kept": [
        USER, {**SAID, "reasoning": {"effort": None}, "reasoning_content": [{"type": "thinking"}]}, FOLLOW,
    ],
    "keys of a store": [{**USER, "id": "m1", "timestamp": 3}, {**SAID, "phase": "final"}, {**FOLLOW, "\ud800": 1}],
    "text parts": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "ho", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "and?", "prompt_cache_breakpoint": True}]},
    ],
    "refusals": [USER, {"role": "assistant", "content": None, "refusal": "ho"}, FOLLOW],
    "refusal parts": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "ho"}]}, FOLLOW],
}  # fmt: skip


def _tokens(server: Server, messages: list[dict[str, Any]]) -> list[int]:
    body = json.dumps({"messages": messages})
    answer = server.post("/tokenize", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["tokens"]
    return tokens


@pytest.mark.parametrize("messages", HISTORIES.values(), ids=HISTORIES)
def test_a_history_reads_like_the_plain_one(server: Server, messages: list[dict[str, Any]]) -> None:
    assert _tokens(server, messages) == _tokens(server, [USER, SAID, FOLLOW])


def test_an_assistant_that_said_nothing_is_a_message_without_text(server: Server) -> None:
    silent = [{"role": "assistant", "content": None}, {"role": "assistant"}, {"role": "assistant", "content": []}]
    wanted = _tokens(server, [USER, {"role": "assistant", "content": ""}, FOLLOW])
    for message in silent:
        assert _tokens(server, [USER, message, FOLLOW]) == wanted
        answer = server.post("/v1/chat/completions", json={"messages": [USER, message, FOLLOW], "model": BASE, "n": 1})
        assert answer.status_code == 200


@pytest.fixture
def plain_json(server: Server, checkpoints: Checkpoints) -> Iterator[str]:
    """An adapter whose chat template writes down what it sees, calls too, which are therefore left as they are."""
    source = b"{# tool_calls #}{{ messages | tojson }}"
    files = {**parts_of(checkpoints.spare), "chat_template": ("chat_template.jinja", source)}
    server.post("/v1/adapters", data={"name": "scribe"}, files=files).raise_for_status()
    yield "scribe"
    server.http.delete(f"{server.url}/v1/adapters/scribe").raise_for_status()


def test_a_template_sees_calls_and_what_the_tools_said(server: Server, plain_json: str) -> None:
    def call(arguments: Any, **extra: Any) -> dict[str, Any]:
        return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments, **extra}, **extra}

    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": [1]}', index=0, extra_content={}), call("")]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
        {"role": "assistant", "function_call": {"name": "g", "arguments": '{"b": 2}'}, "reasoning": "hm"},
        {"role": "function", "content": None, "name": "g"},
    ]
    body = {"model": plain_json, "messages": messages}
    tokens = server.post("/tokenize", json=body).json()["tokens"]
    seen = json.loads(server.post("/detokenize", json={"tokens": tokens}).json()["prompt"])
    assert seen == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": "", "tool_calls": [call({"a": [1]}), call({})]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": {"b": 2}}}],
            "reasoning": "hm",
            "reasoning_content": "hm",
            "thinking": "hm",
        },
        {"role": "tool", "content": "", "name": "g"},
    ]


def test_a_template_sees_how_much_to_think_if_it_takes_that(server: Server, checkpoints: Checkpoints) -> None:
    def answer(model: str, effort: str, **extra: Any) -> Any:
        body = {"model": model, "messages": [USER], "reasoning_effort": effort, **extra}
        return server.post("/tokenize", json=body)

    def text(tokens: list[int]) -> str:
        return str(server.post("/detokenize", json={"tokens": tokens}).json()["prompt"])

    sources = {"effort": b"<{{ reasoning_effort }} {{ enable_thinking }}>", "switch": b"<{{ enable_thinking }}>"}
    sources["words"] = (
        b"{% if reasoning_effort not in ['none', 'low', 'high'] %}{{ raise_exception('unknown') }}{% endif %}"
        b"<{{ reasoning_effort }} {{ enable_thinking }}>"
    )
    sources["named"] = b"{% if thinking is defined and thinking %}<on>{% else %}<off>{% endif %}"
    sources["thinker"] = b"<think>{{ messages[0].content.split('</think>')[-1] }}"  # it does so always
    for name, source in sources.items():
        files = {**parts_of(checkpoints.spare), "chat_template": ("chat_template.jinja", source)}
        server.post("/v1/adapters", data={"name": name}, files=files).raise_for_status()
    try:
        assert text(answer("effort", "high").json()["tokens"]) == "<high True>"
        assert text(answer("effort", "none").json()["tokens"]) == "<none False>"
        told = {"chat_template_kwargs": {"enable_thinking": "as told"}}
        assert text(answer("effort", "low", **told).json()["tokens"]) == "<low as told>"
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "ultra"):
            assert text(answer("switch", effort).json()["tokens"]) == f"<{effort != 'none'}>"
            assert text(answer("named", effort).json()["tokens"]) == ("<on>" if effort != "none" else "<off>")
            assert (answer("thinker", effort).status_code, answer(BASE, effort).status_code) == (200, 200)
        nearest = {"none": "none False", "minimal": "low True", "medium": "low True", "ultra": "high True"}
        assert {effort: text(answer("words", effort).json()["tokens"]).strip("<>") for effort in nearest} == nearest
        for effort in ("deep", "auto", "\N{SNOWMAN}", "x" * 500):  # a word that nobody knows leaves a model as it is
            for model in ("switch", "named", "thinker", BASE):
                assert answer(model, effort).json()["tokens"] == answer(model, "").json()["tokens"]
            assert text(answer("words", effort).json()["tokens"]) == "<low >"
        assert text(answer("effort", "deep").json()["tokens"]) == "<deep >"
        for model, is_wanted in (("effort", False), ("switch", True), (BASE, False)):
            plain, told = answer(model, "none"), answer(model, "", enable_thinking=is_wanted)
            assert (plain.status_code, told.status_code) == (200, 200)
            assert (told.json()["tokens"] == plain.json()["tokens"]) == (model == BASE)
        assert text(answer("effort", "", enable_thinking=False).json()["tokens"]) == "< False>"
        assert text(answer("switch", "", enable_thinking=True).json()["tokens"]) == "<True>"
        assert text(answer("effort", "high", enable_thinking=False).json()["tokens"]) == "<high False>"
        for is_wanted, shown in ((True, "<on>"), (False, "<off>")):
            for effort in ("", "high", "none"):
                assert text(answer("named", effort, enable_thinking=is_wanted).json()["tokens"]) == shown
        for model, is_wanted in (("thinker", False), ("thinker", True), (BASE, True)):
            refused = answer(model, "", enable_thinking=is_wanted)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "enable_thinking")
            assert f"is {str(is_wanted).lower()}, which" in refused.json()["error"]["message"]
        plain = {"model": BASE, "messages": [USER], "temperature": 0, "max_tokens": 3}
        without = server.post("/v1/chat/completions", json=plain).json()["choices"]
        for nothing in ({"reasoning_effort": "none"}, {"reasoning_effort": ""}, {"enable_thinking": False}):
            assert server.post("/v1/chat/completions", json={**plain, **nothing}).json()["choices"] == without
        asked = {"model": BASE, "input": "hi", "reasoning": {"effort": "none"}, "max_output_tokens": 3}
        assert server.post("/v1/responses", json=asked).status_code == 200
        for model, effort, named in (
            (BASE, "high", "reasoning_effort"), (BASE, "none", None), ("switch", "high", None),
            ("thinker", "none", "reasoning_effort"), ("effort", "low", None), ("effort", "ultra", None),
            ("words", "deep", None), ("switch", "deep", "reasoning_effort"), ("switch", "ultra", None),
        ):  # fmt: skip
            chat = {"model": model, "messages": [USER], "reasoning_effort": effort, "max_tokens": 1}
            answered = server.post("/v1/chat/completions", json=chat)
            assert (answered.status_code, answered.headers.get("X-Multilora-Left-Out")) == (200, named)
        for word, named in (("low", "verbosity"), ("medium", None), ("high", "verbosity")):
            for path, field, asked in (
                ("/v1/chat/completions", "verbosity", {**plain, "verbosity": word}),
                ("/v1/responses", "text.verbosity", {"model": BASE, "input": "hi", "text": {"verbosity": word}}),
            ):
                answered = server.post(path, json=asked)
                assert answered.headers.get("X-Multilora-Left-Out") == (named and field)
                assert "text" not in answered.json() or answered.json()["text"]["verbosity"] == word
    finally:
        for name in sources:
            server.http.delete(f"{server.url}/v1/adapters/{name}").raise_for_status()


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (None, {}),
        ("", {}),
        ("null", {}),
        ("{}", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("f(x)", "f(x)"),
        ("[" * 100_000, "[" * 100_000),
        ("1" * 5000, "1" * 5000),
    ],
    ids=lambda value: str(value)[:12],
)
def test_arguments_are_an_object_where_they_can_be(given: Any, seen: Any) -> None:
    message = ChatMessage.model_validate(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}
    )
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == seen
