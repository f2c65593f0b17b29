"""Tools over HTTP with the real client: what the template shows, what comes back, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from transformers.utils import get_json_schema

from service.text.calls.formats import FORMATS
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.scripted_server import ScriptedServer, make_text_model, scripted_server
from tests.support.http.tool_templates import SPECIAL_TOKENS, TEMPLATES
from tests.support.models.tiny_models import CHAT_TEMPLATE

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "the sum",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [ADD, NOW]
ASK: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
# How each format writes two calls with words before them.
CALLS = {
    "hermes": 'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "Wait.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3_json": 'Wait. <|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": 'Wait.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now", "arguments": {}}]',
    "lfm2": "Wait.<|tool_call_start|>[add(a=1, b=2), now()]<|tool_call_end|>",
}
THINKING = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}") + "{# </think> #}"


# The format of the prompt that templates without tools get.
CALLS["generic"] = CALLS["hermes"]


@pytest.fixture(scope="module", params=[*sorted(TEMPLATES), "generic"])
def spoken(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ScriptedServer]]:
    """(format, server of a model that speaks it)"""
    name, root = request.param, tmp_path_factory.mktemp("spoken")
    template, special_tokens = TEMPLATES.get(name, CHAT_TEMPLATE), SPECIAL_TOKENS.get(name, ())
    model_dir = make_text_model(checkpoints.base, root / "model", template, special_tokens)
    with scripted_server(model_dir, root / "store", model_name=BASE) as server:
        yield name, server


@pytest.fixture(scope="module")
def thinker(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A model whose template begins a thought."""
    root = tmp_path_factory.mktemp("thinker")
    model_dir = make_text_model(checkpoints.base, root / "model", THINKING)
    with scripted_server(model_dir, root / "store", model_name=BASE) as server:
        yield server


def ask(server: ScriptedServer, **fields: Any) -> Any:
    asked = {"model": BASE, "messages": ASK, "tools": TOOLS, **fields}
    return server.client.chat.completions.create(**asked).choices[0]


def ask_streamed(server: ScriptedServer, **fields: Any) -> Any:
    """What the client's own helper makes of the stream."""
    asked = {"model": BASE, "messages": ASK, "tools": TOOLS, **fields}
    with server.client.chat.completions.stream(**asked) as stream:
        return stream.get_final_completion().choices[0]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@pytest.mark.parametrize("how", [ask, ask_streamed])
def test_calls_come_back_as_calls(spoken: tuple[str, ScriptedServer], how: Any) -> None:
    name, server = spoken
    server.says(CALLS[name])
    choice = how(server)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Wait."
    assert calls_of(choice.message) == [("add", {"a": 1, "b": 2}), ("now", {})]
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(call.type == "function" for call in choice.message.tool_calls)


def test_a_whole_round_trip_reads_its_own_history(spoken: tuple[str, ScriptedServer]) -> None:
    name, server = spoken
    server.says(CALLS[name])
    message = ask(server, parallel_tool_calls=False).message
    assert [called for called, _ in calls_of(message)] == ["add"]
    assert "the sum" in server.engine.last_prompt
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "result is 3"}
    server.says("It is 3.")
    choice = ask(server, messages=[*ASK, message.model_dump(exclude_none=True), result])
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It is 3.", None, "stop")
    prompt = server.engine.last_prompt
    assert prompt.index("What is 1 + 2?") < prompt.rindex("add") < prompt.index("result is 3")


def test_deltas_are_what_clients_join(spoken: tuple[str, ScriptedServer]) -> None:
    """Who is called comes once and first, indices count from 0, and the end says why."""
    name, server = spoken
    server.says(CALLS[name])
    chunks = list(
        server.client.chat.completions.create(model=BASE, messages=ASK, tools=TOOLS, stream=True)  # type: ignore[call-overload]
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    indices = [call.index for call in deltas]
    assert indices == sorted(indices) and set(indices) == {0, 1}
    for index, called in enumerate(["add", "now"]):
        first, *rest = (call for call in deltas if call.index == index)
        assert (first.function.name, first.function.arguments, first.type, bool(first.id)) == (
            called,
            "",
            "function",
            True,
        )
        assert rest and all(call.function.arguments for call in rest)
        assert {(call.function.name, call.type, call.id) for call in rest} == {(None, None, None)}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [*[None] * (len(chunks) - 1), "tool_calls"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Wait."


NAMED: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_call_that_max_tokens_cuts_is_what_there_is_of_it(spoken: tuple[str, ScriptedServer], choice: Any) -> None:
    """Streamed and whole alike: no words of the client's own are made of what begins a call."""
    name, server = spoken
    # The grammar of a choice has no words before the call, and this one spelling.
    written = CALLS[name] if choice == "auto" else CALLS[name].removeprefix("Wait.").lstrip("\n ")
    asked: Any = {"model": BASE, "messages": ASK, "tools": [ADD] if choice == NAMED else TOOLS, "tool_choice": choice}
    server.says(written[: written.index("1") + 1])
    within = server.client.chat.completions.create(**asked).usage.completion_tokens - 1
    server.says(written)
    num_tokens = server.client.chat.completions.create(**asked).usage.completion_tokens
    cuts, arguments = [*range(1, num_tokens - 1, max(1, num_tokens // 9)), within, num_tokens - 2], list[str]()
    for max_tokens in cuts:
        whole = server.client.chat.completions.create(**asked, max_tokens=max_tokens).choices[0]
        with server.client.chat.completions.create(**asked, max_tokens=max_tokens, stream=True) as stream:
            chunks = [chunk.choices[0] for chunk in stream]
        deltas = [call.function for chunk in chunks for call in chunk.delta.tool_calls or ()]
        calls = whole.message.tool_calls or []
        assert [one.name for one in deltas if one.name] == [call.function.name for call in calls]
        assert "".join(one.arguments for one in deltas) == "".join(call.function.arguments for call in calls)
        assert "".join(chunk.delta.content or "" for chunk in chunks) == (whole.message.content or "")
        assert (whole.finish_reason, chunks[-1].finish_reason) == ("length", "length")
        if calls:
            assert (whole.message.content or "Wait.") == "Wait."
            arguments.append(calls[0].function.arguments)
    assert json.loads(arguments[-1]) == {"a": 1, "b": 2}
    assert any(one.startswith('{"a": 1') and not one.endswith("}") for one in arguments)
    if choice == NAMED:
        assert len(arguments) == len(cuts)


def test_a_stream_of_several_choices_keeps_their_calls_apart(spoken: tuple[str, ScriptedServer]) -> None:
    name, server = spoken
    server.says(CALLS[name])
    asked: Any = {"model": BASE, "messages": ASK, "tools": TOOLS, "n": 2}
    with server.client.chat.completions.stream(**asked) as stream:
        choices = stream.get_final_completion().choices
    assert [calls_of(choice.message) for choice in choices] == [[("add", {"a": 1, "b": 2}), ("now", {})]] * 2
    named = {"type": "function", "function": {"name": "add"}}
    with server.client.chat.completions.stream(**asked, tool_choice=named) as stream:
        choices = stream.get_final_completion().choices
    assert [(calls_of(choice.message), choice.finish_reason) for choice in choices] == [
        ([("add", {"a": 1, "b": 2})], "stop")
    ] * 2


def test_without_tools_or_with_none_nothing_is_looked_for(spoken: tuple[str, ScriptedServer]) -> None:
    name, server = spoken
    server.says(CALLS["hermes"])
    for fields in ({"tools": openai.NOT_GIVEN}, {"tools": []}, {"tool_choice": "none"}):
        choice = ask(server, **fields)
        assert (choice.message.content, choice.finish_reason) == (CALLS["hermes"], "stop")
        assert "the sum" not in server.engine.last_prompt
    server.says("<s>" + CALLS[name])
    assert "<s>" not in ask(server).message.content
    assert "<s>" in ask(server, extra_body={"skip_special_tokens": False}).message.content


def test_a_template_sees_what_transformers_says_of_a_function(spoken: tuple[str, ScriptedServer]) -> None:
    def rounded(number: float) -> int:
        """Round it.

        Args:
            number: What is rounded.

        Returns:
            The nearest integer.
        """
        return round(number)

    _, server = spoken
    server.says("So.")
    ask(server, tools=[get_json_schema(rounded)])
    assert "The nearest integer." in server.engine.last_prompt


def test_each_choice_has_its_own_calls(spoken: tuple[str, ScriptedServer]) -> None:
    name, server = spoken
    server.says(CALLS[name])
    answer = server.client.chat.completions.create(model=BASE, messages=ASK, tools=TOOLS, n=2)  # type: ignore[call-overload]
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [2, 2]
    items = [{"model": BASE, "messages": ASK, "tools": TOOLS}] * 2
    batch = server.client.post("/completions/batch", body={"items": items}, cast_to=object)
    called = [item["choices"][0]["message"]["tool_calls"][0]["function"]["name"] for item in batch["items"]]  # type: ignore[index]
    assert called == ["add", "add"]


class TestThoughts:
    @pytest.mark.parametrize("how", [ask, ask_streamed])
    def test_they_are_apart_from_the_answer(self, thinker: ScriptedServer, how: Any) -> None:
        thinker.says("Let me\nsee.\n</think>\n\nIt is 3.")
        message = how(thinker, tools=openai.NOT_GIVEN).message
        assert (message.content, message.reasoning_content) == ("It is 3.", "Let me\nsee.")
        assert message.reasoning == message.reasoning_content

    @pytest.mark.parametrize(
        ("said", "thought"),
        [
            ("Let me\nsee.\n</think>\n\nIt is 3.", "Let me\nsee.\n"),
            ("<think>hm</think>It is 3.", "hm"),
            ("</think>It is 3.", ""),
            ("Let me see", "Let me see"),
        ],
    )
    def test_their_tokens_are_counted(self, thinker: ScriptedServer, said: str, thought: str) -> None:
        """Without the marks, and the end token of the answer."""
        thinker.says(said)
        url = str(thinker.client.base_url).removesuffix("v1/") + "tokenize"
        body = {"prompt": thought, "add_special_tokens": False}
        counted: Any = thinker.client.post(url, body=body, cast_to=object)
        asked: Any = {"model": BASE, "messages": ASK}
        usage = thinker.client.chat.completions.create(**asked, n=2).usage
        is_open = int("</think>" not in said)
        assert usage.completion_tokens_details.reasoning_tokens == 2 * (counted["count"] + is_open)
        more: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = thinker.client.chat.completions.create(**asked, **more)
        assert last.usage.completion_tokens_details.reasoning_tokens == counted["count"] + is_open
        response = thinker.client.responses.create(model=BASE, input="What is 1 + 2?")
        assert response.usage.output_tokens_details.reasoning_tokens == counted["count"] + is_open

    @pytest.mark.parametrize("how", [ask, ask_streamed])
    def test_they_may_be_left_out_or_left_in(self, thinker: ScriptedServer, how: Any) -> None:
        thinker.says("Let me see.</think>It is 3.")
        message = how(thinker, tools=openai.NOT_GIVEN, extra_body={"include_reasoning": False}).message
        assert (message.content, getattr(message, "reasoning_content", None)) == ("It is 3.", None)
        message = how(thinker, tools=openai.NOT_GIVEN, extra_body={"separate_reasoning": False}).message
        assert message.content == "Let me see.</think>It is 3."

    def test_an_answer_that_only_thinks_has_no_content(self, thinker: ScriptedServer) -> None:
        thinker.says("Hm, hm, hm")
        choice = ask(thinker, tools=openai.NOT_GIVEN, max_tokens=4)
        assert choice.message.content is None
        assert "Hm, hm, hm".startswith(choice.message.reasoning_content)


def test_settings_choose_the_parsers(checkpoints: Checkpoints, tmp_path: Any) -> None:
    model_dir = make_text_model(checkpoints.base, tmp_path / "model", TEMPLATES["hermes"] + "{# </think> #}")
    with scripted_server(model_dir, tmp_path, model_name=BASE, tool_parser="lfm2", reasoning_parser="none") as server:
        server.says("<think>" + CALLS["lfm2"])
        message = ask(server).message
        assert (message.content, len(message.tool_calls)) == ("<think>Wait.", 2)
    with scripted_server(model_dir, tmp_path, model_name=BASE, tool_parser="none") as server:
        with pytest.raises(openai.BadRequestError, match=r"turned off \(--tool-parser none\)"):
            ask(server)
        server.says("<think>hm</think>ho")
        assert ask(server, tool_choice="none").message.content == "ho"


# Templates that know no tools: as written, with `tools` named and not shown, with strict roles, with no system role.
_ROLES = (
    "{{% for m in messages %}}{check}[{{{{ m.role }}}}]{{{{ m.content }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
)
_ALTERNATE = (
    "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}"
)
WITHOUT_TOOLS = {
    "plain": _ROLES.format(check=""),
    "names tools": _ROLES.format(check="{# tools #}{{ m.tools }}"),
    "user and assistant alone": _ROLES.format(check=_ALTERNATE),
    "parts alone": _ROLES.format(check="").replace(
        "{{ m.content }}", "{% for b in m.content %}{{ b.text }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_template_that_shows_no_tools_gets_them_in_a_prompt(
    checkpoints: Checkpoints, tmp_path: Any, name: str
) -> None:
    model_dir = make_text_model(checkpoints.base, tmp_path / "model", WITHOUT_TOOLS[name])
    called = [
        {"id": f"c{at}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {at}}}'}}
        for at in range(2)
    ]
    history: list[Any] = [
        *ASK,
        {"role": "assistant", "content": "Wait.", "tool_calls": called},
        {"role": "tool", "tool_call_id": "c0", "content": "result 20"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "result 21"}]},
        {"role": "user", "content": "and now?"},
    ]
    with scripted_server(model_dir, tmp_path, model_name=BASE) as server:
        server.says(CALLS["hermes"])
        assert calls_of(ask(server, messages=history).message) == [("add", {"a": 1, "b": 2}), ("now", {})]
        prompt = server.engine.last_prompt
        order = [
            "the sum",
            "1 + 2?",
            "Wait.",
            '"arguments": {"a": 0}',
            '"arguments": {"a": 1}',
            "result 20",
            "result 21",
        ]
        places = [prompt.index(text) for text in (*order, "and now?")]
        assert places == sorted(places)
        assert prompt.count("[user]") == 2 and prompt.count("[system]") == (name != "user and assistant alone")
        # Without tools the history is shown all the same, and what looks like a call is text.
        answer = server.client.chat.completions.create(model=BASE, messages=history)
        assert answer.choices[0].message.content == CALLS["hermes"]
        prompt = server.engine.last_prompt
        assert "the sum" not in prompt and all(text in prompt for text in order[1:])
        ask(server, tool_choice="none")
        assert "the sum" not in server.engine.last_prompt


def test_a_prompt_with_tools_joins_the_system_message(checkpoints: Checkpoints, tmp_path: Any) -> None:
    model_dir = make_text_model(checkpoints.base, tmp_path / "model", WITHOUT_TOOLS["plain"])
    with scripted_server(model_dir, tmp_path, model_name=BASE) as server:
        ask(server, messages=[{"role": "developer", "content": "Be brief."}, *ASK])
        prompt = server.engine.last_prompt
        assert prompt.count("[system]") == 1
        assert prompt.index("[system]Be brief.") < prompt.index("the sum") < prompt.index("[user]")


def test_a_setting_has_tools_refused_where_the_template_shows_none(checkpoints: Checkpoints, tmp_path: Any) -> None:
    with scripted_server(checkpoints.base, tmp_path, model_name=BASE, tool_parser="template") as server:
        with pytest.raises(openai.BadRequestError, match=r"does not know `tools`.*--tool-parser auto"):
            ask(server)
        server.says(CALLS["hermes"])
        assert ask(server, tool_choice="none").message.tool_calls is None
        body: Any = {"model": BASE, "messages": ASK, "tools": TOOLS}
        with pytest.raises(openai.BadRequestError, match="does not know `tools`"):
            server.client.post(str(server.client.base_url.join("/tokenize")), body=body, cast_to=object)


def test_a_setting_has_every_template_s_tools_in_the_prompt(checkpoints: Checkpoints, tmp_path: Any) -> None:
    """For a template whose own format this server does not read."""
    model_dir = make_text_model(checkpoints.base, tmp_path / "model", CHAT_TEMPLATE + "{{ tools }}")
    with scripted_server(model_dir, tmp_path, model_name=BASE, tool_parser="generic") as server:
        server.says(CALLS["hermes"])
        assert len(calls_of(ask(server).message)) == 2
        assert server.engine.last_prompt.count("the sum") == 1


@pytest.mark.parametrize(
    "shown", ["", "Call as <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"]
)
def test_a_format_that_is_not_read_gives_way_to_the_servers_own(
    shown: str, checkpoints: Checkpoints, tmp_path: Any
) -> None:
    template = CHAT_TEMPLATE + "{% if tools %}" + shown + "[theirs]{{ tools }}{% endif %}"
    model_dir = make_text_model(checkpoints.base, tmp_path / "model", template)
    with scripted_server(model_dir, tmp_path, model_name=BASE) as server:
        server.says(CALLS["hermes"])
        assert len(calls_of(ask(server).message)) == 2
        assert server.engine.last_prompt.count("the sum") == 1
        assert "[theirs]" not in server.engine.last_prompt


def test_a_setting_has_an_unknown_format_refused_with_what_to_do(checkpoints: Checkpoints, tmp_path: Any) -> None:
    model_dir = make_text_model(checkpoints.base, tmp_path / "model", CHAT_TEMPLATE + "{{ tools }}")
    with (
        scripted_server(model_dir, tmp_path, model_name=BASE, tool_parser="template") as server,
        pytest.raises(openai.BadRequestError, match=re.escape(f"--tool-parser {'|'.join(FORMATS)},")),
    ):
        ask(server)
