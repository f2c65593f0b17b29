"""What a parameter's schema says of its value: asked while answers are read, so that no schema may make it long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from service.text.answer_reader import AnswerReader, ParserConfig
from service.text.calls.call import Arguments, Begun, Call
from service.text.calls.formats import FORMATS
from service.text.calls.value_kinds import Kinds

TEXT = {"type": "string"}


def parameters(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def levels(number: int, last: dict[str, Any]) -> dict[str, Any]:
    """Each level has ten alternatives, all of them the next level."""
    named = {f"l{level}": {"anyOf": [{"$ref": f"#/$defs/l{level + 1}"}] * 10} for level in range(number)}
    return {**parameters(x={"$ref": "#/$defs/l0"}), "$defs": {**named, f"l{number}": last}}


class Counted(list[Any]):
    """How often somebody goes through it."""

    num_looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_looks += 1
        return super().__iter__()


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        (parameters(x={"anyOf": [*[{"$ref": "#/properties/x"}] * 100, TEXT]}), {"string"}),
        (parameters(x={"$ref": "#/properties/x"}), set()),
        (levels(20, TEXT), {"string"}),
        (levels(20, {"type": "number"}), {"number", "integer"}),
        (levels(20, {}), set()),
        (parameters(x={"oneOf": [{"const": f"text {number}"} for number in range(200)]}), {"string"}),
        (parameters(x={"oneOf": [{"const": f"text {number}"} for number in range(300)]}), set()),
        (parameters(x={"enum": ["a", None, 1.5, True, [], {}]}),
         {"string", "null", "number", "integer", "boolean", "array", "object"}),
    ],
)  # fmt: skip
def test_each_part_of_a_schema_is_looked_at_once(schema: dict[str, Any], kinds: set[str]) -> None:
    assert Kinds(schema).of("x") == kinds


_MODE = {"enum": ["auto", 1, True, None, "2"]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "array"}, "['a', \"b's\", None]", ["a", "b's", None]),
        ({"type": "array"}, "('a', True)", ["a", True]),
        ({"type": "array"}, "\"['a']\"", ["a"]),
        ({"items": TEXT}, "[\n  'a',\n]", ["a"]),
        ({"type": "object"}, "{'a': True, 'b': None, 'c': [1, 2.5]}", {"a": True, "b": None, "c": [1, 2.5]}),
        ({"type": "object"}, '{"a": "two\nlines",}', {"a": "two\nlines"}),
        ({"type": "object"}, "{1: 'a', -2.5: {True: None}}", {"1": "a", "-2.5": {"true": None}}),
        ({"type": "object"}, "{'a': '''it's\n'so''', 'b': \"\"\"\"\"\"}", {"a": "it's\n'so", "b": ""}),
        ({"type": "object"}, "{[1]: 2}", "{[1]: 2}"),
        ({"type": "array"}, "{'a', 'b'}", ["a", "b"]),
        ({"type": "array"}, "[1_000, .5, -.5e3]", [1000, 0.5, -500.0]),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "['a']", ["a"]),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [TEXT, {"type": "array"}]}, "['a']", ["a"]),
        ({"anyOf": [TEXT, {"type": "integer"}]}, "True", "True"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        (TEXT, "['a']", "['a']"),
        (TEXT, "None", "None"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, " FALSE ", False),
        ({"type": "integer"}, "+5", 5),
        ({"type": "integer"}, "'5'", 5),
        ({"type": "number"}, "5.", 5.0),
        ({"type": "number"}, "half", "half"),
        ({"enum": ["C", "F"]}, '"C"', "C"),
        ({"enum": ["C", "F"]}, " F ", "F"),
        ({"enum": ["C", "F"]}, "K", "K"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"allOf": [{"enum": [1, 2]}]}, "'2'", 2),
        (_MODE, "auto", "auto"),
        (_MODE, "True", True),
        (_MODE, "1", 1),
        (_MODE, "None", None),
        (_MODE, "2", "2"),
        ({"const": "x"}, "'x'", "x"),
        ({}, "{'a': True}", {"a": True}),
        ({}, "it's", "it's"),
    ],
)
def test_a_value_becomes_what_the_schema_says(schema: dict[str, Any], text: str, value: Any) -> None:
    written = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    reader = AnswerReader(ParserConfig(calls=FORMATS["qwen3_coder"], tools={"f": parameters(x=schema)}))
    (call,) = reader.push(written)
    assert isinstance(call, Call)
    read = json.loads(call.arguments)["x"]
    assert (read, type(read)) == (value, type(value))


def test_a_long_list_of_texts_is_looked_at_once_for_a_call() -> None:
    texts = Counted(f"text {number}" for number in range(1000))
    names = [f"x{number}" for number in range(20)]
    named = parameters(**{name: {"$ref": "#/$defs/Text"} for name in names})
    tools = {"f": {**named, "$defs": {"Text": {"enum": texts}}}}
    written = "".join(f"<parameter={name}>\ntext 1\n</parameter>\n" for name in names)
    text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    arguments = "{" + ", ".join(f'"{name}": "text 1"' for name in names) + "}"

    whole = AnswerReader(ParserConfig(calls=FORMATS["qwen3_coder"], tools=tools))
    assert whole.push(text) == [Call("f", arguments)]
    assert texts.num_looks == 1

    in_pieces = AnswerReader(ParserConfig(calls=FORMATS["qwen3_coder"], tools=tools), in_pieces=True)
    found = [one for char in text.removesuffix("</tool_call>") for one in in_pieces.push(char)]
    assert found[0] == Begun("f") and "".join(one.text for one in found if isinstance(one, Arguments)) == arguments
    assert texts.num_looks == 2
