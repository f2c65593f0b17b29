"""Answers that follow what a request says, asked by the openai client and by hand, of the base and of adapters."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field, SecretStr

from examples.train_base import BASE_DIR
from service.grammars.constraints import ConstraintError, grammar_of, schema_constraint
from service.grammars.json_schemas import without_unknown_formats
from service.grammars.matching import TokenTable, compile_grammar
from service.text.tokenizer import TextTokenizer
from tests.api.conftest import ADAPTERS, BASE
from tests.support.http.server import Server

CHAT: list[Any] = [{"role": "user", "content": "the thing in the tin"}]
COLOURS = ["red", "dark green", "blue"]


class Animal(BaseModel):
    """What the openai client makes a schema of."""

    name: Annotated[str, Field(max_length=8)]
    legs: Annotated[int, Field(ge=0, le=99)]
    tags: Annotated[list[Literal["big", "old"]], Field(max_length=3)]


SCHEMA = Animal.model_json_schema()
NAMED = {"type": "json_schema", "json_schema": {"name": "animal", "description": "x", "strict": True, "schema": SCHEMA}}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
        "end": "</n>",
    },
}


def is_animal(text: str) -> bool:
    return bool(Animal.model_validate_json(text))


def is_json(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def full(pattern: str) -> Any:
    return lambda text: bool(re.fullmatch(pattern, text))


# What is asked for, and what the answer is then, by name of the test.
ASKED: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"response_format": NAMED}, is_animal),
    "json_schema, not strict": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        is_animal,
    ),
    "structural tag": ({"response_format": TAG}, full("<n>[12]</n>")),
    "vLLM json": ({"structured_outputs": {"json": SCHEMA}}, is_animal),
    "vLLM json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_animal),
    "vLLM regex": ({"structured_outputs": {"regex": r"\d{3}-[a-f]{1,4}/é"}}, full("[0-9]{3}-[a-f]{1,4}/é")),
    "vLLM choice": ({"structured_outputs": {"choice": COLOURS}}, COLOURS.__contains__),
    "vLLM grammar": (
        {"structured_outputs": {"grammar": 'root ::= "x" digit{2} | "no"\ndigit ::= [0-9]'}},
        full("x[0-9]{2}|no"),
    ),
    "vLLM structural tag": ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, full("<n>[12]</n>")),
    "vLLM no blanks": (
        {"structured_outputs": {"json": {"enum": [[1, {"a": 2}]]}, "disable_any_whitespace": True}},
        full(r'\[1,\{"a":2\}\]'),
    ),
    "vLLM blanks": (
        {"structured_outputs": {"json": {"enum": [[1, 2]]}, "whitespace_pattern": "_"}},
        full("\\[_?1_?,_?2_?\\]"),
    ),
    "guided_json": ({"guided_json": SCHEMA}, is_animal),
    "guided_json, blanks": ({"guided_json": {"enum": [[1]]}, "guided_whitespace_pattern": "_"}, full("\\[_?1_?\\]")),
    "guided_regex": ({"guided_regex": "^(yes|no)$"}, full("yes|no")),
    "guided_choice": ({"guided_choice": COLOURS}, COLOURS.__contains__),
    "guided_grammar": ({"guided_grammar": "start: /[a-c]{4}/"}, full("[a-c]{4}")),
    "SGLang json_schema": ({"json_schema": json.dumps(SCHEMA)}, is_animal),
    "SGLang regex": ({"regex": "[xyz]{3}"}, full("[xyz]{3}")),
    "SGLang ebnf": ({"ebnf": 'root ::= "a" "b"'}, full("ab")),
    # What looks like the text of a special token is text.
    "special text": ({"guided_choice": ["<|im_end|></s>"]}, full(r"<\|im_end\|></s>")),
    "special text in JSON": (
        {"guided_json": {"type": "object", "properties": {"</s>": {"const": "<s>"}}, "required": ["</s>"],
                         "additionalProperties": False}},
        lambda text: json.loads(text) == {"</s>": "<s>"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "is_right"), ASKED.values(), ids=ASKED.keys())
def test_every_way_to_ask_is_followed(server: Server, asked: dict[str, Any], is_right: Any) -> None:
    shared = {**asked, "max_tokens": 300, "temperature": 0.7, "seed": 5, "n": 2}
    chat = server.post("/v1/chat/completions", json={"messages": CHAT, "model": "alpha", **shared})
    text = server.post("/v1/completions", json={"prompt": "the", "model": BASE, **shared})
    choices = [*chat.json()["choices"], *text.json()["choices"]]
    for choice in choices:
        answer = choice.get("text") or choice["message"]["content"]
        assert choice["finish_reason"] == "stop", answer
        assert is_right(answer), answer


@pytest.mark.parametrize(("asked", "is_right"), ASKED.values(), ids=ASKED.keys())
def test_responses_are_asked_in_every_way_too(server: Server, asked: dict[str, Any], is_right: Any) -> None:
    given = dict(asked)
    if "response_format" in given:  # flat there
        said = dict(given.pop("response_format"))
        given["text"] = {"format": {**said.pop("json_schema"), **said} if "json_schema" in said else said}
    body = {"input": CHAT, "model": "alpha", "max_output_tokens": 300, "temperature": 0.7, "seed": 5, **given}
    answer = server.post("/v1/responses", json=body).json()
    assert answer["status"] == "completed", answer
    assert is_right(answer["output"][0]["content"][0]["text"])


def test_the_clients_parse_gives_objects(client: openai.OpenAI) -> None:
    for name in (BASE, *ADAPTERS):
        parsed = client.chat.completions.parse(model=name, messages=CHAT, response_format=Animal, max_tokens=300)
        assert isinstance(parsed.choices[0].message.parsed, Animal)


def test_the_clients_stream_gives_an_object(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="beta", messages=CHAT, response_format=Animal, max_tokens=300, seed=1
    ) as stream:
        contents = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0]
    assert isinstance(final.message.parsed, Animal)
    assert "".join(contents) == final.message.content
    assert len(contents) > 5


def test_json_object_is_an_object(server: Server) -> None:
    """A model of random weights ends few of them: the others are the beginning of one."""
    bias = {str(token): 8 for token in _tokens(server, "{}")}
    body = {"prompt": "the", "response_format": {"type": "json_object"}, "max_tokens": 60, "n": 8, "seed": 1}
    choices = server.post("/v1/completions", json={**body, "logit_bias": bias}).json()["choices"]
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert all(is_json(text) for text in ended)
    assert all(choice["text"].startswith("{") for choice in choices)


def _tokens(server: Server, text: str) -> list[int]:
    tokens: list[int] = server.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return tokens


def test_no_name_is_spelled_in_two_ways(server: Server) -> None:
    """`\\u0061` is "a" too, by which an object could hold it once as declared and once as it likes."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True}
    bias = {str(token): 30 for token in _tokens(server, "\\u061")}
    body = {"prompt": "the", "guided_json": schema, "max_tokens": 80, "n": 8, "seed": 1, "logit_bias": bias}
    texts = [choice["text"] for choice in server.post("/v1/completions", json=body).json()["choices"]]
    assert any("\\" in text for text in texts)
    assert not any(re.search(r"(?<!\\)(\\\\)*\\u", text) for text in texts)


# ---- with other fields


def test_it_ends_by_length_where_it_is_cut(server: Server) -> None:
    body = {"prompt": "the", "guided_regex": "a{10}", "max_tokens": 4}
    choice = server.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("aaaa", "length")


def test_stop_strings_end_it_before(server: Server) -> None:
    body = {"prompt": "the", "guided_regex": "abcdef", "max_tokens": 9, "stop": "d"}
    choice = server.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "d")


def test_min_tokens_and_ignore_eos_do_not_keep_it_from_ending(server: Server) -> None:
    body = {"prompt": "the", "guided_regex": "a{2,4}", "max_tokens": 20}
    for forbidden in ({"min_tokens": 10}, {"ignore_eos": True}):
        choice = server.post("/v1/completions", json={**body, **forbidden}).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("aaaa", "stop")


def test_echo_and_log_probabilities_are_as_without(server: Server) -> None:
    body = {"prompt": "the tin", "guided_regex": "[ab]{3}", "max_tokens": 9, "temperature": 0}
    told = server.post("/v1/completions", json={**body, "echo": True, "logprobs": 2}).json()["choices"][0]
    plain = server.post("/v1/completions", json=body).json()["choices"][0]
    assert told["text"] == "the tin" + plain["text"]
    assert "".join(told["logprobs"]["tokens"][-3:]) == plain["text"]
    assert max(told["logprobs"]["token_logprobs"][-3:]) < 0  # of all tokens, not of the two that were allowed


def test_a_seed_gives_the_same_answer_again(server: Server) -> None:
    body = {"prompt": "the", "guided_json": SCHEMA, "max_tokens": 300, "seed": 3}
    first, second = (server.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2))
    assert first == second


def test_items_of_a_batch_have_their_own(server: Server) -> None:
    items = [
        {"prompt": "the", "guided_choice": ["one"], "model": "alpha"},
        {"prompt": "the", "guided_regex": "(?=no)"},
        {"messages": CHAT, "response_format": {"type": "text"}, "max_tokens": 3, "ignore_eos": True},
        {"messages": CHAT, "guided_choice": ["two"]},
    ]
    one, bad, free, two = server.post("/v1/completions/batch", json={"items": items}).json()["items"]
    assert one["choices"][0]["text"] == "one"
    assert bad["error"]["param"] == "guided_regex"
    assert free["choices"][0]["finish_reason"] == "length"
    assert two["choices"][0]["message"]["content"] == "two"


def test_what_came_of_grammars_is_counted(server: Server) -> None:
    def counts() -> list[float]:
        return [server.metric("grammars_total", outcome=outcome) for outcome in ("compiled", "known", "refused")]

    before = counts()
    for regex in ("counted?", "counted?", "counted("):
        server.post("/v1/completions", json={"prompt": "the", "guided_regex": regex, "max_tokens": 1})
    assert [after - count for after, count in zip(counts(), before, strict=True)] == [1, 1, 1]


def test_two_ways_at_once_are_refused(server: Server) -> None:
    for asked in (
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    ):
        answer = server.post("/v1/completions", json={"prompt": "the", **asked})
        assert answer.status_code == 400
        assert "both given; send one of them" in answer.json()["error"]["message"]


def test_asking_for_nothing_is_free(server: Server) -> None:
    nothing: tuple[dict[str, Any], ...] = (
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"disable_any_whitespace": False, "json_object": False, "json": None}},
    )
    body = {"prompt": "the", "temperature": 0, "max_tokens": 8}
    plain = server.post("/v1/completions", json=body).json()["choices"]
    for fields in nothing:
        assert server.post("/v1/completions", json={**body, **fields}).json()["choices"] == plain


def test_openapi_tells_the_formats(server: Server) -> None:
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["JsonSchemaFormat"]["properties"]["type"]["const"] == "json_schema"
    assert {"json", "regex", "choice", "grammar"} <= set(schemas["StructuredOutputs"]["properties"])


def test_a_schema_that_leads_nowhere_ends_with_an_error(server: Server) -> None:
    """It begins well, so it is admitted; what has begun cannot become valid."""
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"$ref": "#/$defs/loop"}},
        "required": ["a", "b"],
        "$defs": {"loop": loop},
    }
    body = {"prompt": "the", "guided_json": schema, "max_tokens": 200}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "cannot be followed" in answer.json()["error"]["message"]
    streamed = server.post("/v1/completions", json={**body, "stream": True}).text
    assert "cannot be followed" in streamed
    assert '"finish_reason":"stop"' not in streamed


def test_a_reference_to_itself_alone_is_refused_before_anything_is_written(server: Server) -> None:
    loop = {"$ref": "#/$defs/loop"}
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": loop}, "$defs": {"loop": loop}}
    answer = server.post("/v1/completions", json={"prompt": "the", "guided_json": schema, "stream": True})
    assert answer.status_code == 400
    sentence = "`guided_json` holds the `$ref` '#/$defs/loop', which refers to itself without end; let it refer to a "
    assert answer.json()["error"]["message"].startswith(sentence)


# ---- schemas that do not say `additionalProperties`


class Part(BaseModel):
    number: int


class Whole(BaseModel):
    part: Part
    parts: list[Part] = []
    either: Part | Animal | None = None
    counts: dict[str, int] = {}
    anything: dict[str, Any] = {}


_A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
_KIND: dict[str, Any] = {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}
_OTHER_KIND: dict[str, Any] = {"properties": {"kind": {"const": "y"}}, "required": ["kind"]}
_IN_DEFS: dict[str, Any] = {"$defs": {"A": _A}, "allOf": [{"$ref": "#/$defs/A"}, _B]}
_RECURSIVE: dict[str, Any] = {
    "$defs": {"A": _A},
    "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"next": {"$ref": "#"}, "one": {"$ref": "#/$defs/A"}}}],
}
# By name: a schema, values that fit it closed, and values that fit it as it stands and not closed.
CLOSED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "plain": (_A, [{"a": 1}], [{"a": 1, "x": 2}]),
    "pydantic": (
        Whole.model_json_schema(),
        [
            {"part": {"number": 1}},
            {"part": {"number": 1}, "parts": [{"number": 2}], "either": None},
            {"part": {"number": 1}, "counts": {"x": 1}, "anything": {"x": {"y": [1]}}},
        ],
        [
            {"part": {"number": 1}, "x": 1},
            {"part": {"number": 1, "x": 1}},
            {"part": {"number": 1}, "parts": [{"number": 2, "x": 1}]},
            {"part": {"number": 1}, "either": {"number": 1, "x": 1}},
        ],
    ),
    "no properties": ({"type": "object"}, [{}, {"x": {"y": 1}}], []),
    "no properties inside": ({"properties": {"o": {"type": "object"}}}, [{"o": {"x": 1}}], [{"x": 1}]),
    "none at all": ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
    "said": ({**_A, "additionalProperties": {"type": "integer"}}, [{"a": 1, "x": 2}], []),
    "said true": ({**_A, "additionalProperties": True}, [{"a": 1, "x": "y"}], []),
    "patterns": ({"patternProperties": {"^x": {"type": "integer"}}}, [{"xa": 1}], [{"xa": 1, "b": 1}]),
    "required alone": (
        {"properties": {"a": True}, "required": ["a", "c"]}, [{"a": 1, "c": 2}], [{"a": 1, "c": 2, "x": 1}],
    ),
    "anyOf": ({"anyOf": [_A, _B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "x": 1}]),
    "oneOf": (
        {"oneOf": [{"type": "object", **_KIND}, {"type": "object", **_OTHER_KIND}]},
        [{"kind": "x"}, {"kind": "y"}],
        [{"kind": "y", "x": 1}],
    ),
    "anyOf beside properties": ({**_KIND, "anyOf": [_A, _B]}, [{"kind": "x", "b": 1}], [{"kind": "x", "b": 1, "x": 1}]),
    "allOf": ({"allOf": [_A, _B]}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "x": 1}]),
    "allOf of one": ({"allOf": [_A], "description": "x"}, [{"a": 1}], [{"a": 1, "x": 1}]),
    "allOf of a reference": (_IN_DEFS, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "x": 1}]),
    "allOf, one says": ({"allOf": [_A, {"additionalProperties": {"type": "integer"}}]}, [{"a": 1, "x": 2}], []),
    "a reference": ({"$ref": "#/$defs/A", "$defs": {"A": _A}}, [{"a": 1}], [{"a": 1, "x": 1}]),
    "properties beside a reference": (
        {"$ref": "#/$defs/A", "properties": {"c": True}, "$defs": {"A": _A}},
        [{"a": 1, "c": 1}],
        [{"a": 1, "c": 1, "x": 1}],
    ),
    "recursive": (
        _RECURSIVE,
        [{"a": 1, "next": {"a": 2, "one": {"a": 3}}}],
        [{"a": 1, "next": {"a": 2, "x": 1}}, {"a": 1, "one": {"a": 3, "next": {"a": 1}}}],
    ),
    "items": ({"type": "array", "items": _A}, [[{"a": 1}]], [[{"a": 1, "x": 1}]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [_A], "items": _B}, [[{"a": 1}, {"b": 1}]], [[{"a": 1}, {"b": 1, "x": 1}]],
    ),
    "a property called properties": (
        {"properties": {"properties": {"const": {"properties": {}}}}}, [{"properties": {"properties": {}}}], [{"x": 1}],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base_tokens() -> TokenTable:
    return TokenTable.load(BASE_DIR)


@pytest.mark.parametrize(("schema", "inside", "outside"), CLOSED.values(), ids=CLOSED.keys())
def test_a_schema_that_does_not_say_is_closed(
    base_tokens: TokenTable, schema: dict[str, Any], inside: list[Any], outside: list[Any]
) -> None:
    tokenizer = TextTokenizer.load(BASE_DIR)

    def fits(value: Any, *, closes_objects: bool) -> bool:
        constraint = schema_constraint(schema, closes_objects=closes_objects)
        matcher = compile_grammar(base_tokens, grammar_of(constraint, {}))
        tokens = tokenizer.encode(json.dumps(value), add_special_tokens=False)
        return all(map(matcher.consume_token, tokens)) and bool(matcher.is_accepting())

    assert [fits(value, closes_objects=True) for value in inside] == [True] * len(inside)
    assert [fits(value, closes_objects=True) for value in outside] == [False] * len(outside)
    assert [fits(value, closes_objects=False) for value in outside] == [True] * len(outside)


class Written(BaseModel):
    """Types whose schemas have formats of pydantic's own."""

    path: Path
    secret: SecretStr
    day: date


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"path": 3}, False),
        ({"day": "today"}, False),
    ],
    ids=str,
)
def test_schemas_of_pydantic_are_followed(base_tokens: TokenTable, change: dict[str, Any], fits: bool) -> None:
    value = {"path": "a/b", "secret": "s", "day": "2024-02-03", **change}
    matcher = compile_grammar(base_tokens, grammar_of(schema_constraint(Written.model_json_schema()), {}))
    tokens = TextTokenizer.load(BASE_DIR).encode(json.dumps(value), add_special_tokens=False)
    assert (all(map(matcher.consume_token, tokens)) and bool(matcher.is_accepting())) == fits


def test_values_that_look_like_formats_stay() -> None:
    schema = {"const": {"format": "path"}, "properties": {"format": {"format": "path", "type": "string"}}}
    assert without_unknown_formats(schema) == {**schema, "properties": {"format": {"type": "string"}}}


_ONE: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
WAYS: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _ONE}}},
    "structural_tag": {"response_format": {
        "type": "structural_tag", "format": {"type": "json_schema", "json_schema": _ONE}
    }},
    "structured_outputs": {"structured_outputs": {"json": _ONE}},
    "structured_outputs.structural_tag": {"structured_outputs": {"structural_tag": json.dumps(
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": _ONE}}
    )}},
    "guided_json": {"guided_json": json.dumps(_ONE)},
    "json_schema": {"json_schema": _ONE},
}  # fmt: skip


@pytest.mark.parametrize("asked", WAYS.values(), ids=WAYS.keys())
def test_answers_stop_where_the_schema_names_no_more(server: Server, asked: dict[str, Any]) -> None:
    """A bias has the model go on wherever it may."""
    bias = {str(token): 100 for token in _tokens(server, ",")}
    body = {"prompt": "the", "max_tokens": 40, "temperature": 0, "logit_bias": bias, **asked}

    def ending(**more: Any) -> str:
        answer = server.post("/v1/completions", json={**body, **more}).json()
        return str(answer["choices"][0]["finish_reason"])

    assert ending() == ending(disable_additional_properties=True) == "stop"
    assert ending(disable_additional_properties=False) == "length"
    if "structured_outputs" in asked:
        inner = {**asked["structured_outputs"], "disable_additional_properties": False}
        assert ending(structured_outputs=inner, disable_additional_properties=True) == "length"


def test_responses_are_closed_and_opened_too(server: Server) -> None:
    bias = {str(token): 100 for token in _tokens(server, ",")}
    asked = {"text": {"format": {"type": "json_schema", "name": "a", "schema": _ONE}}, "logit_bias": bias}
    body = {"input": "the", "max_output_tokens": 40, "temperature": 0, **asked}
    closed, opened = (
        server.post("/v1/responses", json=body | more).json() for more in ({}, {"disable_additional_properties": False})
    )
    assert (closed["status"], opened["status"]) == ("completed", "incomplete")


def test_schemas_that_apply_together_without_end_are_bounded() -> None:
    chain: dict[str, Any] = {str(at): {"$ref": f"#/$defs/{at + 1}", "title": "x"} for at in range(2000)} | {"2000": _A}
    many = {f"p{at}": {"$ref": "#/$defs/0", "properties": {}} for at in range(2000)}
    with pytest.raises(ConstraintError, match="too many schemas that apply together"):
        schema_constraint({"$defs": chain, "properties": many})
