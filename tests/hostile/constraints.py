"""Structured output and tools that are mostly right: schemas, expressions, grammars, tags, definitions, calls."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.hostile.values import VALUES

_NAMES = st.sampled_from(["a", "b", "", "é", '"', "$ref", "\x00", "get_time"])
_LEAVES = st.sampled_from(
    [
        True,
        False,
        {},
        {"type": "string"},
        {"type": "string", "pattern": "^a+$"},
        {"type": "string", "format": "date-time"},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 1, "maximum": 9},
        {"type": "number", "multipleOf": 0.1},
        {"type": ["null", "boolean"]},
        {"enum": ["a", 1, None]},
        {"enum": []},
        {"const": {"a": [1]}},
        {"$ref": "#"},
        {"$ref": "#/$defs/a"},
        {"$ref": "http://x"},
        {"type": "nothing"},
        {"not": {}},
    ]
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(_NAMES, inner, max_size=3)
    return (
        st.builds(lambda given: {"type": "object", "properties": given, "required": list(given)[:1]}, properties)
        | st.builds(lambda given: {"type": "object", "additionalProperties": given}, inner)
        | st.builds(lambda given: {"type": "array", "items": given, "minItems": 1, "maxItems": 3}, inner)
        | st.builds(lambda given: {"prefixItems": given}, st.lists(inner, max_size=2))
        | st.builds(
            lambda key, given: {key: given}, st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, max_size=2)
        )
        | st.builds(lambda given: {"$defs": given, "$ref": "#/$defs/a"}, properties)
    )


SCHEMAS = st.recursive(_LEAVES, _larger, max_leaves=5) | VALUES

REGEX_PIECES = r"a [a-z] [^\x00] . \d \w+ ( ) | * + ? {2} {3,1} {9999} (?: (?= \b \p{L} ^ $ é \ [ ] (?P<x> (?i)"
GRAMMAR_PIECES = """start: root ::= "a" /a+/ x | ( ) * + ? [a-z] %json {"type":"string"} <[3]> <|im_end|> %ignore x: y:
y[max_tokens=3]: %lark { } & ~2 ::= "" #"""
_REGEXES = st.lists(st.sampled_from(REGEX_PIECES.split()), max_size=8).map("".join)
_GRAMMARS = st.lists(st.sampled_from([*GRAMMAR_PIECES.split(), "\n"]), max_size=10).map(" ".join)
_TAGS = st.builds(
    lambda kind, begin, end, schema: {
        "type": "structural_tag",
        "format": {"type": kind, "begin": begin, "end": end, "content": {"type": "json_schema", "json_schema": schema}},
    },
    st.sampled_from(["tag", "triggered_tags", "sequence", "any_text", ""]),
    st.sampled_from(["<a>", "", "<|im_end|>"]),
    st.sampled_from(["</a>", "", ["</a>"]]),
    SCHEMAS,
)
_CHOICES = st.lists(st.text(max_size=4), max_size=4)
_OBJECTS = st.builds(
    lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, SCHEMAS
) | st.sampled_from([{"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}])

_OUTPUTS = {
    "json": SCHEMAS,
    "regex": _REGEXES,
    "choice": _CHOICES,
    "grammar": _GRAMMARS,
    "json_object": st.booleans(),
    "structural_tag": _TAGS.map(json.dumps),
    "whitespace_pattern": _REGEXES,
    "disable_any_whitespace": st.booleans(),
}
_FIELDS = {
    "response_format": _OBJECTS | _TAGS,
    "structured_outputs": st.fixed_dictionaries({}, optional=_OUTPUTS) | VALUES,
    "guided_json": SCHEMAS | SCHEMAS.map(json.dumps),
    "guided_regex": _REGEXES,
    "guided_choice": _CHOICES,
    "guided_grammar": _GRAMMARS,
    "regex": _REGEXES,
    "ebnf": _GRAMMARS,
}


def constrained() -> st.SearchStrategy[tuple[str, Any]]:
    """A completion or a chat whose answer is to be of a form, seldom of two."""
    fields = st.sampled_from(sorted(_FIELDS)).flatmap(lambda name: st.fixed_dictionaries({name: _FIELDS[name]}))
    given_twice = st.fixed_dictionaries({}, optional=_FIELDS)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    starts: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
        ("/v1/chat/completions", chat),
    ]
    return st.builds(
        lambda start, given: (start[0], start[1] | given),
        st.sampled_from(starts),
        fields | fields | fields | given_twice,
    )


def with_tools() -> st.SearchStrategy[tuple[str, Any]]:
    """A chat with tools: their definitions, which of them is to be called, and calls of earlier messages."""
    name = st.sampled_from(["get_time", "a", "", "é", "a b", "x" * 70])
    function = st.fixed_dictionaries(
        {"name": name}, optional={"parameters": SCHEMAS, "description": st.text(max_size=5)}
    )
    function |= VALUES
    tools = st.lists(
        st.fixed_dictionaries({"type": st.sampled_from(["function", "x"]), "function": function}), max_size=3
    )
    named = st.builds(lambda one: {"type": "function", "function": {"name": one}}, name)
    arguments = st.sampled_from(['{"a": 1}', "{", "[]", "", "1", '{"a": ' + "[" * 300, '"\\ud800"']) | VALUES
    calls = st.lists(
        st.fixed_dictionaries(
            {
                "id": st.text(max_size=3),
                "type": st.just("function"),
                "function": st.fixed_dictionaries({"name": name, "arguments": arguments}),
            }
        ),
        max_size=2,
    )
    history = st.builds(
        lambda made, told: [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": made},
            {"role": "tool", "tool_call_id": "x", "content": told},
        ],
        calls,
        st.text(max_size=5),
    )
    return st.fixed_dictionaries(
        {
            "messages": st.just([{"role": "user", "content": "a"}]) | history,
            "max_tokens": st.just(3),
            "tools": tools | VALUES,
        },
        optional={
            "tool_choice": st.sampled_from(["auto", "none", "required", "x"]) | named,
            "parallel_tool_calls": st.booleans(),
            "stream": st.booleans(),
            "response_format": _OBJECTS,
        },
    ).map(lambda body: ("/v1/chat/completions", body))
