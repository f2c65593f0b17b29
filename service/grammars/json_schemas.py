"""JSON schemas: which `$ref` lead only to themselves, or keep their meaning in a part of a schema; and those that do
not say `additionalProperties`, closed: an object takes the properties that they name alone; and how long plain data is
as JSON, without writing it: to write a million numbers keeps Python's lock for 0.3 s, and the longest integers take
0.2 ms each.

xgrammar and vLLM close them so by default, and pydantic writes schemas that do not say. In an open object a model may
add properties until its answer is cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

DEFINITIONS = ("$defs", "definitions")


def endless_reference(schema: dict[str, Any]) -> str | None:
    """A `$ref` that leads back to itself before it says what may stand there; None where an answer meets none.

    `{"$ref": "#"}` is one; a list whose items are lists of its own kind is not, for it begins with a bracket. What is
    followed are references within the schema, and the schemas that must be fit with them: all of `allOf`, and the one
    of an `anyOf` or `oneOf` that has one alone.
    """
    done: set[int] = set()
    for start in _reached(schema):
        # Depth first, without recursion: chains may be thousands of references long.
        path: dict[int, Iterator[tuple[str, dict[str, Any]]]] = {}
        if id(start) not in done and "$ref" in start:
            path[id(start)] = _followed(schema, start)
        while path:
            at, following = next(reversed(path.items()))
            for reference, target in following:
                if id(target) in path:
                    return reference
                if id(target) not in done:
                    path[id(target)] = _followed(schema, target)
                    break
            else:
                del path[at]
                done.add(at)
    return None


def refers_to_definitions_alone(schema: Mapping[str, Any]) -> bool:
    """Whether each part of the schema means the same wherever it stands, if the definitions stand beside it."""
    references = [one["$ref"] for one in objects_of(schema) if isinstance(one.get("$ref"), str)]
    return all(reference.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)) for reference in references)


def _followed(schema: dict[str, Any], one: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the reference, what it leads to) of all that must be fit where `one` must."""
    target = target_of(schema, one.get("$ref"))
    if target is not None:
        yield one["$ref"], target
    for name in ("allOf", "anyOf", "oneOf"):
        parts = one.get(name)
        if isinstance(parts, list) and (name == "allOf" or len(parts) == 1):
            yield from ((str(part.get("$ref", "#")), part) for part in parts if isinstance(part, dict))


def target_of(schema: Mapping[str, Any], reference: Any) -> dict[str, Any] | None:
    """The object within the schema that a reference names; None for one that names none, which the library refuses."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = schema
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def objects_of(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in plain data, itself first."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
        waiting.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())


def _reached(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All objects of the schema, of its definitions those alone that something refers to."""
    seen: set[int] = set()
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting.extend(value for name, value in one.items() if name not in DEFINITIONS)
            waiting.append(target_of(schema, one.get("$ref")))
        elif isinstance(one, list):
            waiting.extend(one)


# Keywords whose value is a schema, a list of schemas, or an object of schemas, about values inside of the one at hand.
_INNER = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains")
_INNER_LISTS = ("prefixItems", "items")
_INNER_OBJECTS = ("properties", "patternProperties", *DEFINITIONS)
# About the same value, in lists of schemas.
_ALTERNATIVES = ("anyOf", "oneOf")
_SAME_VALUE = ("allOf", *_ALTERNATIVES)
_NAMING = ("properties", "patternProperties")
# Of the standard; `format` may have any other value.
_FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
    *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
    *("uri-template", "uuid"),
}
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
        return _mapped(schema, self._value, _INNER_LISTS)

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


def without_unknown_formats(schema: Any) -> Any:
    """A copy of a JSON schema without the formats that the standard does not know: by its words these are annotations,
    and the library refuses them. pydantic writes such for paths, bytes and secrets."""
    if not isinstance(schema, dict):
        return schema
    copy = _mapped(schema, without_unknown_formats, (*_INNER_LISTS, *_SAME_VALUE))
    if isinstance(copy.get("format"), str) and copy["format"] not in _FORMATS:
        del copy["format"]
    return copy


def _mapped(schema: dict[str, Any], change: Callable[[Any], Any], lists: Sequence[str]) -> dict[str, Any]:
    """A copy with the schemas inside of it changed; `lists`: keywords whose values are lists of such."""
    copy = dict(schema)
    for keyword in _INNER:
        if isinstance(copy.get(keyword), dict):
            copy[keyword] = change(copy[keyword])
    for keyword in lists:
        if isinstance(copy.get(keyword), list):
            copy[keyword] = [change(one) for one in copy[keyword]]
    for keyword in _INNER_OBJECTS:
        if isinstance(copy.get(keyword), dict):
            copy[keyword] = {name: change(one) for name, one in copy[keyword].items()}
    return copy


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


# Least characters of each, with the separator behind it: `1, `, `1.5, `, `"": `, and a list the brackets alone, since
# its last item has no separator.
_LEAST_CHARS, _LEAST_FLOAT_CHARS, _QUOTES_CHARS, _BRACKETS_CHARS = 3, 5, 4, 2
# A decimal digit has 3.3 bits.
_BITS_OF_A_DIGIT = 4


def each_value(data: Any) -> Iterator[Any]:
    """The data itself, and all keys and values in it, however deep; in no order."""
    waiting = [data]
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, dict):
            waiting.extend(one)
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def least_chars(data: Any, enough: int) -> int:
    """At least so many characters `json.dumps` would write of a list or object. The walk through it ends where they are
    more than `enough`."""
    num_chars = -_BRACKETS_CHARS
    for one in each_value(data):
        if isinstance(one, str):
            num_chars += len(one) + _QUOTES_CHARS
        elif isinstance(one, float):
            num_chars += _LEAST_FLOAT_CHARS
        elif isinstance(one, int):
            num_chars += _LEAST_CHARS + (one.bit_length() - 1) // _BITS_OF_A_DIGIT
        else:
            num_chars += _BRACKETS_CHARS
        if num_chars > enough:
            break
    return num_chars
