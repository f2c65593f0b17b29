"""What a parameter's schema says of its value: asked while answers are read, so that no schema may make it long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service.text.answer_reader import AnswerReader, Reading
from service.text.calls.call_parser import Arguments, Begun, Call
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


def test_a_long_list_of_texts_is_looked_at_once_for_a_call() -> None:
    texts = Counted(f"text {number}" for number in range(1000))
    names = [f"x{number}" for number in range(20)]
    named = parameters(**{name: {"$ref": "#/$defs/Text"} for name in names})
    tools = {"f": {**named, "$defs": {"Text": {"enum": texts}}}}
    written = "".join(f"<parameter={name}>\ntext 1\n</parameter>\n" for name in names)
    text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    arguments = "{" + ", ".join(f'"{name}": "text 1"' for name in names) + "}"

    whole = AnswerReader(Reading(calls=FORMATS["qwen3_coder"], tools=tools))
    assert whole.push(text) == [Call("f", arguments)]
    assert texts.num_looks == 1

    in_pieces = AnswerReader(Reading(calls=FORMATS["qwen3_coder"], tools=tools), in_pieces=True)
    found = [one for char in text.removesuffix("</tool_call>") for one in in_pieces.push(char)]
    assert found[0] == Begun("f") and "".join(one.text for one in found if isinstance(one, Arguments)) == arguments
    assert texts.num_looks == 2
