"""Thoughts, words and calls are found in an answer's text, wherever its pieces are cut."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.text.answer_reader import AnswerReader, ParserConfig, Said, Thought
from service.text.calls.call import Arguments, Begun, Call
from service.text.calls.formats import FORMATS, format_of_template

_INTEGER = {"type": "integer"}
TOOLS: dict[str, Any] = {
    "add": {"type": "object", "properties": {"a": _INTEGER, "b": _INTEGER}},
    "now": {},
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "typed": {
        "type": "object",
        "properties": {
            "text": {"type": "string"}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {},
            "number": {"type": ["number", "null"]}, "list": {"type": "array"}, "on": {"type": "boolean"},
            "unit": {"$ref": "#/$defs/Unit"}, "digit": {"enum": ["1", "2"]},
        },
        "$defs": {"Unit": {"enum": ["C", "1"]}},
    },
}  # fmt: skip
ADD, NOW = Call("add", '{"a": 1, "b": 2}'), Call("now", "{}")


def xml(name: str, **values: str) -> str:
    """A call as Qwen3-Coder's template writes it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


# Format, what a model of it may write, and what that says.
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
WRITTEN: list[tuple[str, str, list[Said]]] = [
    ("hermes", HERMES_CALL, [ADD]),
    ("hermes", HERMES_CALL + '\n<tool_call>\n{"name": "now"}\n</tool_call>', [ADD, NOW]),
    ("hermes", "Let me see. \n\n" + HERMES_CALL + "\nSo.\n", ["Let me see.", ADD, "So.\n"]),
    ("hermes", HERMES_CALL.removesuffix("\n</tool_call>"), [ADD]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>\\""}}</tool_call>',
     [Call("f", '{"x": "</tool_call>\\""}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1.0, "m": 1e999, "k": 12345678901234567890}}</tool_call>',
     [Call("f", '{"n": 1.0, "m": 1e999, "k": 12345678901234567890}')]),
    ("qwen3_coder", xml("add", a="1", b="2"), [ADD]),
    ("qwen3_coder", f"Wait.\n{xml('add', a='1', b='2')}\n{xml('now')} So.", ["Wait.", ADD, NOW, "So."]),
    ("qwen3_coder", xml("add", a="1", b="2").removesuffix("\n</tool_call>"), [ADD]),
    ("qwen3_coder", "<tool_call><function=now></function></tool_call>", [NOW]),
    ("qwen3_coder", xml("add", a="1", b="2").removeprefix("<tool_call>\n") + " So.", [ADD, "So."]),
    ("qwen3_coder", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', [ADD]),
    ("qwen3_coder", xml("typed", text="1", maybe="null", any="[1]", number="1.50", list='["x"]', on="True"),
     [Call("typed", '{"text": "1", "maybe": null, "any": [1], "number": 1.50, "list": ["x"], "on": true}')]),
    ("qwen3_coder", xml("typed", maybe="5", any="x y", number="None", list="x", unit="1", digit="2", m="1"),
     [Call("typed", '{"maybe": "5", "any": "x y", "number": null, "list": "x", "unit": "1", "digit": "2", "m": 1}')]),
    ("qwen3_coder", xml("typed", text="\n<parameter=x>\n</function></tool_call>\n", any="a <b>"),
     [Call("typed", '{"text": "\\n<parameter=x>\\n</function></tool_call>\\n", "any": "a <b>"}')]),
    ("qwen3_coder", xml("other.tool", x='"é"', y='{"a": [NaN]}'),
     [Call("other.tool", '{"x": "é", "y": "{\\"a\\": [NaN]}"}')]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
     [ADD, NOW]),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}\n', [NOW]),
    ("llama3_json", '{"function": "now", "parameters": {}};', [NOW]),
    ("llama3_json", 'As {JSON}: {"name": "add", "parameters": {"a": 1, "b": 2}} {sic}',
     ["As {JSON}:", ADD, "{sic}"]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "{\\"x\\"}"}}',
     [Call("get_weather", '{"city": "{\\"x\\"}"}')]),
    ("mistral", '[TOOL_CALLS]add{"a": 1, "b": 2} Done.', [ADD, "Done."]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now", "arguments": {}}]',
     [ADD, NOW]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now[ARGS]{}', [ADD, NOW]),
    ("mistral", 'Yes.[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}', ["Yes.", NOW]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "]}", "n": 10}}]', [Call("f", '{"x": "]}", "n": 10}')]),
    ("lfm2", "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>", [ADD]),
    ("lfm2", "<|tool_call_start|>[add(a=1, b=2), now()]<|tool_call_end|>Adding.", [ADD, NOW, "Adding."]),
    ("lfm2", "<|tool_call_start|>[now()]", [NOW]),
    ("lfm2", '<|tool_call_start|>[{"name": "add", "arguments": {"a": 1, "b": 2}}]<|tool_call_end|>', [ADD]),
    ("lfm2", "<|tool_call_start|>[f(x=\"a]\", y='it\\'s', z=\"two\nlines\\n\")]<|tool_call_end|>",
     [Call("f", '{"x": "a]", "y": "it\'s", "z": "two\\nlines\\n"}')]),
    ("lfm2", "<|tool_call_start|>[f(from=07, t=true, n=None, l=[1, -2.50, {'k': (False,)}], e=1e9)]<|tool_call_end|>",
     [Call("f", '{"from": 7, "t": true, "n": null, "l": [1, -2.50, {"k": [false]}], "e": 1e9}')]),
    ("lfm2", "<|tool_call_start|>[f(nul='\\x00', pair='\\ud83d\\ude00', half='\\ud800', odd='\\q')]<|tool_call_end|>",
     [Call("f", '{"nul": "\\u0000", "pair": "😀", "half": "\\ud800", "odd": "\\\\q"}')]),
    ("lfm2", "<|tool_call_start|>[f(x='it's Bob's', y=\"a \"b\" c\")]<|tool_call_end|>",
     [Call("f", '{"x": "it\'s Bob\'s", "y": "a \\"b\\" c"}')]),
    ("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>[now()]", [NOW, "[now()]"]),
]  # fmt: skip

# How models miss their format, and what they mean.
MENDED: list[tuple[str, str, list[Said]]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a\n\tb\x01"}}</tool_call>',
     [Call("f", '{"x": "a\\n\\tb\\u0001"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "C:\\dir it\\\'s \\u12"}}</tool_call>',
     [Call("f", '{"x": "C:\\\\dir it\'s \\\\u12"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "say "hi" to", "y": 1}}</tool_call>',
     [Call("f", '{"x": "say \\"hi\\" to", "y": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": True, "y": [None, False,],}}</tool_call>',
     [Call("f", '{"x": true, "y": [null, false]}')]),
    ("hermes", """<tool_call>{"name": "f", "arguments": {'x': 'it\\'s "a"', 'y': ['b's', True]}}</tool_call>""",
     [Call("f", '{"x": "it\'s \\"a\\"", "y": ["b\'s", true]}')]),
    ("hermes", HERMES_CALL.replace("}}", '}}\n{"name": "now", "arguments": {}}') + HERMES_CALL, [ADD, NOW, ADD]),
    ("hermes", HERMES_CALL.replace("}}", "}}}") + HERMES_CALL, [ADD, ADD]),
    ("hermes", HERMES_CALL.replace("}}", "}") + HERMES_CALL, [ADD, ADD]),
    ("hermes", HERMES_CALL.replace("}}\n", "") + HERMES_CALL + " So.", [ADD, ADD, "So."]),
    ("hermes", HERMES_CALL.replace("}}\n", "}]}"), [ADD]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": {"y": [1, 2}}}</tool_call>',
     [Call("f", '{"x": {"y": [1, 2]}}')]),
    ("hermes", '<tool_call>{"arguments": {"x": "a\nb"}, "name": "f"}}</tool_call>', [Call("f", '{"x": "a\\nb"}')]),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'x': 'a', 'y': True}}</tool_call>",
     [Call("f", '{"x": "a", "y": true}')]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"id": "1", "name": "now", "type": "function", "arguments": {}}</tool_call>', [NOW]),
    ("hermes", '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now", "arguments": {}}]',
     [ADD, NOW]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call> so', [Call("f", '{"x": NaN}'), "so"]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}} and so on</tool_call>',
     [NOW, "} and so on</tool_call>"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "open}}\n</tool_call> So.',
     [Call("f", '{"x": "open}}'), "So."]),
    ("hermes", '<tool_call>\n{{"name": "add", "arguments": {"a": 1, "b": 2}}}\n</tool_call>', [ADD]),
    ("hermes", '<tool_call>{\n{"name": "add", "arguments": {{"a": 1, "b": 2}}}}</tool_call>', [ADD]),
    ("llama3_json", '{{"name": "add", "parameters": {"a": 1, "b": 2}}}', [ADD]),
    ("hermes", HERMES_CALL.replace("{", "```json\n{", 1).replace("}}", "}}\n```") + " So.", [ADD, "So."]),
    ("hermes", HERMES_CALL.replace("</", "<") + "\nSo.", [ADD, "So."]),
    ("hermes", HERMES_CALL.replace("</tool_call>", "") + HERMES_CALL, [ADD, ADD]),
    ("qwen3_coder", HERMES_CALL.replace("\n</tool_call>", "") + HERMES_CALL, [ADD, ADD]),
    ("qwen3_coder", "<tool_call>\n" + xml("add", a="1", b="2"), [ADD]),
    ("qwen3_coder", xml("add", a="1", b="2").replace("=add", '="add"').replace("=a>", "='a'>"), [ADD]),
    ("qwen3_coder", xml("add", a="1", b="2").replace("\n</parameter>", "", 1), [ADD]),
    ("qwen3_coder", xml("add", a="1", b="2").replace("</parameter>", "</parameter>\n</parameter>"), [ADD]),
    ("qwen3_coder", xml("add", a="1", b="2").replace("</parameter>", "</parameter>>"), [ADD]),
    ("qwen3_coder", xml("typed", text="x", any="y").replace("\n</parameter>", "", 1),
     [Call("typed", '{"text": "x", "any": "y"}')]),
    ("qwen3_coder", xml("typed", text="x\n<parameter=text>\n<parameter=a b>", any="y"),
     [Call("typed", '{"text": "x\\n<parameter=text>\\n<parameter=a b>", "any": "y"}')]),
    ("qwen3_coder", xml("get_weather", city="Bern").replace("</parameter>\n", "") + "\n" + xml("now"),
     [Call("get_weather", '{"city": "Bern"}'), NOW]),
    ("llama3_json", '[{"name": "add", "parameters": {"a": 1, "b": 2}}, {"name": "now", "parameters": {}}]', [ADD, NOW]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}, {"name": "now", "parameters": {}}', [ADD, NOW]),
    ("llama3_json", '<|python_tag|>[{"name": "add", "parameters": {"a": 1, "b": 2}}]', [ADD]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}} So [', [NOW, "So ["]),
    ("mistral", '[TOOL_CALLS] add [CALL_ID] a1B2c3D4e [ARGS] {"a": 1, "b": 2}', [ADD]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>",
     [Call("now", '{"a": 1}')]),
    ("qwen3_coder", xml("get_weather", city="Bern").replace("</parameter>\n", ""),
     [Call("get_weather", '{"city": "Bern"}')]),
    ("qwen3_coder", xml("add", a="1", b="2").replace("</function>\n", "") + " So.", [ADD, "So."]),
    ("qwen3_coder", xml("f", a="1").replace("</function>", "<parameter=a>2</parameter></function>"),
     [Call("f", '{"a": 1, "a": 2}')]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}}', [ADD]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}}; {"name": "now", "parameters": {}', [ADD, NOW]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}; {"name": "now", "parameters": {}}', [ADD, NOW]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2', [ADD]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}}, {"name": "now", "arguments": {}}]',
     [ADD, NOW]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, {"name": "now", "arguments": {}}',
     [ADD, NOW]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}}[TOOL_CALLS]now[ARGS]{}', [ADD, NOW]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2[TOOL_CALLS]now[ARGS]{', [ADD, NOW]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": }', [Call("add", '{"a": }')]),
    ("lfm2", "<|tool_call_start|>[add(a=1, b=2)<|tool_call_end|>So.", [ADD, "So."]),
    ("lfm2", "<|tool_call_start|>[add(a=1, b=2<|tool_call_end|>So.", [ADD, "So."]),
    ("lfm2", "<|tool_call_start|>[add(a=1, b=2]<|tool_call_end|>So.", [ADD, "So."]),
    ("lfm2", "<|tool_call_start|>[add(a=1, b=2)), now()]]<|tool_call_end|>", [ADD, NOW]),
    ("lfm2", "<|tool_call_start|>[f(x='a\n\tb')]", [Call("f", '{"x": "a\\n\\tb"}')]),
    ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"x": "a\nb"}}<|tool_call_end|>',
     [Call("f", '{"x": "a\\nb"}')]),
    ("lfm2", "<|tool_call_start|>[f(a=1, a=2)]<|tool_call_end|>", [Call("f", '{"a": 1 a=2)]')]),
    ("lfm2", "<|tool_call_start|>[f(a=" + "[" * 5000 + ")]<|tool_call_end|>",
     [Call("f", "a=" + "[" * 5000 + ")]")]),
]  # fmt: skip

# What begins like a call and is none: all of it is text.
TEXTS = [
    ("hermes", "Use <tool_call> for calls, a < b, <tool_"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", "<tool_call>" + "[" * 5000),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "city": "Bern"}</tool_call>'),
    ("hermes", "<tool_call>```python\nnow()\n```</tool_call>"),
    ("llama3_json", '[{"name": "Bob", "parameters": {}}] is none, [{"a": 1}] and [ neither, nor ['),
    ("llama3_json", "<|python_tag|>[{x} for x in y]"),
    ("qwen3_coder", "Use <tool_call> and <function=f>, a < b, <tool_"),
    ("qwen3_coder", "<tool_call><function=f>so</function></tool_call> and more"),
    ("qwen3_coder", "<tool_call>\n</tool_call>"),
    ("qwen3_coder", "<function=unknown>\n</function>"),
    ("qwen3_coder", "</tool_call> by itself"),
    ("qwen3_coder", '<tool_call>{"name": "f", "argum'),
    ("llama3_json", '{"name": "Bob", "parameters": {}} is no tool, {"a": 1} and {} neither'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", '{ "name'),
    ("mistral", "[TOOL_CALLS] what? {1}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300),
    ("lfm2", "<|tool_call_start|>[f('positional')]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=b)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=it's)]<|tool_call_end|> and more"),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
]


def read(pieces: Iterable[str], reading: ParserConfig, *, is_cut: bool = False) -> list[Said]:
    """What an answer says, with what belongs together joined."""
    reader, joined = AnswerReader(reading), list[Said]()
    for one in [said for piece in pieces for said in reader.push(piece)] + reader.finish(is_cut=is_cut):
        last = joined[-1] if joined else None
        if isinstance(one, str) and isinstance(last, str):
            joined[-1] = last + one
        elif isinstance(one, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + one.text)
        else:
            joined.append(one)
    return joined


def reading_of(name: str, **more: bool) -> ParserConfig:
    return ParserConfig(calls=FORMATS[name], tools=TOOLS, **more)


@pytest.mark.parametrize(("name", "text", "said"), [*WRITTEN, *MENDED])
def test_calls_are_found_and_what_stands_around_them_is_kept(name: str, text: str, said: list[Said]) -> None:
    for how in (read, read_in_pieces):
        assert how([text], reading_of(name)) == said
        assert how(text, reading_of(name)) == said


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    assert read([text], reading_of(name)) == [text]
    assert read(text, reading_of(name)) == [text]


@pytest.mark.parametrize(("name", "text", "said"), WRITTEN)
def test_arguments_are_json(name: str, text: str, said: list[Said]) -> None:
    calls = [one for one in read([text], reading_of(name)) if isinstance(one, Call)]
    assert calls == [one for one in said if isinstance(one, Call)]
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


_FRAGMENTS = sorted({
    *(text for _, text, _ in [*WRITTEN, *MENDED] if len(text) < 200), *(text for _, text in TEXTS if len(text) < 200),
    "<think>", "</think>", "\n", " ", ";", "{", "}", "[", "]", '"', "'", "\\", "<", "</", '{"name"', "word", "é😀",
})  # fmt: skip


@given(
    name=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(st.sampled_from(_FRAGMENTS), max_size=6),
    thinks=st.booleans(),
    is_thinking=st.booleans(),
    data=st.data(),
)
def test_where_the_text_is_cut_changes_nothing(
    name: str, fragments: list[str], thinks: bool, is_thinking: bool, data: st.DataObject
) -> None:
    text = "".join(fragments)
    reading = reading_of(name, thinks=thinks, is_thinking=is_thinking)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    whole = read([text], reading)
    assert read(pieces, reading) == whole
    assert read(text, reading) == whole


def read_in_pieces(pieces: Iterable[str], reading: ParserConfig, *, is_cut: bool = False) -> list[Said]:
    """The same where calls are told as they are written, with the parts of each joined."""
    reader, joined = AnswerReader(reading, in_pieces=True), list[Said]()
    for one in [said for piece in pieces for said in reader.push(piece)] + reader.finish(is_cut=is_cut):
        last = joined[-1] if joined else None
        if isinstance(one, Begun):
            joined.append(Call(one.name, ""))
        elif isinstance(one, Arguments):
            assert isinstance(last, Call), "arguments of nothing"
            joined[-1] = Call(last.name, last.arguments + one.text)
        elif isinstance(one, str) and isinstance(last, str):
            joined[-1] = last + one
        elif isinstance(one, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + one.text)
        else:
            joined.append(one)
    return joined


class TestPieces:
    @given(
        name=st.sampled_from(sorted(FORMATS)),
        fragments=st.lists(st.sampled_from(_FRAGMENTS), max_size=6),
        is_cut=st.booleans(),
        data=st.data(),
    )
    def test_they_join_to_the_whole_wherever_they_are_cut(
        self, name: str, fragments: list[str], is_cut: bool, data: st.DataObject
    ) -> None:
        text = "".join(fragments)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        whole = read([text], reading_of(name), is_cut=is_cut)
        assert read_in_pieces([text], reading_of(name), is_cut=is_cut) == whole
        assert read_in_pieces(pieces, reading_of(name), is_cut=is_cut) == whole
        assert read_in_pieces(text, reading_of(name), is_cut=is_cut) == whole

    @pytest.mark.parametrize(("name", "text", "said"), [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "two words', [Call("f", '{"x": "two words')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "two\\', [Call("f", '{"x": "two')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1, ', [Call("f", '{"x": 1 ')]),
        ("hermes", '<tool_call>{"name": "now", "arg', [Call("now", "")]),
        ("hermes", '<tool_call>{"name": "add"', [Call("add", "")]),
        ("hermes", 'Wait.\n<tool_call>{"name": "ad', ["Wait."]),
        ("hermes", "So a < b, a <", ["So a < b, a <"]),
        ("hermes", HERMES_CALL + "\n<tool_", [ADD]),
        ("hermes", HERMES_CALL + "\nSo <", [ADD, "So <"]),
        ("llama3_json", '{"name": "now", "parameters": {}}; {"n', [NOW]),
        ("llama3_json", '{"name": "Bo', ['{"name": "Bo']),
        ("hermes", HERMES_CALL.removesuffix("_call>"), [ADD]),
        ("hermes", HERMES_CALL.removesuffix("}\n</tool_call>"), [ADD]),
        ("hermes", '<tool_call>{"arguments": {}, "name": "now"}', [NOW]),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", [Call("add", "{")]),
        ("mistral", "[TOOL_CALLS]add[AR", [Call("add", "")]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"na', [ADD]),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1', [Call("add", '{"a": 1')]),
        ("llama3_json", '{"name": "add", "par', [Call("add", "")]),
        ("lfm2", "<|tool_call_start|>[f(a=1, b='tw", [Call("f", '{"a": 1, "b": "tw')]),
        ("lfm2", "<|tool_call_start|>[f(a=1, b=[2, {'c': 'd", [Call("f", '{"a": 1, "b": [2, {"c": "d')]),
        ("lfm2", "<|tool_call_start|>[f(a='it'", [Call("f", '{"a": "it"')]),
        ("lfm2", "<|tool_call_start|>[f(a=1, b=", [Call("f", '{"a": 1')]),
        ("lfm2", "<|tool_call_start|>[add(a=1, b=2)]<|tool_", [ADD]),
        ("lfm2", "<|tool_call_start|>[add(", [Call("add", "")]),
        ("qwen3_coder", xml("get_weather", city="New Yo").split("\n</param")[0],
         [Call("get_weather", '{"city": "New Yo')]),
        ("qwen3_coder", xml("get_weather", city="New Yo").split("ameter>\n</func")[0],
         [Call("get_weather", '{"city": "New Yo')]),
        ("qwen3_coder", xml("add", a="12").split("\n</param")[0], [Call("add", '{"a": 12')]),
        ("qwen3_coder", xml("typed", maybe="12").split("\n</param")[0], [Call("typed", '{"maybe": "12')]),
        ("qwen3_coder", xml("add", a="12").split("\n</func")[0], [Call("add", '{"a": 12')]),
        ("qwen3_coder", xml("add", a="12").split("a>\n")[0], [Call("add", "")]),
        ("qwen3_coder", xml("add", a="1", b="2").removesuffix("_call>"), [ADD]),
    ])  # fmt: skip
    def test_a_call_that_is_cut_off_is_what_there_is_of_it(self, name: str, text: str, said: list[Said]) -> None:
        for how in (read, read_in_pieces):
            assert how([text], reading_of(name), is_cut=True) == said
            assert how(text, reading_of(name), is_cut=True) == said

    @pytest.mark.parametrize("name", sorted(FORMATS))
    def test_an_answer_that_must_be_a_call_is_one_wherever_it_is_cut(self, name: str) -> None:
        text = next(text for form, text, said in WRITTEN if form == name and said[0] == ADD).split(" Done.")[0]
        reading = replace(reading_of(name), tools={"add": TOOLS["add"]}, must_call=True)
        for size in range(1, len(text) + 1):
            (call,) = read([text[:size]], reading, is_cut=True)
            assert isinstance(call, Call) and call.name == "add" and ADD.arguments.startswith(call.arguments.strip())
            assert read_in_pieces(text[:size], reading, is_cut=True) == [call]

    @pytest.mark.parametrize(("name", "text"), [
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "New York", "x": [1, 2]}}'),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "New York", "x": [1, 2]}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "New York", "x": [1, 2]}}]'),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "New York", "x": [1, 2]}'),
        ("lfm2", '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "New York", "x": [1, 2]}}]'),
        ("qwen3_coder", xml("get_weather", city="New York", x="[1, 2]")),
        ("lfm2", "<|tool_call_start|>[get_weather(city='New York', x=[1, 2])]<|tool_call_end|>"),
    ])  # fmt: skip
    def test_they_come_as_they_are_written(self, name: str, text: str) -> None:
        """Long before the end: who is called first of all, and characters as they come where texts are JSON's."""
        reader = AnswerReader(reading_of(name), in_pieces=True)
        at = dict[Any, int]()
        for num_read, char in enumerate(text, 1):
            for one in reader.push(char):
                at.setdefault(one if isinstance(one, Begun) else getattr(one, "text", one), num_read)
        assert at[Begun("get_weather")] <= text.index("New York")
        wanted = {"lfm2": '{"city": "New York"', "qwen3_coder": '{"city": "N'}.get(name, "N")
        wanted = "N" if '"name"' in text else wanted
        assert at[wanted] <= text.index("[1, 2]")

    def test_calls_that_were_not_asked_for_are_left_out(self) -> None:
        reading = ParserConfig(calls=FORMATS["hermes"], tools=TOOLS, max_calls=1)
        assert read_in_pieces(HERMES_CALL + HERMES_CALL + " so", reading) == [ADD, "so"]


@given(name=st.sampled_from(sorted(FORMATS)), text=st.text())
def test_a_text_without_marks_stays_as_it_is(name: str, text: str) -> None:
    assert read([text], reading_of(name)) == ([text] if text else [])


def test_one_call_is_kept_where_one_is_asked_for() -> None:
    reading = ParserConfig(calls=FORMATS["hermes"], tools=TOOLS, max_calls=1)
    assert read([HERMES_CALL + HERMES_CALL + " so"], reading) == [ADD, "so"]


class TestThoughts:
    READING = ParserConfig(thinks=True)
    OPENED = ParserConfig(thinks=True, is_thinking=True)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("<think>\nhm\n\nso\n</think>\n\nYes.\n", [Thought("hm\n\nso"), "Yes.\n"]),
            ("\n<think>hm</think>Yes.", [Thought("hm"), "Yes."]),
            ("<think>\n\n</think>\n\nYes.", ["Yes."]),
            ("<think>cut </thi", [Thought("cut </thi")]),
            ("No <think>here</think>.", ["No <think>here</think>."]),
            (" \nplain", [" \nplain"]),
            ("<thin", ["<thin"]),
        ],
    )
    def test_they_stand_at_the_beginning_between_marks(self, text: str, said: list[Said]) -> None:
        assert read([text], self.READING) == said
        assert read(text, self.READING) == said

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("hm</think>Yes.", [Thought("hm"), "Yes."]),
            ("\nhm\n", [Thought("hm")]),
            ("<think>hm</think>\nYes.", [Thought("hm"), "Yes."]),
            ("</think>Yes. </think>", ["Yes. </think>"]),
        ],
    )
    def test_the_prompt_may_have_begun_them(self, text: str, said: list[Said]) -> None:
        assert read([text], self.OPENED) == said
        assert read(text, self.OPENED) == said

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("hermes", f"hm\n{HERMES_CALL}", [Thought("hm"), ADD]),
            ("hermes", f"hm\n{HERMES_CALL}\n{HERMES_CALL}\n", [Thought("hm"), ADD, ADD]),
            ("hermes", f"hm\n{HERMES_CALL} so", [Thought(f"hm\n{HERMES_CALL} so")]),
            ("hermes", f"By <tool_call>\n{HERMES_CALL}", [Thought(f"By <tool_call>\n{HERMES_CALL}")]),
            ("hermes", "hm\n<tool_", [Thought("hm\n<tool_")]),
            ("hermes", HERMES_CALL.replace("add", "no"), [Thought(HERMES_CALL.replace("add", "no"))]),
            ("qwen3_coder", f"hm\n\n{xml('add', a='1', b='2')}", [Thought("hm"), ADD]),
        ],
    )
    def test_calls_end_a_thought_whose_own_end_is_missing(self, name: str, text: str, said: list[Said]) -> None:
        for how in (read, read_in_pieces):
            assert how([text], reading_of(name, thinks=True, is_thinking=True)) == said
            assert how(text, reading_of(name, thinks=True, is_thinking=True)) == said

    def test_a_thought_that_is_cut_in_a_call_is_a_thought(self) -> None:
        reading = reading_of("hermes", thinks=True, is_thinking=True)
        assert read(f"hm\n{HERMES_CALL}", reading, is_cut=True) == [Thought(f"hm\n{HERMES_CALL}")]

    def test_calls_come_after_them(self) -> None:
        text = f"<think>\n{HERMES_CALL}\n</think>\n\n{HERMES_CALL}"
        assert read([text], reading_of("hermes", thinks=True)) == [Thought(HERMES_CALL), ADD]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<tool_call>\\n' + call | tojson }}", "hermes"),
        ("'<tool_call>\\n<function=' + call.name + '>\\n<parameter=' + key + '>'", "qwen3_coder"),
        ("'<tool_call>\\n<function=' + call.name + '>' + call.arguments | tojson", None),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|tool_list_start|>{{ tools }}<|tool_list_end|>", "lfm2"),
        ("{{ '<|start_header_id|>ipython<|end_header_id|>' }}", "llama3_json"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>", None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_the_chat_template_tells_the_format(source: str, name: str | None) -> None:
    found = format_of_template(source)
    assert (None if found is None else found.name) == name


class Searched(str):
    """A template that counts how often it is searched for a mark; each such search goes through it once."""

    num_searches = 0

    def __contains__(self, mark: object) -> bool:
        self.num_searches += 1
        return super().__contains__(mark)  # type: ignore[operator]

    def find(self, *arguments: Any) -> int:
        self.num_searches += 1
        return super().find(*arguments)


@pytest.mark.parametrize("num_marks", [1, 100_000])
def test_a_template_is_searched_a_few_times_however_often_it_repeats_a_mark(num_marks: int) -> None:
    source = Searched("{# tools " + "<function=" * num_marks + " #}")
    assert format_of_template(source) is None
    assert source.num_searches == 8


def test_ids_of_calls_differ_and_are_what_templates_want() -> None:
    for form in FORMATS.values():
        assert form.new_id() != form.new_id()
    assert len(FORMATS["mistral"].new_id()) == 9 and FORMATS["mistral"].new_id().isalnum()


def texts_in(whole: object) -> Iterator[str]:
    """All texts that an object holds, itself or by what it holds."""
    seen: set[int] = set()
    parts = [whole]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            yield part
        elif id(part) not in seen and not isinstance(part, type | FunctionType | ModuleType):
            seen.add(id(part))
            parts.extend(part.values() if isinstance(part, dict) else getattr(part, "__dict__", {}).values())
            parts.extend(part if isinstance(part, list | tuple | deque | set | frozenset) else ())


@pytest.mark.parametrize(
    ("begin", "blank", "end", "said"),
    [
        ("", "\n", "So", "{}So"),
        ("", "\N{NO-BREAK SPACE}", "So", "{}So"),
        ("<think>", "\n", "So", "So"),
        ("<think>So", "\n", "</think>So", "SoSo"),
        ("So", " ", "!", "So{}!"),
        ("So", "\N{NO-BREAK SPACE}", "!", "So{}!"),
    ],
)
@pytest.mark.parametrize("is_thinking", [False, True])
def test_blanks_that_wait_are_not_looked_at_anew(
    begin: str, blank: str, end: str, said: str, is_thinking: bool
) -> None:
    """No text that is kept back grows with the answer, so that each piece costs as much as it is long."""
    reader = AnswerReader(ParserConfig(FORMATS["hermes"], TOOLS, thinks=True, is_thinking=is_thinking))
    marks = set(texts_in(reader))
    found = reader.push(begin)
    for _ in range(200):
        found += reader.push(blank)
        assert all(len(text) <= len("</tool_call>") for text in texts_in(reader) if text not in marks)
    found += [*reader.push(end), *reader.finish()]
    text = "".join(one.text if isinstance(one, Thought) else one for one in found if isinstance(one, Thought | str))
    is_thought = is_thinking and not begin and blank == "\n"
    assert text == (said.format("") if is_thought else said.format(blank * 200))


def test_separators_that_wait_are_not_looked_at_anew() -> None:
    reader = AnswerReader(ParserConfig(FORMATS["llama3_json"], TOOLS))
    marks = set(texts_in(reader))
    found = reader.push('{"name": "now", "parameters": {}}')
    for _ in range(200):
        found += reader.push("; ")
        assert all(len(text) <= len("; ") for text in texts_in(reader) if text not in marks)
    assert found == [NOW]
    assert reader.push("So") == ["; " * 200 + "So"]
