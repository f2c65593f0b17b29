"""A grammar of Lark in the making, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from service.grammars.constraints import ConstraintError, json_rule

NOTHING = '""'
_ANY = r"/(.|\n)*/"
_THINK, _END_OF_THOUGHT = "<think>", "</think>"
# A tool: its name, and the JSON schema of its arguments.
ToolSchema = tuple[str, Mapping[str, Any]]


class Lark:
    """Rules of a grammar in the making. ConstraintError as soon as they have more than `max_chars` characters."""

    def __init__(self, special_ids: Mapping[str, int], max_chars: int | None = None) -> None:
        self.rules: list[str] = []
        self.special_ids = special_ids
        self._max_chars, self._num_chars = max_chars, 0

    def rule(self, body: str, options: str = "") -> str:
        """A new rule; its name."""
        name = f"part_{len(self.rules)}"
        self._add(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """A text, or the special token that it is."""
        return f"<[{self.special_ids[text]}]>" if text in self.special_ids else json.dumps(text, ensure_ascii=False)

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
        """Any text, and the first mark after it."""
        if mark in self.special_ids:  # no special token is part of any text
            return f"{self.rule(_ANY)} {self.text(mark)}"
        return self.rule(f"{_ANY} {self.text(mark)}", "[lazy]")

    def free(self, mark: str, calls: str, *, is_several: bool) -> str:
        """Texts, and calls behind marks."""
        call = self.rule(f"{self.up_to(mark)} {calls}")
        rest = self.rule(_ANY) if mark in self.special_ids else self.without(mark)
        return f"({call}){'*' if is_several else '?'} {rest}"

    def thought(self, *, is_thinking: bool) -> str:
        """The rule of the model's thoughts before the answer, up to the line breaks behind them."""
        rest = rf"{self.up_to(_END_OF_THOUGHT)} /\n{{0,2}}/"
        begun = rest if is_thinking else f"{self.text(_THINK)} {rest}"
        return self.rule(begun) if is_thinking else f"({self.rule(begun)})?"

    def without(self, mark: str, least: int = 0, most: int | None = None) -> str:
        """Any text without a mark, of so many characters."""
        inside = re.escape(mark).replace("/", r"\/")
        length = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        return self.terminal(rf"/(.|\n){length}/ & ~/(.|\n)*{inside}(.|\n)*/")

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
