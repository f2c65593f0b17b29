"""Structural tags, as xgrammar has them, to a Lark grammar of llguidance: free text, parts of which follow a format.

Where a text of a tag is that of a special token, the token itself stands in the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.grammars.constraints import ConstraintError, from_gbnf, json_rule, regex_rule

_MAX_DEPTH = 32
_ANY = r"/(.|\n)*/"


def lark_of_tag(tag: Mapping[str, Any], special_ids: Mapping[str, int]) -> str:
    """The grammar of {"structures": ..., "triggers": ...} or {"format": ...}. ConstraintError for what is neither.

    special_ids  ids of the special tokens by their texts
    """
    legacy = tag.get("structures"), tag.get("triggers")
    if (not tag.get("format")) == (legacy == (None, None)):
        raise ConstraintError("must have `structures` and `triggers`, or else `format`")
    lark = _Lark(special_ids)
    start = lark.format(tag.get("format") or _of_structures(*legacy), 0)
    return "\n".join([f"start: {start}", *lark.rules])


def text_rule(text: str, special_ids: Mapping[str, int]) -> str:
    """A text in a Lark rule, with special tokens where it holds theirs."""
    return " ".join(_pieces(text, special_ids)) or '""'


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


class _Lark:
    """Rules of a grammar in the making."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special_ids = special_ids

    def format(self, given: Any, depth: int, end: str | None = None) -> str:
        """The expression of a format in a rule, which includes `end` where that follows."""
        if depth > _MAX_DEPTH:
            raise ConstraintError(f"is nested more than {_MAX_DEPTH} levels deep")
        kind = _of(given, "type", str)
        makes: dict[str, Callable[[Any, int], str]] = {
            "const_string": lambda one, _: self._text(_of(one, "value", str)),
            "json_schema": lambda one, _: self._rule(json_rule(_schema(one))),
            "regex": lambda one, _: self._rule(regex_rule(_of(one, "pattern", str))),
            "grammar": lambda one, _: self._grammar(_of(one, "grammar", str)),
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }
        if kind == "any_text":
            _known(given, "type")
            return self._any_text(end)
        if kind not in makes:
            raise ConstraintError(f"has the format {kind[:40]!r}; known are any_text, {', '.join(makes)}")
        _known(given, "type", *_FIELDS[kind])
        made = makes[kind](given, depth)
        return made if end is None else f"{made} {self._text(end)}"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _text(self, text: str) -> str:
        return text_rule(text, self._special_ids)

    def _any_text(self, end: str | None) -> str:
        """Any text; up to the first `end`, if there is one."""
        pieces = _pieces(end or "", self._special_ids)
        if not pieces:
            return self._rule(_ANY)
        if pieces[0].startswith("<"):  # a special token ends any text
            return f"{self._rule(_ANY)} {' '.join(pieces)}"
        return " ".join([self._rule(f"{_ANY} {pieces[0]}", "[lazy]"), *pieces[1:]])

    def _sequence(self, one: Any, depth: int) -> str:
        elements = _list(one.get("elements"), "elements")
        if any(_of(element, "type", str) == "any_text" for element in elements[:-1]):
            raise ConstraintError("has any_text in a sequence before its end; put it into a tag, whose `end` ends it")
        return self._rule(" ".join(self.format(element, depth + 1) for element in elements))

    def _or(self, one: Any, depth: int) -> str:
        return self._rule(
            " | ".join(self.format(element, depth + 1) for element in _list(one.get("elements"), "elements"))
        )

    def _tag(self, one: Any, depth: int, begun: str = "") -> str:
        """A tag; `begun` is how much of its beginning stands there already."""
        begin = _of(one, "begin", str).removeprefix(begun)
        content = self.format(one.get("content"), depth + 1, _of(one, "end", str))
        return self._rule(f"{self._text(begin)} {content}")

    def _grammar(self, text: str) -> str:
        """Rules of another grammar, whose names must not meet ours."""
        lark = from_gbnf(text)
        return self._rule(f"%lark {{\n{lark}\n}}")

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
        text = self._free_text(triggers)
        groups = [self._triggered(trigger, tags, depth) for trigger, tags in by_trigger.items() if tags]
        any_tag = self._rule(" | ".join(groups))
        if one.get("stop_after_first"):
            return any_tag if one.get("at_least_one") else self._rule(f"{any_tag} | {text}")
        return self._rule(f"({any_tag}){'+' if one.get('at_least_one') else '*'} {text}")

    def _free_text(self, triggers: Sequence[str]) -> str:
        """Any text without a trigger. Special tokens are none of it anyway."""
        texts = [re.escape(trigger) for trigger in triggers if not self._is_special(trigger)]
        name = f"TEXT_{len(self.rules)}"
        without = "".join(rf" & ~/(.|\n)*{regex_rule(text)[1:-1]}(.|\n)*/" for text in texts)
        self.rules.append(f"{name}: {_ANY}{without}")
        return name

    def _triggered(self, trigger: str, tags: Sequence[Any], depth: int) -> str:
        """Free text, the trigger, and what may follow it."""
        followed = self._rule(" | ".join(self._tag(tag, depth + 1, trigger) for tag in tags))
        if self._is_special(trigger):
            return self._rule(f"{self._rule(_ANY)} {self._text(trigger)} {followed}")
        head = self._rule(f"{_ANY} {self._text(trigger)}", "[lazy]")
        return self._rule(f"{head} {followed}")

    def _is_special(self, text: str) -> bool:
        return _pieces(text, self._special_ids)[0].startswith("<")

    def _tags_with_separator(self, one: Any, depth: int) -> str:
        tags = [self._tag(tag, depth + 1) for tag in _list(one.get("tags"), "tags")]
        any_tag = self._rule(" | ".join(tags))
        several = any_tag
        if not one.get("stop_after_first"):
            several = self._rule(f"{any_tag} ({self._text(_of(one, 'separator', str))} {any_tag})*")
        return several if one.get("at_least_one") else self._rule(f"({several})?")


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


def _pieces(text: str, special_ids: Mapping[str, int]) -> list[str]:
    """Literals and special tokens, in order."""
    if not text:
        return []
    names = sorted(special_ids, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return [
        f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    ]


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
