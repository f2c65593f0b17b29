"""Grammars of tool calls: each format's calls, with arguments that are valid for the tools' JSON schemas, in Lark.

They spell the formats as models were trained on them; `service.text.calls` reads more than that. Nothing here imports
llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from service.grammars.constraints import MAX_CONSTRAINT_BYTES, closed_schema
from service.grammars.json_schemas import DEFINITIONS, refers_to_definitions_alone
from service.grammars.lark import NOTHING, Lark, ToolSchema
from service.text.calls.value_kinds import Kinds

_PYTHON_NAME = re.compile(r"[^\W\d][\w-]*")
# Keys of a schema that describes its object by its properties alone.
_PLAIN = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$schema",
        "$defs",
        "definitions",
    }
)

# Keys of a schema of texts that are written without quotes.
_OF_TEXTS = frozenset(
    {"type", "enum", "const", "minLength", "maxLength", "title", "description", "default", "examples"}
)
_END_OF_PARAMETER = "</parameter>"
_END_OF_VALUE = rf'"\n{_END_OF_PARAMETER}"'

_TAG = "<|python_tag|>"
_BLANKS, _FEW_BLANKS = r"[ \t\r\n]*", r"[ \t\r\n]{0,16}"
# The text before the arguments, as models write it and `service.text.calls.llama3` reads it.
_LLAMA3_HEAD = r'\{ ?("type" ?: ?"function" ?, ?)?"name" ?: ?"NAME" ?, ?"(parameters|arguments)" ?:'.replace(
    " ?", _FEW_BLANKS
)

Beside = Literal["text", "answer"] | None


def lark_of_calls(
    form: str,
    tools: Sequence[ToolSchema],
    special_ids: Mapping[str, int],
    *,
    beside: Beside = None,
    is_several: bool = True,
    thinks: bool = False,
    is_thinking: bool = False,
    closes_objects: bool = True,
) -> str:
    """The grammar of an answer that calls. ConstraintError for tools that are too large for one.

    form         name of a format of `service.text.calls.formats`
    special_ids  ids of the special tokens by their texts
    beside       text: any text may come as well, and no call has to; answer: the rule `answer` may come instead, which
                 is for others to add; None: nothing
    is_several   more than one call may come
    thinks       thoughts may come first, between their marks
    is_thinking  the prompt has begun one
    closes_objects  of arguments, see `closed_schema`; otherwise what a schema does not close is open
    """
    tools = [(name, closed_schema(schema) if closes_objects else _opened(schema)) for name, schema in tools]
    # A rule of a parameter repeats all definitions, so that rules can be many times as long as the tools.
    lark = Lark(special_ids, MAX_CONSTRAINT_BYTES)
    head, calls = _FORMS[form](lark, tools, is_several)
    if beside == "text":
        start = lark.free(head, calls, is_several=is_several) if head else _free_llama3(lark, tools, is_several)
    else:
        start = f"{lark.text(head)} {calls}" if head else calls
    if beside == "answer":
        start = f"({start} | answer)"
    if thinks:
        start = f"{lark.thought(is_thinking=is_thinking)} {start}"
    return "\n".join([f"start: {start}", *lark.rules])


def lark_of_thoughts(special_ids: Mapping[str, int], *, is_thinking: bool) -> str:
    """Thoughts, and then the rule `answer`, which is for others to add."""
    lark = Lark(special_ids)
    return "\n".join([f"start: {lark.thought(is_thinking=is_thinking)} answer", *lark.rules])


# A format's own function, which returns the beginning of calls and the rest of them.
_Form = Callable[[Lark, Sequence[ToolSchema], bool], tuple[str, str]]


def _hermes(lark: Lark, tools: Sequence[ToolSchema], is_several: bool) -> tuple[str, str]:
    start, end = "<tool_call>", lark.text("</tool_call>")
    call = rf'"\n" {lark.object_with_name(tools, "arguments")} "\n" {end}'
    return start, lark.rule(rf'{call} ("\n" {lark.text(start)} {call})*' if is_several else call)


def _qwen3_coder(lark: Lark, tools: Sequence[ToolSchema], is_several: bool) -> tuple[str, str]:
    start, end = "<tool_call>", lark.text("</tool_call>")
    in_json = [tool for tool in tools if not _is_xml(tool[1])]
    bodies = [
        rf'{json.dumps(f"<function={name}>")} "\n" {_parameters(lark, schema)} "</function>"'
        for name, schema in tools
        if _is_xml(schema)
    ]
    if in_json:  # calls in JSON are tolerated
        bodies.append(lark.object_with_name(in_json, "arguments"))
    call = rf'"\n" {lark.rule(" | ".join(bodies))} "\n" {end}'
    return start, lark.rule(rf'{call} ("\n" {lark.text(start)} {call})*' if is_several else call)


def _llama3(lark: Lark, tools: Sequence[ToolSchema], is_several: bool) -> tuple[str, str]:  # noqa: ARG001
    """One call: the template shows no history with more."""
    return "", lark.object_with_name(tools, "parameters")


def _free_llama3(lark: Lark, tools: Sequence[ToolSchema], is_several: bool) -> str:
    """Texts, and calls among them. Calls have no mark, so no text holds what `service.text.calls.llama3` could read as
    the beginning of one: the tag, or an object that names a tool first, or begins with another key that calls have."""
    names = "|".join(re.escape(name) for name, _ in tools)
    # A name that is written with escapes could be any.
    named = rf'"name"{_BLANKS}:{_BLANKS}"(({names})"|[^"\\]*\\)'
    begun = rf'\{{{_BLANKS}({named}|"(type|function|parameters|arguments)"{_BLANKS}:)'
    is_special = _TAG in lark.special_ids
    tag = re.escape(_TAG)
    text = lark.terminal(rf"/(.|\n)*/ & ~/(.|\n)*({begun if is_special else f'{begun}|{tag}'})(.|\n)*/")
    calls = []
    for name, schema in tools:
        head = _LLAMA3_HEAD.replace("NAME", re.escape(name))
        arguments = rf"/{_FEW_BLANKS}/ {lark.json(schema)} /{_FEW_BLANKS}\}}/"
        if is_special:
            calls.append(f"{text} {lark.text(_TAG)} /{_FEW_BLANKS}{head}/ {arguments}")
            begin = head
        else:
            begin = f"({tag}{_FEW_BLANKS})?{head}"
        calls.append(f"{lark.rule(f'{text} /{begin}/', '[lazy]')} {arguments}")
    return f"({lark.rule(' | '.join(calls))}){'*' if is_several else '?'} {text}"


def _mistral(lark: Lark, tools: Sequence[ToolSchema], is_several: bool) -> tuple[str, str]:
    start = "[TOOL_CALLS]"
    if "[ARGS]" not in lark.special_ids:
        return start, _in_list(lark, lark.object_with_name(tools, "arguments"), is_several)
    named = [f"{lark.text(name)} {lark.text('[ARGS]')} {lark.json(schema)}" for name, schema in tools]
    call = lark.rule(" | ".join(named))
    return start, lark.rule(f"{call} ({lark.text(start)} {call})*" if is_several else call)


def _lfm2(lark: Lark, tools: Sequence[ToolSchema], is_several: bool) -> tuple[str, str]:
    if all(_is_pythonic(name, schema) for name, schema in tools):
        called = [f'{lark.text(f"{name}(")} {_arguments(lark, schema)} ")"' for name, schema in tools]
        call = lark.rule(" | ".join(called))
    else:  # calls in JSON are tolerated
        call = lark.object_with_name(tools, "arguments")
    return "<|tool_call_start|>", f"{_in_list(lark, call, is_several)} {lark.text('<|tool_call_end|>')}"


def _in_list(lark: Lark, call: str, is_several: bool) -> str:
    return lark.rule(f'"[" {call} (", " {call})* "]"' if is_several else f'"[" {call} "]"')


def _opened(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of arguments, said to be open where it does not say."""
    return {"additionalProperties": True, **schema} if "properties" in schema and set(schema) <= _PLAIN else schema


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether it says no more of its object than the properties, and whether there may be others."""
    return "properties" in schema and set(schema) <= _PLAIN and type(schema.get("additionalProperties", False)) is bool


def _other_key(lark: Lark, begin: str, key: str, end: str, schema: Mapping[str, Any]) -> str:
    """The beginning of a property that the schema does not name; `key` is a regular expression."""
    names = "|".join(re.escape(name).replace("/", r"\/") for name in schema["properties"])
    return lark.terminal(rf"/{begin}{key}{end}/" + rf" & ~/{begin}({names}){end}/" * bool(names))


def _is_separable(schema: Mapping[str, Any]) -> bool:
    """Whether an object that is valid for it can be written property by property, each with a grammar of its own."""
    return _is_plain(schema) and refers_to_definitions_alone(schema)


def _is_pythonic(name: str, schema: Mapping[str, Any]) -> bool:
    """Whether a call can be written as Python's, with one argument for each property."""
    properties = schema.get("properties", {})
    names = [*name.split("."), *properties]
    has_all = set(schema.get("required", ())) <= set(properties)
    return _is_separable(schema) and has_all and all(_PYTHON_NAME.fullmatch(one) for one in names)


def _arguments(lark: Lark, schema: Mapping[str, Any]) -> str:
    """`a=1, b="x"` in the schema's order, without some of those that are not required. Values are JSON, of which all is
    read that the grammar allows."""
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    required = set(schema.get("required", ()))
    # From the last property on: what may come where none has been written, and where some have.
    first = after = NOTHING
    if schema.get("additionalProperties"):
        other = lark.rule(f"{_other_key(lark, '', r'[A-Za-z_][A-Za-z_0-9]*', '=', schema)} {lark.json({})}")
        after = lark.rule(f'(", " {other})*')
        first = lark.rule(f"({other} {after})?")
    for name, value in reversed(schema.get("properties", {}).items()):
        given = {**value, **shared} if isinstance(value, dict) else value
        written = f"{lark.text(f'{name}=')} {lark.json(given)}"
        one = lark.rule(f"{written} {after}")
        if name in required:
            first, after = one, lark.rule(f'", " {one}')
        else:
            first, after = lark.rule(f"{one} | {first}"), lark.rule(f'", " {one} | {after}')
    return first


def _is_xml(schema: Mapping[str, Any]) -> bool:
    """Whether a call can be written with one parameter for each property, whose text says what its value is."""
    properties = schema.get("properties", {})
    has_all = set(schema.get("required", ())) <= set(properties)
    if not (_is_separable(schema) and has_all and all(map(_is_key, properties))):
        return False
    kinds = Kinds(schema)
    texts = [kinds.resolved(name) for name in properties if kinds.of(name) == {"string"}]
    # Each once: many properties may refer to one with a long list of texts.
    return all(map(_is_unquoted, {id(value): value for value in texts}.values()))


def _is_key(name: str) -> bool:
    return bool(name) and name == name.strip() and not set(name) & {">", "\n"}


def _is_unquoted(value: Mapping[str, Any]) -> bool:
    """Whether the texts of a schema of texts can be written as they are."""
    return set(value) <= _OF_TEXTS and not any(_END_OF_PARAMETER in text for text in _choices(value))


def _choices(value: Mapping[str, Any]) -> list[str]:
    """The texts that a schema of texts names."""
    choices: list[str] = [value["const"]] if "const" in value else value.get("enum", [])
    return choices


def _parameters(lark: Lark, schema: Mapping[str, Any]) -> str:
    """Each in its own lines, in the schema's order, without some of those that are not required."""
    required = set(schema.get("required", ()))
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    kinds, parts = Kinds(schema), []
    for name, value in schema.get("properties", {}).items():
        if kinds.of(name) == {"string"}:
            text = _text(lark, kinds.resolved(name))
        else:
            text = f"{lark.json({**value, **shared} if isinstance(value, dict) else value)} {_END_OF_VALUE}"
        one = lark.rule(rf'{json.dumps(f"<parameter={name}>", ensure_ascii=False)} "\n" {text} "\n"')
        parts.append(one if name in required else f"{one}?")
    if schema.get("additionalProperties"):
        key = _other_key(lark, "<parameter=", r"[^>\s]+", ">", schema)
        value = lark.up_to("\n" + _END_OF_PARAMETER)
        parts.append(lark.rule(rf'({key} "\n" {value} "\n")*'))
    return " ".join(parts) or NOTHING


def _text(lark: Lark, value: Mapping[str, Any]) -> str:
    """A text as it is, and the mark behind it."""
    choices = _choices(value)
    if choices:
        return f"({' | '.join(json.dumps(one, ensure_ascii=False) for one in choices)}) {_END_OF_VALUE}"
    least, most = value.get("minLength", 0), value.get("maxLength")
    if not least and most is None:
        return lark.up_to("\n" + _END_OF_PARAMETER)
    return f"{lark.without(_END_OF_PARAMETER, least=least, most=most)} {_END_OF_VALUE}"


_FORMS: dict[str, _Form] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "lfm2": _lfm2,
}
