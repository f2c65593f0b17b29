"""Wrong tools and choices of them: each is a 4xx whose sentence names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.api.schema.tools import MAX_SCHEMA_DEPTH, MAX_TOOLS, MAX_TOOLS_CHARS
from tests.api.conftest import BASE
from tests.support.http.server import Server

CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def nested(depth: int, key: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", key: schema}
    return {"type": "object", "properties": {"a": schema}}


F, NAMED = [tool()], {"type": "function", "function": {"name": "f"}}


def allowed(**fields: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED], **fields}}


# What is sent beside the chat, the field that is named, words of the sentence.
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "valid list"),
    ({"tools": "f"}, "tools", "valid list"),
    ({"tools": 1}, "tools", "valid list"),
    ({"tools": True}, "tools", "valid list"),
    ({"tools": [None]}, "tools[0]", "must be an object"),
    ({"tools": ["f"]}, "tools[0]", "must be an object"),
    ({"tools": [[]]}, "tools[0]", "must be an object"),
    ({"tools": [{}]}, "tools[0].type", "missing"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "missing"),
    ({"tools": [{"type": "functions", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "functions", "name": "f", "parameters": {}}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "web search"}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no `tools` of type `function`"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "names one of"),
    ({"tools": [{"type": None, "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].name", "not a field"),
    ({"tools": [{"type": "function", "function": None}]}, "tools[0].function", "must be an object"),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function", "must be an object"),
    ({"tools": [{"type": "function", "function": []}]}, "tools[0].function", "must be an object"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
    ({"tools": [{**tool(), "strict": True}]}, "tools[0].strict", "not a field"),
    ({"tools": [tool(None)]}, "tools[0].function.name", "valid string"),
    ({"tools": [tool(3)]}, "tools[0].function.name", "valid string"),
    ({"tools": [tool("")]}, "tools[0].function.name", "pattern"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "pattern"),
    ({"tools": [tool('f"')]}, "tools[0].function.name", "pattern"),
    ({"tools": [tool("f\n")]}, "tools[0].function.name", "pattern"),
    ({"tools": [tool("é")]}, "tools[0].function.name", "pattern"),
    ({"tools": [tool("f(x)")]}, "tools[0].function.name", "pattern"),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name", "pattern"),
    ({"tools": [tool("\ud800")]}, "tools[0].function.name", "surrogate"),
    ({"tools": [tool(description=1)]}, "tools[0].function.description", "valid string"),
    ({"tools": [tool(description=["x"])]}, "tools[0].function.description", "valid string"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "valid boolean"),
    ({"tools": [tool(strict=1)]}, "tools[0].function.strict", "valid boolean"),
    ({"tools": [tool(paramters={})]}, "tools[0].function.paramters", "not a field"),
    ({"tools": [tool(arguments={})]}, "tools[0].function.arguments", "not a field"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "valid dictionary"),
    ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters", "valid dictionary"),
    ({"tools": [tool(parameters=True)]}, "tools[0].function.parameters", "valid dictionary"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters", "of an object"),
    ({"tools": [tool(parameters={"type": ["object"]})]}, "tools[0].function.parameters", "of an object"),
    ({"tools": [tool(parameters={"type": "array", "items": {}})]}, "tools[0].function.parameters", "of an object"),
    ({"tools": [tool(parameters={"properties": []})]}, "tools[0].function.parameters", "`properties` is an object"),
    ({"tools": [tool(parameters={"properties": None})]}, "tools[0].function.parameters", "`properties` is an object"),
    ({"tools": [tool(parameters={"properties": {"a": 3}})]}, "tools[0].function.parameters", "of schemas"),
    ({"tools": [tool(parameters={"properties": {"a": None}})]}, "tools[0].function.parameters", "of schemas"),
    ({"tools": [tool(parameters={"required": 5})]}, "tools[0].function.parameters", "list of names"),
    ({"tools": [tool(parameters={"required": [None]})]}, "tools[0].function.parameters", "list of names"),
    ({"tools": [tool(parameters={"x": float("nan")})]}, "tools", "JSON"),
    ({"tools": [tool(parameters={"x": float("inf")})]}, "tools", "JSON"),
    ({"tools": [tool(parameters=nested(MAX_SCHEMA_DEPTH))]}, "tools[0].function.parameters", "levels deep"),
    ({"tools": [tool(parameters=nested(400))]}, "tools[0].function.parameters", "levels deep"),
    ({"tools": [tool(), tool()]}, "tools", "two tools of the name 'f'"),
    ({"tools": [tool(f"f{index}") for index in range(MAX_TOOLS + 1)]}, "tools", f"takes {MAX_TOOLS}"),
    ({"tools": [tool(description="x" * MAX_TOOLS_CHARS)]}, "tools", f"takes {MAX_TOOLS_CHARS}"),
    ({"tools": [tool(parameters={"properties": {f"property {i:09}": {} for i in range(15_000)}})]}, "tools", "takes"),
    ({"tools": [tool(), {"type": "function", "function": {"name": "g", "x": 1}}]}, "tools[1].function.x", "not a"),
    ({"tools": F, "tool_choice": "any"}, "tool_choice", '"required" or {"type"'),
    ({"tools": F, "tool_choice": True}, "tool_choice", '"required" or {"type"'),
    ({"tools": F, "tool_choice": []}, "tool_choice", '"required" or {"type"'),
    ({"tools": F, "tool_choice": {}}, "tool_choice", '"required" or {"type"'),
    ({"tools": F, "tool_choice": "f"}, "tool_choice", '"required" or {"type"'),
    ({"tools": F, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "not a field"),
    ({"tools": F, "tool_choice": {"type": "function"}}, "tool_choice", '"required" or {"type"'),
    ({"tools": F, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", '{"mode"'),
    ({"tools": F, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.mode", "not a field"),
    ({"tools": F, "tool_choice": {"type": "allowed_tools", "allowed_tools": []}}, "tool_choice.allowed", '{"mode"'),
    ({"tools": F, "tool_choice": allowed(mode="none")}, "tool_choice.allowed_tools.mode", '{"mode"'),
    ({"tools": F, "tool_choice": allowed(tools=[])}, "tool_choice.allowed_tools.tools", '{"mode"'),
    ({"tools": F, "tool_choice": allowed(tools=["f"])}, "tool_choice.allowed_tools.tools[0]", '{"mode"'),
    ({"tools": F, "tool_choice": allowed(tools=[{"type": "mcp"}])}, "tool_choice.allowed_tools.tools[0]", '{"mode"'),
    ({"tools": F, "tool_choice": allowed(tools=[NAMED, tool("g")])}, "tool_choice", "not among"),
    ({"tool_choice": allowed()}, "tool_choice", "no `tools`"),
    ({"tools": F, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice", '"required" or {"type"'),
    ({"tools": F, "tool_choice": {**NAMED, "x": 1}}, "tool_choice.x", "not a field"),
    ({"tools": F, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "not among"),
    ({"tool_choice": "required"}, "tool_choice", "no `tools`"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "no `tools`"),
    ({"tool_choice": NAMED}, "tool_choice", "no `tools`"),
    ({"tools": F, "parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
    ({"functions": [{"name": "f"}]}, "functions", "send them as `tools`"),
    ({"functions": [{"name": "f"}], "function_call": "auto"}, "functions", "send them as `tools`"),
    ({"function_call": {"name": "f"}}, "function_call", "send `tool_choice`"),
    ({"include_reasoning": "no"}, "include_reasoning", "valid boolean"),
    ({"separate_reasoning": 0}, "separate_reasoning", "valid boolean"),
]
GOOD: list[dict[str, Any]] = [
    {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
    {"tools": [], "tool_choice": "auto"},
    {"tools": F, "tool_choice": "none", "parallel_tool_calls": False},
    {"tools": [tool(cache_control={"type": "ephemeral"}, strict=None, parameters=None, description=None)],
     "tool_choice": "none"},
    {"tools": [{**tool("ns.get-weather_2"), "cache_control": {}}], "tool_choice": "none"},
    {"tools": [tool(parameters=nested(20))], "tool_choice": "none"},
    {"tools": [tool(parameters={"type": "object", "properties": {}, "required": None})], "tool_choice": "none"},
]  # fmt: skip


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    # As text: NaN and halves of surrogate pairs are none of JSON's, but clients send them.
    return server.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("change", "param", "words"), BAD, ids=lambda value: str(value)[:60])
def test_a_wrong_tool_is_refused_by_name(server: Server, change: dict[str, Any], param: str, words: str) -> None:
    answer = post(server, "/v1/chat/completions", {**CHAT, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["message"].endswith(".") and len(error["message"]) < 400
    assert (error["param"] or "").startswith(param) or param in error["message"]
    (item,) = post(server, "/v1/completions/batch", {"items": [{**CHAT, **change}]}).json()["items"]
    assert item["error"]["message"] == error["message"]


@pytest.mark.parametrize("change", GOOD, ids=lambda value: str(value)[:60])
def test_what_clients_send_is_taken(server: Server, change: dict[str, Any]) -> None:
    answer = post(server, "/v1/chat/completions", {**CHAT, **change})
    assert answer.status_code == 200, answer.text


def test_completions_have_no_tools(server: Server) -> None:
    for field, value in {"tools": F, "tool_choice": "required", "include_reasoning": False}.items():
        answer = post(server, "/v1/completions", {"model": BASE, "prompt": "the", field: value})
        assert (answer.status_code, "/v1/chat/completions" in answer.text) == (400, True)
