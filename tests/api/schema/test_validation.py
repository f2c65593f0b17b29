"""Pydantic's faults as sentences: a field is told by the name that the client wrote, and no answer grows with it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from pydantic import ValidationError

from service.api.errors import BadRequest, error_body
from service.api.schema.base import MAX_FIELDS
from service.api.schema.error_messages import bad_request
from service.api.schema.requests import (
    MAX_DETOKENIZED,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Request,
    TokenizeRequest,
)

COMPLETION = {"model": "tiny", "prompt": "the"}


def refusal(kind: type[Request], body: dict[str, Any], *, prefix: tuple[str, ...] = ("body",)) -> BadRequest:
    """What the client is told; `prefix` is what FastAPI puts before a path, and a batch's item does not."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return bad_request([{**fault, "loc": (*prefix, *fault["loc"])} for fault in caught.value.errors()])


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}


@pytest.mark.parametrize("prefix", [("body",), ()], ids=["request", "item of a batch"])
@pytest.mark.parametrize(
    "name", ["max-tokens", "a[0]", "f(x)", "str", "int", "float", "bool", "body", "content", "loc", "", "list[str]"]
)
def test_an_unknown_field_is_named_whatever_it_is_called(name: str, prefix: tuple[str, ...]) -> None:
    error = refusal(CompletionRequest, {**COMPLETION, name: 5}, prefix=prefix)
    assert error.message.startswith(f"`{name}` is not a field of this request; leave it out.")
    assert error.param == (name or None)


def test_an_unknown_field_of_a_field_is_named_with_both() -> None:
    error = refusal(CompletionRequest, {**COMPLETION, "stream_options": {"str": 1}})
    assert error.message == "`str` is not a field of `stream_options`; leave it out."
    assert error.param == "stream_options.str"


def test_content_is_told_of_messages_only() -> None:
    assert "message" not in refusal(TokenizeRequest, {"prompt": "a", "content": "x"}).message
    error = refusal(CompletionRequest, {**COMPLETION, "logit_bias": {"content": "x"}})
    assert (error.param, "valid number" in error.message) == ("logit_bias.content", True)


@pytest.mark.parametrize(
    ("change", "param"),
    [({"prompt": 3}, "prompt"), ({"prompt": [["a"]]}, "prompt"), ({"stop": 3}, "stop"), ({"stop": [3]}, "stop")],
)
def test_no_path_names_a_type_that_was_tried(change: dict[str, Any], param: str) -> None:
    assert refusal(CompletionRequest, {**COMPLETION, **change}).param == param
    assert refusal(ChatRequest, chat([{"type": "text", "text": 3}])).param == "messages[0].content"


def test_a_stop_string_that_is_too_long_is_told_its_bound() -> None:
    """Of a list too, which is no text, as the other form of the field must be."""
    for stop in ("x" * 5000, ["fine", "x" * 5000]):
        error = refusal(CompletionRequest, {**COMPLETION, "stop": stop})
        assert "at most 1000 characters" in error.message


@pytest.mark.parametrize(
    "error",
    [
        refusal(CompletionRequest, {**COMPLETION, "x" * 100_000: 1}),
        refusal(CompletionRequest, {**COMPLETION, "logit_bias": {"x" * 100_000: "y"}}),
        refusal(ChatRequest, chat([{"type": "x" * 100_000}])),
    ],
    ids=["field", "key", "type of a part"],
)
def test_what_the_client_sent_is_cut_short(error: BadRequest) -> None:
    assert len(error.message) < 700
    assert len(error.param or "") < 300
    assert "x" * 190 in error.message
    assert "…" in error.message


def test_a_field_whose_name_is_not_unicode_can_be_answered() -> None:
    error = error_body(refusal(CompletionRequest, {**COMPLETION, "a\ud800": 5}))["error"]
    assert (error["message"], error["param"]) == ("`a?` holds half of a surrogate pair; send valid Unicode.", None)
    nested = {"stream": True, "stream_options": {"a\ud800": 5}}
    assert refusal(CompletionRequest, {**COMPLETION, **nested}).param == "stream_options"


def test_as_many_biases_and_stop_tokens_as_are_documented() -> None:
    fitting = {
        "logit_bias": {str(token): 1.0 for token in range(MAX_LOGIT_BIASES)},
        "stop_token_ids": list(range(MAX_STOP_TOKEN_IDS)),
    }
    CompletionRequest.model_validate({**COMPLETION, **fitting})
    schema = CompletionRequest.model_json_schema()["properties"]
    for name, limit in (("logit_bias", 300), ("stop_token_ids", 512)):
        assert f"up to {limit}" in schema[name]["description"]
        more: Any = {str(token): 1.0 for token in range(limit + 1)} if name == "logit_bias" else list(range(limit + 1))
        error = refusal(CompletionRequest, {**COMPLETION, name: more})
        assert (error.param, f"at most {limit} items" in error.message) == (name, True)


def test_more_tokens_than_any_text_has_are_not_looked_at() -> None:
    error = refusal(DetokenizeRequest, {"tokens": [1] * (MAX_DETOKENIZED + 1)})
    assert (error.param, f"at most {MAX_DETOKENIZED} items" in error.message) == ("tokens", True)


MANY = 100_000
LARGE_AND_WRONG: list[tuple[type[Request], dict[str, Any]]] = [
    (CompletionRequest, {**COMPLETION, "prompt": [{}] * MANY}),
    (CompletionRequest, {**COMPLETION, "prompt": [[""]] * MANY}),
    (CompletionRequest, {**COMPLETION, "prompt": [1] * MANY + [""]}),
    (CompletionRequest, {**COMPLETION, "stop": [1] * MANY}),
    (CompletionRequest, {**COMPLETION, "stop_token_ids": [""] * MANY}),
    (CompletionRequest, {**COMPLETION, "logit_bias": {str(index): "x" for index in range(MANY)}}),
    (CompletionRequest, {**COMPLETION, **{f"field{index}": 1 for index in range(MANY)}}),
    (ChatRequest, {"model": "b", "messages": [{}] * MANY}),
    (ChatRequest, {"model": "b", "messages": [{f"field{index}": 1 for index in range(MANY)}]}),
    (ChatRequest, {"model": "b", "messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatRequest, {"model": "b", "messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}),
    (ChatRequest, {"model": "b", "messages": [{"role": "user", "content": "x"}], "modalities": [1] * MANY}),
    (ChatRequest, {"model": "b", "messages": [{"role": "user", "content": "x"}], "tools": [{}] * MANY}),
    (TokenizeRequest, {"messages": [1] * MANY}),
    (DetokenizeRequest, {"tokens": [""] * MANY}),
]


@pytest.mark.parametrize(("schema", "body"), LARGE_AND_WRONG)
def test_a_large_wrong_body_has_few_errors(schema: type[Request], body: dict[str, Any]) -> None:
    """pydantic would keep one for every item and field: seconds and gigabytes for a body that is within the limit."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() < 10
    assert len(refusal(schema, body).message) < 500


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    asked = CompletionRequest.model_validate({**COMPLETION, "max_tokens": 16.0, "top_k": -1.0, "seed": 3.0, "n": 1.0})
    assert (repr(asked.max_tokens), repr(asked.top_k), repr(asked.seed), repr(asked.n)) == ("16", "-1", "3", "1")
    for number in (1.5, 2.0**60):
        assert "valid integer" in refusal(CompletionRequest, {**COMPLETION, "max_tokens": number}).message
    # Names and values that are the client's own stay what they are.
    variables = {"chat_template_kwargs": {"a": 1.0}}
    assert repr(ChatRequest.model_validate({**chat("hi"), **variables}).chat_template_kwargs) == "{'a': 1.0}"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {**COMPLETION, "logit_bias": {str(number): 1.0 for number in range(MAX_LOGIT_BIASES + 1)}}),
        (CompletionRequest, {f"field {number}": 1 for number in range(MAX_FIELDS + 1)}),
        (TokenizeRequest, {}),
        (TokenizeRequest, {"prompt": "a", "tools": [tool({})]}),
        (ChatRequest, chat([{"type": "text"}])),
        (ChatRequest, chat("a", tools=[tool({"type": "string"})])),
        (ChatRequest, chat("a", tools=[tool({"properties": 1})])),
        (ChatRequest, chat("a", tools=[tool({"required": 1})])),
        (ChatRequest, chat("a", tools=[tool(functools.reduce(lambda inner, _: {"items": inner}, range(100), {}))])),
    ],
)
def test_no_fault_holds_an_exception(kind: type[Request], body: dict[str, Any]) -> None:
    """Nor, by its traceback, the body and all who looked at it."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    contexts = [fault.get("ctx", {}) for fault in caught.value.errors()]
    assert not [value for context in contexts for value in context.values() if isinstance(value, Exception)]
