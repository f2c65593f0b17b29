"""/v1/responses through the real client: what it needs to read an answer, a stream and a history."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import openai
import pytest
from openai.types.responses import function_tool_param, response_create_params
from openai.types.shared_params import Reasoning
from pydantic import BaseModel, ConfigDict

from service.api.routes.responses import ResponseOutput
from service.api.schema.responses import InputItem, ReasoningOptions, ResponsesRequest
from service.api.schema.responses import chat_of as chat_of_response
from service.api.schema.tools import FunctionDefinition
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.scripted_server import ScriptedServer, make_text_model, scripted_server
from tests.support.http.server import Server
from tests.support.http.tool_templates import SPECIAL_TOKENS, TEMPLATES

GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 6}
# A run of one token, whose text is one character, and its end.
FORCED: dict[str, Any] = {"logit_bias": {"50": 100}}
ENDED: dict[str, Any] = {"logit_bias": {"2": 100}}


def chat_of(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(messages=messages, temperature=0, max_tokens=6, **options)


class TestAnswers:
    def test_a_text_is_answered_as_a_chat_of_one_message(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(model="alpha", input="the tin", instructions="Be brief.", **GREEDY)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the tin"}]
        chat = chat_of(client, messages, model="alpha")
        assert answer.output_text == chat.choices[0].message.content
        assert (answer.model, answer.object, answer.store) == ("alpha", "response", False)  # type: ignore[attr-defined]
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
        assert answer.system_fingerprint == chat.system_fingerprint  # type: ignore[attr-defined]
        assert answer.usage is not None
        found = (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens)
        assert found == (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens)

    def test_one_that_ends_by_itself_is_complete(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(model=BASE, input="the", extra_body=ENDED, **GREEDY)
        assert (answer.status, answer.incomplete_details, answer.output_text) == ("completed", None, "")
        assert [item.type for item in answer.output] == ["message"]

    def test_a_history_of_all_kinds_of_items_is_the_chat_that_it_was(self, client: openai.OpenAI) -> None:
        first = client.responses.create(model=BASE, input="the", **GREEDY)
        items: Any = [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            *(item.model_dump() for item in first.output),
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
            {"type": "message", "role": "user", "content": "and now?"},
        ]
        calls = [
            {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}
            for name, arguments in (("c1", '{"a": 1}'), ("c2", "{}"))
        ]
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "reasoning": "hm", "content": first.output_text, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "tool", "tool_call_id": "c2", "content": "4"},
            {"role": "user", "content": "and now?"},
        ]
        answer = client.responses.create(model=BASE, input=items, **GREEDY)
        chat = chat_of(client, messages, model=BASE)
        assert answer.output_text == chat.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.input_tokens == chat.usage.prompt_tokens

    def test_sampling_fields_are_those_of_chats(self, client: openai.OpenAI) -> None:
        body = {**FORCED, "min_tokens": 2, "stop": None, "ignore_eos": True, "seed": 3}
        answer = client.responses.create(model=BASE, input="the", extra_body=body, **GREEDY)
        assert len(set(answer.output_text)) == 1
        assert len(answer.output_text) == 6

    def test_log_probabilities_come_where_they_are_asked_for(self, client: openai.OpenAI) -> None:
        asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        answer: Any = client.responses.create(model=BASE, input="the", **asked, **GREEDY)
        chat = chat_of(client, [{"role": "user", "content": "the"}], model=BASE, logprobs=True, top_logprobs=2).choices[
            0
        ]
        found = [token.model_dump() for token in answer.output[0].content[0].logprobs]
        assert found == [token.model_dump() for token in chat.logprobs.content]

    def test_metadata_comes_back_and_store_is_told_as_it_is(self, client: openai.OpenAI) -> None:
        for store in (True, False):
            answer = client.responses.create(model=BASE, input="the", store=store, metadata={"a": "b"}, **GREEDY)
            assert (answer.metadata, answer.store) == ({"a": "b"}, False)  # type: ignore[attr-defined]


class TestStreams:
    @pytest.mark.parametrize(("body", "last"), [(ENDED, "completed"), ({}, "incomplete")])
    def test_events_come_in_order_and_the_last_one_has_the_whole(
        self, client: openai.OpenAI, body: dict[str, Any], last: str
    ) -> None:
        options: Any = {"model": "alpha", "input": "the", "extra_body": body, **GREEDY}
        events: list[Any] = list(client.responses.create(stream=True, **options))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        ends = ["output_text.done", "content_part.done", "output_item.done", last]
        assert kinds[4:] == ["output_text.delta"] * (len(kinds) - 8) + ends
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        whole: Any = client.responses.create(**options)
        final = events[-1].response
        assert deltas == events[-4].text == final.output_text == whole.output_text
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert final.usage.total_tokens == whole.usage.total_tokens
        assert (final.status, final.output[0].status, final.model) == (last, last, "alpha")
        ids = {event.item_id for event in events if hasattr(event, "item_id")}
        assert ids | {final.output[0].id} == {final.output[0].id}

    def test_the_client_s_own_helper_gathers_the_answer(self, client: openai.OpenAI) -> None:
        options: Any = {"stop_token_ids": [50], "logit_bias": {"50": 3}, "min_tokens": 3}
        asked: Any = {"model": BASE, "input": "the", "temperature": 0, "max_output_tokens": 400, "extra_body": options}
        with client.responses.stream(**asked) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text != ""
        assert final.status == "completed"

    def test_it_is_server_sent_events_with_names(self, server: Server) -> None:
        body = {"input": "the", "stream": True, "stream_options": {"include_obfuscation": False}, **GREEDY}
        answer = server.post("/v1/responses", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        for event in answer.text.strip().split("\n\n"):
            name, data = event.split("\n")
            assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


class Choice(BaseModel):
    """Whatever the model writes, it ends."""

    model_config = ConfigDict(extra="forbid")

    color: Literal["red", "green"]
    is_warm: bool


class TestFormats:
    ASKED: ClassVar[dict[str, Any]] = {"model": "alpha", "input": "the", "temperature": 0, "max_output_tokens": 200}

    def test_parse_gives_what_was_asked_for(self, client: openai.OpenAI) -> None:
        answer = client.responses.parse(text_format=Choice, **self.ASKED)
        assert answer.status == "completed"
        assert isinstance(answer.output_parsed, Choice)

    def test_a_stream_is_parsed_at_its_end(self, client: openai.OpenAI) -> None:
        with client.responses.stream(text_format=Choice, **self.ASKED) as stream:
            final = stream.get_final_response()
        assert isinstance(final.output_parsed, Choice)
        assert final.output_parsed == client.responses.parse(text_format=Choice, **self.ASKED).output_parsed

    def test_the_format_is_that_of_chats_written_flat(self, client: openai.OpenAI) -> None:
        schema = Choice.model_json_schema()
        flat: Any = {"format": {"type": "json_schema", "name": "choice", "schema": schema, "strict": True}}
        answer = client.responses.create(text=flat, **self.ASKED)
        chat = client.chat.completions.create(
            model="alpha",
            messages=[{"role": "user", "content": "the"}],
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}},
        )
        assert answer.output_text == chat.choices[0].message.content
        Choice.model_validate_json(answer.output_text)
        assert answer.text is not None
        assert answer.text.format is not None
        assert answer.text.format.type == "json_schema"

    @pytest.mark.parametrize(
        ("text_format", "param"),
        [
            ({"type": "json_schema", "name": "x"}, "text.format"),
            ({"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}, "text.format.schema"),
            ({"type": "xml"}, "text.format"),
            ({}, "text.format"),
        ],
        ids=str,
    )
    def test_one_that_cannot_be_followed_is_refused_by_the_name_that_it_has_here(
        self, server: Server, text_format: dict[str, Any], param: str
    ) -> None:
        answer = server.post("/v1/responses", json={"input": "the", "text": {"format": text_format}})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"].startswith(param)
        assert "response_format" not in error["message"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"background": True}, "background"),
            ({"truncation": "auto"}, "truncation"),
            ({"prompt": {"id": "p"}}, "prompt"),
            ({"include": ["web_search_call.results"]}, "include[0]"),
            ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
            ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
            ({"text": {"verbosity": "huge"}}, "text.verbosity"),
            ({"verbosity": "low"}, "verbosity"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 600}, "max_output_tokens"),
            ({"max_tokens": 5}, "max_tokens"),
            ({"n": 2}, "n"),
            ({"logprobs": True}, "logprobs"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"guided_regex": "("}, "guided_regex"),
            ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
            ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
            ({"guided_regex": "a", "text": {"format": {"type": "json_object"}}}, "guided_regex"),
            ({"input": []}, "input"),
            ({"input": 5}, "input"),
            ({"input": "word " * 600}, "input"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
            ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
            ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, None),
            ({"lora_path": "alpha"}, "lora_path"),
        ],
        ids=str,
    )
    def test_what_cannot_be_done_is_a_400_that_names_it(
        self, server: Server, fields: dict[str, Any], param: str | None
    ) -> None:
        answer = server.post("/v1/responses", json={"input": "the", **fields})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert param in (error["param"], None)
        assert "messages" not in error["message"]
        assert "max_completion_tokens" not in error["message"]

    def test_an_unknown_adapter_is_a_404(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.responses.create(model="nobody", input="the")

    def test_what_needs_a_store_names_the_setting_that_it_has_not(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(model=BASE, input="the", max_output_tokens=2, store=True)
        assert not answer.store  # type: ignore[attr-defined]
        calls: Any = (client.responses.retrieve, client.responses.delete, client.responses.cancel)
        for call in (*calls, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="--responses-store-bytes"):
                call(answer.id)
        for fields in ({"previous_response_id": answer.id}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="--responses-store-bytes"):
                client.responses.create(model=BASE, input="the", **fields)

    def test_what_asks_for_nothing_is_accepted(self, client: openai.OpenAI) -> None:
        nothing: Any = {
            "previous_response_id": None, "conversation": None, "background": False, "truncation": "disabled",
            "include": ["reasoning.encrypted_content"], "reasoning": {"effort": None, "summary": None}, "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": True, "text": {"format": {"type": "text"}},
            "service_tier": "auto", "user": "ann", "prompt_cache_key": "k", "safety_identifier": "s", "priority": 0,
            "max_tool_calls": None, "top_logprobs": 0, "stop": None, "ignore_eos": False, "prompt_logprobs": None,
            "enable_response_messages": False, "previous_input_messages": None, "structured_outputs": None, "n": 1,
            "logprobs": False, "echo": False,
            "max_tokens": None, "response_format": None, "return_token_ids": False, "truncation_side": "left",
        }  # fmt: skip
        answer = client.responses.create(model=BASE, input="the", extra_body=nothing, **GREEDY)
        assert answer.output_text == client.responses.create(model=BASE, input="the", **GREEDY).output_text

    def test_every_field_of_the_client_is_known(self) -> None:
        params = response_create_params.ResponseCreateParamsBase.__annotations__
        assert set(params) <= set(ResponsesRequest.model_json_schema()["properties"])
        assert set(Reasoning.__annotations__) <= set(ReasoningOptions.model_json_schema()["properties"])


class TestTools:
    ADD: ClassVar[dict[str, Any]] = {
        "type": "function",
        "name": "add",
        "description": "the sum",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
        "strict": False,
    }
    CALL: ClassVar[str] = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

    @pytest.fixture(scope="class")
    def speaker(self, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
        """A model that calls tools as Hermes does."""
        root = tmp_path_factory.mktemp("speaker")
        model_dir = make_text_model(checkpoints.base, root / "model", TEMPLATES["hermes"], SPECIAL_TOKENS["hermes"])
        with scripted_server(model_dir, root / "store", model_name=BASE) as server:
            yield server

    def test_a_whole_round_trip(self, speaker: ScriptedServer) -> None:
        asked: Any = {"model": BASE, "tools": [self.ADD], "tool_choice": "auto", "parallel_tool_calls": True}
        speaker.says("Wait.\n" + self.CALL)
        answer: Any = speaker.client.responses.create(input="What is 1 + 2?", **asked)
        assert "the sum" in speaker.engine.last_prompt
        assert [item.type for item in answer.output] == ["message", "function_call"]
        assert (answer.output_text, answer.status) == ("Wait.", "completed")
        call = answer.output[1]
        assert (call.name, json.loads(call.arguments), call.status) == ("add", {"a": 1, "b": 2}, "completed")
        assert answer.tools[0].name == "add"
        speaker.says("It is 3.")
        items = [item.model_dump(exclude_none=True) for item in answer.output]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "result is 3"}
        again = speaker.client.responses.create(
            input=[{"role": "user", "content": "What is 1 + 2?"}, *items, result], **asked
        )
        assert again.output_text == "It is 3."
        prompt = speaker.engine.last_prompt
        assert prompt.index("What is 1 + 2?") < prompt.index("Wait.") < prompt.rindex("add") < prompt.index("result is")

    def test_calls_are_streamed(self, speaker: ScriptedServer) -> None:
        speaker.says("Wait.\n" + self.CALL + "\n" + self.CALL)
        asked: Any = {"model": BASE, "input": "What is 1 + 2?", "tools": [self.ADD]}
        with speaker.client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
        assert len({item.call_id for item in final.output if item.type == "function_call"}) == 2
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        for event, item in zip(done, final.output[1:], strict=True):
            deltas = [
                one.delta
                for one in events
                if one.type == "response.function_call_arguments.delta" and one.item_id == event.item_id
            ]
            assert "".join(deltas) == event.arguments == item.arguments  # type: ignore[union-attr]
            assert item.id == event.item_id

    def test_some_of_the_tools_may_be_allowed(self, speaker: ScriptedServer) -> None:
        choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
        other: Any = {"type": "function", "name": "other", "description": "another one", "parameters": None}
        speaker.says(self.CALL)
        answer = speaker.client.responses.create(
            model=BASE, input="What is 1 + 2?", tools=[self.ADD, other], tool_choice=choice
        )
        assert "another one" in speaker.engine.last_prompt
        assert [item.type for item in answer.output] == ["function_call"]
        assert answer.tool_choice.model_dump() == choice  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tools": [{"type": "functions", "name": "f", "parameters": {}}]}, "tools[0].type"),
            ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
            ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
            ({"tools": [{"type": "function"}]}, "tools[0].name"),
            ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
            ({"tool_choice": {"type": "allowed_tools", "mode": "all", "tools": []}}, "tool_choice.mode"),
            (
                {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
                "tool_choice.tools[0].type",
            ),
        ],
        ids=str,
    )
    def test_wrong_ones_are_refused_by_the_names_that_they_have_here(
        self, speaker: ScriptedServer, fields: dict[str, Any], param: str
    ) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            speaker.client.responses.create(model=BASE, input="the", **fields)
        assert caught.value.param == param
        assert ".function" not in caught.value.message

    # What Codex and agents that worked with other models send as input, besides what models here can see.
    OTHER_ITEMS: tuple[dict[str, Any], ...] = (
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "other"}},
        {"type": "local_shell_call", "call_id": "c1", "status": "completed", "action": {"type": "exec"}},
        {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "tool_search_output", "call_id": "c2", "status": "completed", "tools": []},
    )

    def test_items_that_no_model_here_can_see_are_left_out_by_name(self, speaker: ScriptedServer) -> None:
        speaker.says("So.")
        asked: Any = [{"role": "user", "content": "so?"}]
        answer = speaker.client.responses.with_raw_response.create(model=BASE, input=[*self.OTHER_ITEMS, *asked])
        named = ", ".join(f"input[{at}] ({item['type']})" for at, item in enumerate(self.OTHER_ITEMS))
        assert (answer.parse().output_text, answer.headers["X-Multilora-Left-Out"]) == ("So.", named)
        prompt = speaker.engine.last_prompt
        speaker.says("So.")
        speaker.client.responses.create(model=BASE, input=asked)
        assert speaker.engine.last_prompt == prompt

    @pytest.mark.parametrize(
        ("item", "sentence"),
        [
            ({"type": "item_reference", "id": "msg_1"}, "send the item itself"),
            ({"type": "massage", "role": "user", "content": "a"}, "must be 'message', 'function_call'"),
            ({"type": "a b"}, "must be 'message', 'function_call'"),
        ],
    )
    def test_items_that_a_model_would_miss_are_refused(
        self, speaker: ScriptedServer, item: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(openai.BadRequestError, match=sentence) as caught:
            speaker.client.responses.create(model=BASE, input=[{"role": "user", "content": "so?"}, item])  # type: ignore[list-item]
        assert caught.value.param == "input[1].type"

    def test_custom_calls_of_another_model_are_seen(self, speaker: ScriptedServer) -> None:
        asked: Any = {"role": "user", "content": "so?"}
        custom: Any = [
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '*** "a"\n'},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        ]
        function: Any = [
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "apply_patch",
                "arguments": '{"input": "*** \\"a\\"\\n"}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
        ]
        prompts = []
        for calls in (custom, function):
            speaker.says("So.")
            speaker.client.responses.create(model=BASE, input=[asked, *calls, asked])
            prompts.append(speaker.engine.last_prompt)
        assert prompts[0] == prompts[1] and "apply_patch" in prompts[0]

    def test_tools_may_come_as_an_item(self, speaker: ScriptedServer) -> None:
        namespace = {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "exec"}]}
        search = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}}
        items: Any = [
            {"type": "additional_tools", "role": "developer", "tools": [namespace, self.ADD]},
            {"role": "user", "content": "What is 1 + 2?"},
        ]
        speaker.says(self.CALL)
        tools: Any = [search]
        answer = speaker.client.responses.with_raw_response.create(model=BASE, input=items, tools=tools)
        assert [item.type for item in answer.parse().output] == ["function_call"]
        named = answer.headers["X-Multilora-Left-Out"].split(", ")
        assert sorted(named) == ["input[0].tools[0] (namespace)", "tools[0] (tool_search)"]

    def test_what_the_client_can_say_of_a_tool_is_known(self, speaker: ScriptedServer) -> None:
        known = FunctionDefinition.model_fields | FunctionDefinition.unserved
        assert set(function_tool_param.FunctionToolParam.__annotations__) - {"type"} <= set(known)
        nothing = {"async": False, "defer_loading": False, "allowed_callers": ["direct"], "output_schema": None}
        speaker.says("So.")
        asked: Any = {"model": BASE, "input": "the", "reasoning": {"context": "auto", "mode": "standard"}}
        assert speaker.client.responses.create(tools=[{**self.ADD, **nothing}], **asked).output_text == "So."  # type: ignore[list-item]
        for name, value in {"async": True, "defer_loading": True, "allowed_callers": [], "output_schema": {}}.items():
            with pytest.raises(openai.BadRequestError) as caught:
                speaker.client.responses.create(tools=[{**self.ADD, name: value}], **asked)  # type: ignore[list-item]
            assert caught.value.param == f"tools[0].{name}"


class TestOutput:
    """Deltas of all kinds, as the parsers of chats give them."""

    DELTAS: tuple[dict[str, Any], ...] = (
        {"role": "assistant", "content": ""},
        {"reasoning_content": "let "},
        {"reasoning_content": "me"},
        {"content": "sure"},
        {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c1", "type": "function", "function": {"name": "sub", "arguments": "{}"}}]},
    )

    def test_deltas_and_the_whole_message_make_the_same_items(self) -> None:
        streamed, whole = ResponseOutput(), ResponseOutput()
        events = [event for delta in self.DELTAS for event in streamed.add(delta)] + [*streamed.finish("completed")]
        calls = [
            {"id": name, "type": "function", "function": {"name": called, "arguments": arguments}}
            for name, called, arguments in (("c0", "add", '{"a": 1}'), ("c1", "sub", "{}"))
        ]
        message = {"role": "assistant", "reasoning_content": "let me", "content": "sure", "tool_calls": calls}
        for _ in (*whole.add(message), *whole.finish("completed")):
            pass
        without_ids = [[{**item, "id": ""} for item in output.items] for output in (streamed, whole)]
        assert without_ids[0] == without_ids[1]
        assert [item["type"] for item in whole.items] == ["reasoning", "message", "function_call", "function_call"]
        assert {item["status"] for item in whole.items} == {"completed"}
        ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert ended == streamed.items
        begun = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
        assert begun == [item["id"] for item in streamed.items]

    def test_log_probabilities_belong_to_the_text_alone(self) -> None:
        output = ResponseOutput()
        first, second = ({"token": name, "logprob": -1.0, "bytes": None, "top_logprobs": []} for name in "ab")
        deltas = [({}, [first]), ({"content": "ab"}, [second]), (self.DELTAS[4], [first]), (self.DELTAS[5], [second])]
        for delta, logprobs in deltas:
            for _ in output.add(delta, logprobs):
                pass
        assert [item["type"] for item in output.items] == ["message", "function_call"]
        assert output.items[0]["content"][0]["logprobs"] == [first, second]

    @pytest.mark.parametrize(
        ("delta", "text_of"),
        [
            (DELTAS[1], lambda item: item["content"][0]["text"]),
            (DELTAS[3], lambda item: item["content"][0]["text"]),
            (DELTAS[7], lambda item: item["arguments"]),
        ],
        ids=["reasoning", "message", "function_call"],
    )
    def test_a_long_text_is_joined_once(self, delta: dict[str, Any], text_of: Callable[[Any], str]) -> None:
        """A text that grew with each of its pieces would be copied as often."""
        output = ResponseOutput()
        for _ in range(3):
            for _ in output.add(delta):
                pass
            assert text_of(output.items[0]) == ""
        *_, ended = output.finish("completed")
        assert text_of(ended["item"]) == text_of(output.items[0]) in ("let let let ", "suresuresure", "{}{}{}")


class Alone(str):
    """A text that may be joined with others, and not added to them: that would copy all that was before it."""

    __slots__ = ()

    def __add__(self, _other: str) -> str:
        raise AssertionError("a text was added to another")

    __radd__ = __add__


def test_what_the_assistant_said_in_many_items_is_joined_once() -> None:
    said = [
        InputItem.model_construct(type="message", role="assistant", content=Alone(f"{number},")) for number in (1, 2)
    ]
    thought = [InputItem.model_construct(type="reasoning", content=Alone(text)) for text in ("a", "b")]
    asked = InputItem.model_construct(type="message", role="user", content="so?")
    request = ResponsesRequest.model_construct(
        model=BASE, input=[thought[0], said[0], thought[1], said[1], asked, said[0]]
    )
    told = [(one.role, one.content, one.reasoning_content) for one in chat_of_response(request).messages]
    assert told == [("assistant", "1,2,", "ab"), ("user", "so?", None), ("assistant", "1,", None)]
