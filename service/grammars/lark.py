"""The rules of a grammar, in the form of Lark that llguidance reads.

Importing this does not import llguidance: `regex_rule` and `from_gbnf` do, in the process that may die of it.

Structural tags, as xgrammar has them, are free text, parts of which follow a format. Where a text of a tag is that of a
special token, the token itself stands in the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.grammars.json_schemas import endless_reference, without_unknown_formats

NOTHING = '""'
ANY = r"/(.|\n)*/"
_THINK, _END_OF_THOUGHT = "<think>", "</think>"
_MAX_QUOTED_CHARS = 100
# Between the tokens of JSON: nothing, a blank, or a new line with its indentation. Without an end to it, models that
# write white space go on with it until the answer is cut off.
_WHITESPACE = r"[ ]?|\n[ ]{0,32}|\n\t{0,16}"
# Without \u, by which an object could hold a name twice in two spellings; what it is needed for can stand as it is.
_ESCAPES = 'nrbtf\\"'
_ASCII_CLASSES = "dw"
# A tool: its name, and the JSON schema of its arguments.
ToolSchema = tuple[str, Mapping[str, Any]]


class ConstraintError(ValueError):
    """The constraint is invalid or too large; the message is a sentence's second half."""


class Lark:
    """Rules of a grammar in the making. ConstraintError as soon as they have more than `max_chars` characters."""

    def __init__(self, special_ids: Mapping[str, int], max_chars: int | None = None) -> None:
        self.rules: list[str] = []
        self.special_ids = special_ids
        names = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._max_chars, self._num_chars = max_chars, 0

    def rule(self, body: str, options: str = "") -> str:
        """A new rule; its name."""
        name = f"part_{len(self.rules)}"
        self._add(f"{name}{options}: {body}")
        return name

    def pieces(self, text: str) -> list[str]:
        """The literals and special tokens that a text consists of, in order."""
        parts = [text] if self._special is None else self._special.split(text)
        return [
            f"<[{self.special_ids[part]}]>" if part in self.special_ids else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]

    def text(self, text: str) -> str:
        """A text, with the special tokens that it holds as tokens."""
        return " ".join(self.pieces(text)) or NOTHING

    def is_special(self, text: str) -> bool:
        """Whether a text begins with a special token, which no free text holds."""
        return self.pieces(text)[0].startswith("<")

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value that is valid for a schema."""
        return self.rule(json_rule(schema))

    def object_with_name(self, tools: Sequence[ToolSchema], arguments: str) -> str:
        """`{"name": "f", "arguments": {...}}` of any of the tools."""
        named = [
            f"{json.dumps(f'{json.dumps(name)}, {json.dumps(arguments)}: ')} {self.json(schema)}"
            for name, schema in tools
        ]
        return self.rule(f'"{{\\"name\\": " ({" | ".join(named)}) "}}"')

    def up_to(self, mark: str) -> str:
        """Any text, and the first mark after it. `mark` is not empty."""
        first, *rest = self.pieces(mark)
        if self.is_special(mark):
            return " ".join([self.rule(ANY), first, *rest])
        return " ".join([self.rule(f"{ANY} {first}", "[lazy]"), *rest])

    def free(self, mark: str, calls: str, *, is_several: bool) -> str:
        """Texts, and calls behind marks."""
        call = self.rule(f"{self.up_to(mark)} {calls}")
        rest = self.without(mark)
        return f"({call}){'*' if is_several else '?'} {rest}"

    def thought(self, *, is_thinking: bool) -> str:
        """The rule of the model's thoughts before the answer, up to the line breaks behind them."""
        rest = rf"{self.up_to(_END_OF_THOUGHT)} /\n{{0,2}}/"
        begun = rest if is_thinking else f"{self.text(_THINK)} {rest}"
        return self.rule(begun) if is_thinking else f"({self.rule(begun)})?"

    def without(self, *marks: str, least: int = 0, most: int | None = None) -> str:
        """Any text without these marks, of so many characters. Special tokens are never part of it."""
        length = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        inside = [re.escape(mark).replace("/", r"\/") for mark in marks if not self.is_special(mark)]
        return self.terminal(rf"/(.|\n){length}/" + "".join(rf" & ~/(.|\n)*{one}(.|\n)*/" for one in inside))

    def terminal(self, body: str) -> str:
        """A new terminal, a regular expression; its name."""
        name = f"TEXT_{len(self.rules)}"
        self._add(f"{name}: {body}")
        return name

    def _add(self, rule: str) -> None:
        self._num_chars += len(rule)
        if self._max_chars is not None and self._num_chars > self._max_chars:
            raise ConstraintError(
                f"needs a grammar of more than {self._max_chars} characters; send fewer tools, or shorter ones"
            )
        self.rules.append(rule)


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """A JSON schema inside of a Lark grammar, with the same policy as a schema by itself."""
    return f"%json {json.dumps(with_policy(schema))}"


def with_policy(schema: Any, whitespace: str | None = None) -> dict[str, Any]:
    """The schema with our own options in place of any that it brings. ConstraintError for one that refers to itself
    without end, which the library finds only once an answer has come so far.

    whitespace  see `Constraint`; without any where it is empty
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    _refuse_endless(schema)
    options = {"whitespace_pattern": _WHITESPACE if whitespace is None else whitespace, "lenient": False}
    if whitespace == "":
        options = {"whitespace_flexible": False, "lenient": False}
    return {
        **without_unknown_formats(schema),
        "x-guidance": {**options, "coerce_one_of": False, "json_allowed_escapes": _ESCAPES},
    }


def _refuse_endless(schema: dict[str, Any]) -> None:
    reference = endless_reference(schema)
    if reference is not None:
        raise ConstraintError(
            f"holds the `$ref` {reference[:_MAX_QUOTED_CHARS]!r}, which refers to itself without end; let it refer to "
            "a schema that says what may stand there"
        )


def regex_rule(pattern: str) -> str:
    """A regular expression inside of a Lark grammar: between slashes, `\\d` and `\\w` of ASCII, as in JSON schemas."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, _ASCII_CLASSES)}/"


def from_gbnf(text: str) -> str:
    """A grammar of GBNF or of Lark as one of Lark. ConstraintError for GBNF that cannot be read."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return any_to_lark(text)
    except (GbnfToLarkError, RecursionError) as error:
        raise ConstraintError(f"is no grammar of GBNF: {error}") from error


_MAX_DEPTH = 32


def lark_of_tag(tag: Mapping[str, Any], special_ids: Mapping[str, int]) -> str:
    """The grammar of {"structures": ..., "triggers": ...} or {"format": ...}. ConstraintError for what is neither.

    special_ids  ids of the special tokens by their texts
    """
    legacy = tag.get("structures"), tag.get("triggers")
    if (not tag.get("format")) == (legacy == (None, None)):
        raise ConstraintError("must have `structures` and `triggers`, or else `format`")
    lark = _TagRules(special_ids)
    start = lark.format(tag.get("format") or _of_structures(*legacy), 0)
    return "\n".join([f"start: {start}", *lark.rules])


def _of_structures(structures: Any, triggers: Any) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": _of(one, "begin", str),
            "content": {
                "type": "json_schema",
                "json_schema": one.get("schema") if one.get("schema") is not None else {},
            },
            "end": _of(one, "end", str),
        }
        for one in _list(structures, "structures")
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _TagRules(Lark):
    """The rules of a structural tag."""

    def format(self, given: Any, depth: int, end: str | None = None) -> str:
        """The expression of a format in a rule, which includes `end` where that follows."""
        if depth > _MAX_DEPTH:
            raise ConstraintError(f"is nested more than {_MAX_DEPTH} levels deep")
        kind = _of(given, "type", str)
        makes: dict[str, Callable[[Any, int], str]] = {
            "const_string": lambda one, _: self.text(_of(one, "value", str)),
            "json_schema": lambda one, _: self.rule(json_rule(_schema(one))),
            "regex": lambda one, _: self.rule(regex_rule(_of(one, "pattern", str))),
            "grammar": lambda one, _: self._grammar(_of(one, "grammar", str)),
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }
        if kind == "any_text":
            _known(given, "type")
            return self.up_to(end) if end else self.rule(ANY)
        if kind not in makes:
            raise ConstraintError(f"has the format {kind[:40]!r}; known are any_text, {', '.join(makes)}")
        _known(given, "type", *_FIELDS[kind])
        made = makes[kind](given, depth)
        return made if end is None else f"{made} {self.text(end)}"

    def _sequence(self, one: Any, depth: int) -> str:
        elements = _list(one.get("elements"), "elements")
        if any(_of(element, "type", str) == "any_text" for element in elements[:-1]):
            raise ConstraintError("has any_text in a sequence before its end; put it into a tag, whose `end` ends it")
        return self.rule(" ".join(self.format(element, depth + 1) for element in elements))

    def _or(self, one: Any, depth: int) -> str:
        return self.rule(
            " | ".join(self.format(element, depth + 1) for element in _list(one.get("elements"), "elements"))
        )

    def _tag(self, one: Any, depth: int, begun: str = "") -> str:
        """A tag; `begun` is how much of its beginning stands there already."""
        begin = _of(one, "begin", str).removeprefix(begun)
        content = self.format(one.get("content"), depth + 1, _of(one, "end", str))
        return self.rule(f"{self.text(begin)} {content}")

    def _grammar(self, text: str) -> str:
        """Rules of another grammar, whose names must not meet ours."""
        lark = from_gbnf(text)
        return self.rule(f"%lark {{\n{lark}\n}}")

    def _triggered_tags(self, one: Any, depth: int) -> str:
        triggers = _list(one.get("triggers"), "triggers")
        tags = _list(one.get("tags"), "tags")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ConstraintError("has a trigger that is no text, or an empty one")
        by_trigger: dict[str, list[Any]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            begin = _of(tag, "begin", str)
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not matching:
                raise ConstraintError(f"has the tag {begin[:40]!r}, which begins with none of the triggers")
            by_trigger[max(matching, key=len)].append(tag)
        text = self.without(*triggers)
        groups = [self._triggered(trigger, tags, depth) for trigger, tags in by_trigger.items() if tags]
        any_tag = self.rule(" | ".join(groups))
        if one.get("stop_after_first"):
            return any_tag if one.get("at_least_one") else self.rule(f"{any_tag} | {text}")
        return self.rule(f"({any_tag}){'+' if one.get('at_least_one') else '*'} {text}")

    def _triggered(self, trigger: str, tags: Sequence[Any], depth: int) -> str:
        """Free text, the trigger, and what may follow it."""
        followed = self.rule(" | ".join(self._tag(tag, depth + 1, trigger) for tag in tags))
        return self.rule(f"{self.up_to(trigger)} {followed}")

    def _tags_with_separator(self, one: Any, depth: int) -> str:
        tags = [self._tag(tag, depth + 1) for tag in _list(one.get("tags"), "tags")]
        any_tag = self.rule(" | ".join(tags))
        several = any_tag
        if not one.get("stop_after_first"):
            several = self.rule(f"{any_tag} ({self.text(_of(one, 'separator', str))} {any_tag})*")
        return several if one.get("at_least_one") else self.rule(f"({several})?")


# Fields of each format beside its type.
_FIELDS = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}


def _schema(one: Any) -> Any:
    schema = one.get("json_schema")
    if not isinstance(schema, dict | bool):
        raise ConstraintError("has a `json_schema` that is no object")
    return schema


def _of(one: Any, name: str, kind: type[str]) -> str:
    """A field of a format. ConstraintError if it is not there, or of another type."""
    if not isinstance(one, Mapping) or not isinstance(one.get(name), kind):
        raise ConstraintError(f"lacks the text `{name}` in one of its parts")
    return str(one[name])


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConstraintError(f"lacks the list `{name}` in one of its parts")
    return value


def _known(one: Mapping[str, Any], *names: str) -> None:
    """Nothing that is asked for is left undone."""
    for name, value in one.items():
        if name not in names and value not in (None, False, []):
            raise ConstraintError(f"has `{name[:40]}` in a part of type {one['type']}, which is not served")
