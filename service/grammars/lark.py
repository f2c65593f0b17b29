"""The rules of a grammar, in the form of Lark that llguidance reads.

Importing this does not import llguidance: `regex_rule` and `from_gbnf` do, in the process that may die of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from service.grammars.references import endless_reference

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
    return {**schema, "x-guidance": {**options, "coerce_one_of": False, "json_allowed_escapes": _ESCAPES}}


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
