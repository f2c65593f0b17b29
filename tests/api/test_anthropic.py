"""/v1/messages: the same chat as /v1/chat/completions, in Anthropic's shapes. Its client's own tests are in
tests/clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.conftest import BASE, Checkpoints
from tests.support.http.scripted_server import ScriptedServer, make_text_model, scripted_server
from tests.support.http.server import Server
from tests.support.http.tool_templates import SPECIAL_TOKENS, TEMPLATES
from tests.support.limits import LIMIT_SECONDS

ASKED: dict[str, Any] = {"model": BASE, "max_tokens": 6, "messages": [{"role": "user", "content": "the tin"}]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD: dict[str, Any] = {"name": "add", "description": "the sum", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "add", "description": "the sum", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
HTTP = httpx.Client(timeout=LIMIT_SECONDS)
CACHED = {"cache_control": {"type": "ephemeral"}}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def said_by(role: str) -> dict[str, Any]:
    return {"role": role, "content": "x"}


def result(call: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": "x"}


def held(block: dict[str, Any]) -> dict[str, Any]:
    """A conversation that ends with one block, of the role that has such blocks."""
    role = "assistant" if block["type"] == "tool_use" else "user"
    return {"messages": [*ASKED["messages"], {"role": role, "content": [block]}]}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as Anthropic's clients gather it."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    message: dict[str, Any] = dict(events[0]["message"])
    texts: list[str] = []
    for event in events[2:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                texts = []
            case "content_block_delta":
                delta, block = event["delta"], message["content"][-1]
                assert event["index"] == len(message["content"]) - 1
                if delta["type"] == "signature_delta":
                    block["signature"] = delta["signature"]
                    continue
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                texts.append(delta[name[delta["type"]]])
                if delta["type"] != "input_json_delta":
                    block[name[delta["type"]]] = "".join(texts)
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads("".join(texts))
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


@pytest.fixture(scope="module")
def speaker(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A model that thinks, and calls tools as Hermes does."""
    root = tmp_path_factory.mktemp("anthropic")
    thoughts = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    template = TEMPLATES["hermes"].replace("{{ message.content }}", thoughts + "{{ message.content }}")
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    model_dir = make_text_model(checkpoints.base, root / "model", template + switch, SPECIAL_TOKENS["hermes"])
    with scripted_server(model_dir, root / "store", model_name=BASE) as server:
        server.says("So.")
        yield server


def post(server: ScriptedServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return HTTP.post(server.url + path, json=body)


class TestAnswers:
    def test_an_adapter_answers_as_in_a_chat(self, server: Server) -> None:
        asked = {**ASKED, "model": "alpha", "temperature": 0}
        answer = server.post("/v1/messages", json={**asked, "system": "Be brief."}, headers={"X-Request-Id": "mine"})
        messages = [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]
        chat = server.post("/v1/chat/completions", json={**asked, "messages": messages}).json()
        message = answer.json()
        assert message.pop("id").startswith("msg_")
        usage, details = message.pop("usage"), chat["usage"]["prompt_tokens_details"]
        assert message == {
            "type": "message",
            "role": "assistant",
            "model": "alpha",
            "content": [said(chat["choices"][0]["message"]["content"])],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
        }
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
        assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (6, 0)
        assert details["cached_tokens"] >= usage["cache_read_input_tokens"]
        assert answer.headers["X-Multilora-Adapter"].startswith("alpha@1 sha256:")
        assert answer.headers["request-id"] == answer.headers["X-Request-Id"] == "mine"
        events = events_of(server.post("/v1/messages", json={**asked, "system": "Be brief.", "stream": True}))
        streamed = gathered(events)
        assert {**message, "id": "", "usage": ""} == {**streamed, "id": "", "usage": ""}
        start = events[0]["message"]["usage"]
        for name in ("input_tokens", "cache_read_input_tokens"):
            assert start[name] == streamed["usage"][name]
        assert (
            sum(streamed["usage"][name] for name in ("input_tokens", "cache_read_input_tokens", "output_tokens"))
            == (chat["usage"]["total_tokens"])
        )

    def test_a_stop_sequence_is_told(self, server: Server) -> None:
        forced = {**ASKED, "logit_bias": {"50": 100}}
        text = server.post("/v1/messages", json=forced).json()["content"][0]["text"]
        ended = server.post(
            "/v1/messages", json={**forced, "stop_sequences": ["never", text[:2]], "stop": "nor"}
        ).json()
        assert (ended["stop_reason"], ended["stop_sequence"], ended["content"]) == ("stop_sequence", text[:2], [])
        whole = server.post("/v1/messages", json={**ASKED, "logit_bias": {"2": 100}}).json()
        assert (whole["stop_reason"], whole["stop_sequence"], whole["content"]) == ("end_turn", None, [])

    def test_what_chats_can_do_it_can(self, server: Server) -> None:
        text = {"type": "json_schema", "schema": {"type": "object", "properties": {"is_red": {"type": "boolean"}}}}
        asked = {**ASKED, "max_tokens": 200, "model": "alpha", "adapter_id": "alpha", "temperature": 0, "top_k": 5}
        for fields in ({"output_config": {"format": text}}, {"guided_json": text["schema"]}):
            (block,) = server.post("/v1/messages", json={**asked, **fields}).json()["content"]
            assert set(json.loads(block["text"])) <= {"is_red"}
        (block,) = server.post("/v1/messages", json={**asked, "guided_choice": ["yes", "no"]}).json()["content"]
        assert block["text"] in ("yes", "no")

    def test_tokens_are_counted_as_the_message_has_them(self, server: Server) -> None:
        fields = {"system": [said("Be brief.", **CACHED)], "messages": [{"role": "user", "content": [said("the tin")]}]}
        usage = server.post("/v1/messages", json={**ASKED, **fields}).json()["usage"]
        counted = server.post("/v1/messages/count_tokens?beta=true", json={"model": BASE, **fields})
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        assert counted.headers["request-id"]
        long = {**fields, "system": "the " * 5000}
        assert server.post("/v1/messages/count_tokens", json={"model": "alpha", **long}).status_code in (200, 400)


# What a message asks for, and the same as a chat.
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [said("one", **CACHED), said(""), said("two", citations=None)]},
    {"role": "user", "content": "three"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "y"},
            said("I add."),
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 2}, "caller": {"type": "direct"}},
            {"type": "tool_use", "id": "c2", "name": "add", "input": {}, **CACHED},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [said("3"), said("exactly")], "is_error": False},
            {"type": "tool_result", "tool_use_id": "c2", "content": "no numbers", "is_error": True, **CACHED},
        ],
    },
    {"role": "system", "content": [said("Be kind.")]},
    {"role": "user", "content": [said("and now?")]},
]
CALLED = [
    {"id": name, "type": "function", "function": {"name": "add", "arguments": given}}
    for name, given in (("c1", '{"a": 1, "b": 2}'), ("c2", "{}"))
]
CHAT_HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": [said("S1"), said("S2")]},
    {"role": "user", "content": [said("one"), said("two"), said("three")]},
    {"role": "assistant", "reasoning_content": "hm", "content": "I add.", "tool_calls": CALLED},
    {"role": "tool", "tool_call_id": "c1", "content": "3\nexactly"},
    {"role": "tool", "tool_call_id": "c2", "content": "Error:\nno numbers\nBe kind."},
    {"role": "user", "content": "and now?"},
]
HIDDEN = {**ADD, "name": "hidden", "defer_loading": True}
SHOWN = {"type": "function", "function": {**FUNCTION["function"], "name": "hidden"}}  # type: ignore[dict-item]
FOUND: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {}}]},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c1",
                "content": [{"type": "tool_reference", "tool_name": "hidden"}],
            }
        ],
    },
]
CHAT_FOUND: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED[1] | {"id": "c1"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "The tool hidden is there now."},
]
SPLIT: list[dict[str, Any]] = [
    *HISTORY[:2],
    *({"role": "assistant", "content": [block]} for block in HISTORY[2]["content"]),
    *({"role": "user", "content": [block]} for block in HISTORY[3]["content"]),
    *HISTORY[4:],
]
CHANGED = {
    "role": "system",
    "content": [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "hidden"}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "add"}},
    ],
}
QUIET: dict[str, Any] = {"role": "system", "output_config": {"effort": "none"}}
CLEARED = {**QUIET, "content": "S2", "clear_at": "next_user_message"}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a history of all kinds": (
        {"system": [said("S1", **CACHED), said("S2")], "messages": HISTORY, "tools": [ADD]},
        {"messages": CHAT_HISTORY, "tools": [FUNCTION]},
    ),
    "a turn in several messages": (
        {"system": [said("S1"), said("S2")], "messages": SPLIT, "tools": [ADD]},
        {"messages": CHAT_HISTORY, "tools": [FUNCTION]},
    ),
    "system turns at the beginning": (
        {"system": "S1", "messages": [{"role": "system", "content": "S2"}, {"role": "user", "content": "a"}]},
        {"messages": [CHAT_HISTORY[0], {"role": "user", "content": "a"}]},
    ),
    "Claude Code's own line": (
        {"system": [said("x-anthropic-billing-header: cc_version=1;"), said("S1")]},
        {"messages": [{"role": "system", "content": "S1"}, *ASKED["messages"]]},
    ),
    "an answer to go on with": (
        {"messages": [*ASKED["messages"], {"role": "assistant", "content": "It is"}]},
        {"messages": [*ASKED["messages"], {"role": "assistant", "content": "It is"}], "continue_final_message": True},
    ),
    "sampling": (
        {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop_sequences": ["a", "b"], "min_tokens": 2},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["a", "b"], "min_tokens": 2},
    ),
    "tools": ({"tools": [{**ADD, "type": "custom", "eager_input_streaming": True, **CACHED}]}, {"tools": [FUNCTION]}),
    "auto": ({"tools": [ADD], "tool_choice": {"type": "auto"}}, {"tools": [FUNCTION], "tool_choice": "auto"}),
    "any": ({"tools": [ADD], "tool_choice": {"type": "any"}}, {"tools": [FUNCTION], "tool_choice": "required"}),
    "none": ({"tools": [ADD], "tool_choice": {"type": "none"}}, {"tools": [FUNCTION], "tool_choice": "none"}),
    "a tool": (
        {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}},
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    ),
    "one call": (
        {"tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "a system turn of an earlier turn": (
        {"messages": [*ASKED["messages"], CLEARED, {"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": [said("the tin"), said("a")]}]},
    ),
    "a system turn of this turn": (
        {"messages": [*ASKED["messages"], CLEARED], "output_config": {"effort": "max"}},
        {"messages": [{"role": "user", "content": [said("the tin"), said("S2")]}], "reasoning_effort": "none"},
    ),
    "the effort of an earlier turn": (
        {"messages": [*ASKED["messages"], QUIET, {"role": "user", "content": "a"}], "output_config": {"effort": "max"}},
        {"messages": [{"role": "user", "content": [said("the tin"), said("a")]}], "reasoning_effort": "max"},
    ),
    "an effort that nobody knows": ({"output_config": {"effort": "deep"}}, {"reasoning_effort": "deep"}),
    "the effort of this turn": ({"messages": [*ASKED["messages"], QUIET]}, {"reasoning_effort": "none"}),
    "a deferred tool": ({"tools": [ADD, HIDDEN]}, {"tools": [FUNCTION]}),
    "a deferred tool that was found": (
        {"tools": [ADD, HIDDEN], "messages": FOUND},
        {"tools": [FUNCTION, SHOWN], "messages": CHAT_FOUND},
    ),
    "tools that change": ({"tools": [ADD, HIDDEN], "messages": [*ASKED["messages"], CHANGED]}, {"tools": [SHOWN]}),
    "a strict tool": (
        {"tools": [{**ADD, "strict": True}]},
        {"tools": [{"type": "function", "function": {**FUNCTION["function"], "strict": True}}]},  # type: ignore[dict-item]
    ),
    "a format": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "no thoughts": ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
    "thoughts": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"reasoning_effort": "medium"}),
    "thoughts if they help": ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}),
    "an effort": (
        {"thinking": {"type": "enabled", "budget_tokens": 1}, "output_config": {"effort": "max"}},
        {"reasoning_effort": "max"},
    ),
    "what means nothing": (
        {
            "metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"},
            "container": None, "mcp_servers": [], "speed": "standard", "stream_options": {}, "inference_geo": "eu",
            "context_management": {"edits": []}, "diagnostics": {"previous_message_id": None}, "stop_sequences": [],
        },
        {},
    ),
}  # fmt: skip


class TestRequests:
    @pytest.mark.parametrize("name", SAME)
    def test_the_engine_gets_what_the_chat_would_give_it(self, speaker: ScriptedServer, name: str) -> None:
        message, chat = SAME[name]
        speaker.says(CALL)
        for path, fields in (("/v1/messages", message), ("/v1/chat/completions", chat)):
            answer = post(speaker, path, {**ASKED, "seed": 7, "max_tokens": 100, **fields})
            assert answer.status_code == 200, answer.text
        ours, theirs = (
            {name: getattr(one, name) for name in one.__struct_fields__ if name != "request_id"}
            for one in speaker.engine.submitted[-2:]
        )
        assert ours == theirs
        count = post(speaker, "/v1/messages/count_tokens", {"model": BASE, "messages": ASKED["messages"], **message})
        assert count.json() == {"input_tokens": len(ours["prompt_token_ids"])}

    def test_what_is_left_out_is_named(self, speaker: ScriptedServer) -> None:
        fields = {
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
            "system": [said("x-anthropic-billing-header: cc_version=1;")],
            "tools": [{**ADD, "input_examples": [{"a": 1}]}],
            "messages": [*HISTORY[:3], *HISTORY[3:]],
        }
        answer = post(speaker, "/v1/messages", {**ASKED, **fields})
        assert answer.headers["X-Multilora-Left-Out"].split(", ") == [
            "context_management",
            "thinking.budget_tokens",
            "system[0] (x-anthropic-billing-header)",
            "tools[0].input_examples",
            "messages (redacted_thinking)",
        ]

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"max_tokens": None}, "max_tokens"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 10**6}, "to be generated"),
            ({"messages": []}, "messages"),
            ({"messages": "a"}, "messages"),
            *(
                (
                    {"messages": [*ASKED["messages"], {"role": "user", "content": nothing}]},
                    "`messages[1].content` is empty",
                )
                for nothing in ("", [], [said(""), said("")])
            ),
            ({"messages": [{"role": "assistant", "content": []}]}, "`messages` hold no text"),
            ({"messages": [*FOUND[:2], {**FOUND[2], "content": [result("c2")]}]}, "result of 'c2'"),
            ({"messages": [*FOUND, *FOUND[:1], said_by("assistant"), FOUND[2]]}, "`messages[5].content` has a result"),
            ({"messages": FOUND[2:]}, "`messages[0].content` has a result of 'c1'"),
            ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
            ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`text` is missing"),
            ({"messages": [{"role": "user", "content": [HISTORY[2]["content"][0]]}]}, "thinking"),
            ({"messages": [{"role": "assistant", "content": [HISTORY[3]["content"][0]]}]}, "tool_result"),
            ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]}, "`name`"),
            (
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}],
                        }
                    ]
                },
                "image",
            ),
            ({"system": [{"type": "image"}]}, "system[0].type"),
            ({"messages": [{**ASKED["messages"][0], "clear_at": "never"}]}, "`clear_at` is only allowed"),
            ({"messages": [{**ASKED["messages"][0], "output_config": {"effort": "low"}}]}, "output_config"),
            ({"messages": [*ASKED["messages"], {"role": "system", "output_config": {"format": {}}}]}, "format"),
            ({"output_config": {"task_budget": {"total": 1}}}, "task_budget"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}, "web_search_20250305"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
            ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
            ({"tools": [{**ADD, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
            ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name"),
            ({"tools": [ADD, ADD]}, "two tools"),
            ({"tools": [{**ADD, "parameters": {}}]}, "parameters"),
            (held({"type": "tool_use", "id": "a", "name": "add", "input": "x"}), "must be an object"),
            (held({"type": "tool_use", "id": 1, "name": "add", "input": {}}), "`id` of a part of type 'tool_use'"),
            (held({"type": "tool_result", "tool_use_id": "a", "content": 5}), "must be a text or a list of parts"),
            (held({"type": "tool_result", "tool_use_id": "a", "is_error": "maybe"}), "must be true or false"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"tool_choice": "auto"}, '`tool_choice` must be {"type": "auto"}'),
            ({"tools": [ADD], "tool_choice": {"type": "required"}}, '{"type": "any"}'),
            ({"tools": [ADD], "tool_choice": {"type": ["any"]}}, '{"type": "any"}'),
            ({"tools": [ADD], "tool_choice": {"type": "auto", "mode": "x"}}, "disable_parallel_tool_use"),
            ({"tools": [ADD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": "x"}}, '{"type": "any"}'),
            ({"tools": [ADD], "tool_choice": {"type": "tool"}}, '{"type": "tool", "name": ...}'),
            ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
            ({"tools": [ADD], "tool_choice": {"type": "any", "name": "add"}}, "tool_choice.name"),
            ({"thinking": {"type": "always"}}, "thinking.type"),
            ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "output_config.format"),
            ({"stop_sequences": ["a"] * 33}, "stop_sequences"),
            ({"stop_sequences": [""]}, "stop_sequences[0]"),
            ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
            ({"container": "c"}, "container"),
            ({"thread": {"type": "create"}}, "thread"),
            ({"speed": "fast"}, "speed"),
            ({"reasoning_effort": "low"}, "output_config.effort"),
            ({"n": 2}, "`n`"),
            ({"prompt": "a"}, "prompt"),
        ],
        ids=str,
    )
    def test_what_cannot_be_done_is_refused_in_its_form_and_names(
        self, speaker: ScriptedServer, fields: dict[str, Any], named: str
    ) -> None:
        body = {name: value for name, value in {**ASKED, **fields}.items() if value is not None}
        answer = post(speaker, "/v1/messages", body)
        assert answer.status_code == 400, answer.text
        told = answer.json()
        details = told["error"].pop("details", {})
        assert details == ({"error_code": "thread_unsupported_request"} if named == "thread" else {})
        assert told == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": told["error"]["message"]},
            "request_id": answer.headers["request-id"],
        }
        assert named in told["error"]["message"]
        assert not any(word in told["error"]["message"] for word in ("response_format", ".function", "`stop`"))

    @pytest.mark.parametrize(
        ("path", "content", "status", "kind"),
        [
            ("/v1/messages", json.dumps({**ASKED, "model": "nobody"}).encode(), 404, "not_found_error"),
            ("/v1/messages", b" " * ((16 << 20) + 1), 413, "request_too_large"),
            ("/v1/messages", b"{", 400, "invalid_request_error"),
            ("/v1/messages?stream=true", b"{}", 400, "invalid_request_error"),
            ("/v1/messages/batches", b"{}", 404, "not_found_error"),
        ],
        ids=["model", "size", "JSON", "query", "path"],
    )  # fmt: skip
    def test_other_errors_have_its_form_too(
        self, server: Server, path: str, content: bytes, status: int, kind: str
    ) -> None:
        answer = server.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == status
        told = answer.json()
        assert (told["type"], told["error"]["type"], told["request_id"]) == (
            "error",
            kind,
            answer.headers["request-id"],
        )


class TestThoughtsAndCalls:
    @pytest.mark.parametrize(
        ("text", "kinds", "reason"),
        [
            ("Sure.", ["text"], "end_turn"),
            ("<think>let me</think>Sure.", ["thinking", "text"], "end_turn"),
            (f"<think>let me</think>\nWait.\n{CALL}\n{CALL}", ["thinking", "text", "tool_use", "tool_use"], "tool_use"),
            (f"{CALL}\nDone.", ["tool_use", "text"], "tool_use"),
            ("", [], "end_turn"),
        ],
    )
    def test_blocks_follow_one_another_whole_or_streamed(
        self, speaker: ScriptedServer, text: str, kinds: list[str], reason: str
    ) -> None:
        speaker.says(text)
        asked = {**ASKED, "max_tokens": 400, "tools": [ADD]}
        whole = post(speaker, "/v1/messages", asked).json()
        streamed = gathered(events_of(post(speaker, "/v1/messages", {**asked, "stream": True})))
        assert [block["type"] for block in whole["content"]] == kinds
        assert (whole["stop_reason"], streamed["usage"]) == (reason, whole["usage"])
        for message in (whole, streamed):
            ids = [block.pop("id") for block in message["content"] if "id" in block]
            assert len(set(ids)) == kinds.count("tool_use")
        assert streamed["content"] == whole["content"]
        assert all(block["input"] == {"a": 1, "b": 2} for block in whole["content"] if block["type"] == "tool_use")
        if kinds[:1] == ["thinking"]:
            assert whole["content"][0] == {"type": "thinking", "thinking": "let me", "signature": "unsigned"}
            assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0

    def test_a_call_that_is_asked_for_by_name_is_a_use_of_a_tool(self, speaker: ScriptedServer) -> None:
        speaker.says(CALL)
        choice = {"type": "tool", "name": "add"}
        message = post(speaker, "/v1/messages", {**ASKED, "max_tokens": 400, "tools": [ADD], "tool_choice": choice})
        assert message.json()["stop_reason"] == "tool_use"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_call_that_was_cut_ends_by_its_length(self, speaker: ScriptedServer, stream: bool) -> None:
        speaker.says(CALL)
        answer = post(speaker, "/v1/messages", {**ASKED, "max_tokens": 55, "tools": [ADD], "stream": stream})
        if stream:
            *_, delta, _ = events_of(answer)
            assert delta["delta"]["stop_reason"] == "max_tokens"
        else:
            assert answer.json()["stop_reason"] == "max_tokens"
            assert [block["type"] for block in answer.json()["content"]] == ["tool_use"]

    def test_thoughts_are_omitted_where_that_is_asked(self, speaker: ScriptedServer) -> None:
        speaker.says("<think>let me</think>Sure.")
        asked = {**ASKED, "max_tokens": 100, "thinking": {"type": "adaptive", "display": "omitted"}}
        assert post(speaker, "/v1/messages", asked).json()["content"] == [said("Sure.")]
