"""JSON schemas that do not say `additionalProperties`, closed: an object takes the properties that they name alone.

xgrammar and vLLM close them so by default, and pydantic writes schemas that do not say. In an open object a model may
add properties until its answer is cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from service.grammars.references import DEFINITIONS, target_of

# Keywords whose value is a schema, a list of schemas, or an object of schemas, about values inside of the one at hand.
_INNER = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains")
_INNER_LISTS = ("prefixItems", "items")
_INNER_OBJECTS = ("properties", "patternProperties", *DEFINITIONS)
# About the same value, in lists of schemas.
_ALTERNATIVES = ("anyOf", "oneOf")
_SAME_VALUE = ("allOf", *_ALTERNATIVES)
_NAMING = ("properties", "patternProperties")
# A schema that bounds the number of properties expects others too; and the library cannot count those that
# may be left out.
_SAYING = ("additionalProperties", "unevaluatedProperties", "minProperties", "maxProperties")


class TooManyParts(ValueError):
    """Too many schemas apply to the same values."""


def closed(schema: Any, max_parts: int) -> Any:
    """A copy of a JSON schema whose objects take no other properties than those that the schema names, where it names
    some and does not say `additionalProperties`, `unevaluatedProperties`, `minProperties` or `maxProperties`. An object
    that names none stays free.

    Of schemas that apply to one value together (`allOf`, what stands beside `$ref` or `anyOf`) each allows the names of
    all; if one of them says `additionalProperties`, all is as they say.

    max_parts  schemas and names that may be looked at for this. TooManyParts if there are more
    """
    return _Closing(schema, max_parts).whole() if isinstance(schema, dict) else schema


class _Closing:
    def __init__(self, schema: dict[str, Any], max_parts: int) -> None:
        self._schema, self._num_left = schema, max_parts
        # Schemas that are closed for themselves and are referred to as a part of others: open copies, by identity.
        self._open_names: dict[int, str] = {}
        self._waiting: list[tuple[str, dict[str, Any]]] = []

    def whole(self) -> dict[str, Any]:
        result = self._value(self._schema)
        copies = {}
        while self._waiting:
            name, part = self._waiting.pop()
            copies[name] = self._part({key: value for key, value in part.items() if key not in DEFINITIONS})
        if copies:
            result["$defs"] = {**result.get("$defs", {}), **copies}
        return result

    def _value(self, schema: Any) -> Any:
        """The schema of a value that no other schema is about."""
        if not isinstance(schema, dict):
            return schema
        if not _names_by_itself(schema):
            # Each alternative is the whole schema of the value, and so is what a reference leads to.
            inner = self._inner(schema)
            for keyword in _SAME_VALUE:
                if isinstance(schema.get(keyword), list):
                    inner[keyword] = [self._value(one) for one in schema[keyword]]
            return inner
        parts = list(self._parts(schema))
        part = self._part(schema)
        keywords = {keyword for one in parts for keyword in one}
        if not keywords & set(_NAMING) or keywords & set(_SAYING):
            return part
        for keyword in _NAMING:
            named = {name: True for one in parts for name in _keys(one, keyword)}
            if keyword == "properties" and "patternProperties" not in keywords:
                named |= {name: True for one in parts for name in _required(one)}
            self._count(len(named))
            if named:
                part[keyword] = {**named, **part.get(keyword, {})}
        return {**part, "additionalProperties": False}

    def _count(self, num: int) -> None:
        self._num_left -= num
        if self._num_left < 0:
            raise TooManyParts

    def _part(self, schema: Any) -> Any:
        """A schema of a value that others are about too: its own object stays open."""
        if not isinstance(schema, dict):
            return schema
        part = self._inner(schema)
        for keyword in _SAME_VALUE:
            if isinstance(schema.get(keyword), list):
                part[keyword] = [self._part(one) for one in schema[keyword]]
        target = target_of(self._schema, schema.get("$ref"))
        if target is not None:
            name = self._open_names.get(id(target))
            if name is None:
                name = self._open_names[id(target)] = self._new_name()
                self._waiting.append((name, target))
            part["$ref"] = f"#/$defs/{name}"
        return part

    def _new_name(self) -> str:
        name = f"open{len(self._open_names)}"
        while name in self._schema.get("$defs", {}):
            name += "_"
        return name

    def _inner(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A copy with closed schemas of all values inside."""
        copy = dict(schema)
        for keyword in _INNER:
            if isinstance(copy.get(keyword), dict):
                copy[keyword] = self._value(copy[keyword])
        for keyword in _INNER_LISTS:
            if isinstance(copy.get(keyword), list):
                copy[keyword] = [self._value(one) for one in copy[keyword]]
        for keyword in _INNER_OBJECTS:
            if isinstance(copy.get(keyword), dict):
                copy[keyword] = {name: self._value(one) for name, one in copy[keyword].items()}
        return copy

    def _parts(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The schema and all that are about the same value as it, alternatives too, each once."""
        seen: set[int] = set()
        waiting: deque[Any] = deque([schema])
        while waiting:
            one = waiting.popleft()
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            self._count(1)
            yield one
            waiting.append(target_of(self._schema, one.get("$ref")))
            for keyword in _SAME_VALUE:
                if isinstance(one.get(keyword), list):
                    waiting += one[keyword]


def _names_by_itself(schema: dict[str, Any]) -> bool:
    """Whether an object is closed here: the schema names properties, or several of its parts hold together."""
    if any(keyword in schema for keyword in (*_NAMING, *_SAYING)):
        return True
    several = schema.get("allOf")
    num_parts = len(several) if isinstance(several, list) else 0
    num_parts += sum(keyword in schema for keyword in ("$ref", *_ALTERNATIVES))
    return num_parts > 1


def _keys(schema: dict[str, Any], keyword: str) -> list[str]:
    named = schema.get(keyword)
    return list(named) if isinstance(named, dict) else []


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
