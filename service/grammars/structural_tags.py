"""Structural tags, as xgrammar has them, to a Lark grammar of llguidance: free text, parts of which follow a format.

Where a text of a tag is that of a special token, the token itself stands in the grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.grammars.lark import ANY, ConstraintError, Lark, from_gbnf, json_rule, regex_rule

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
