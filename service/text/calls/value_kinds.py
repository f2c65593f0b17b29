"""JSON types of a tool's parameter, as far as its schema states them plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
# The lists of an `enum` or a `const`.
Listed = Sequence[Sequence[Any]]
# Alternatives and references that are looked at for one parameter. References may lead to each other, so that a short
# schema has alternatives without end.
_MAX_PARTS = 256
_REFERENCE = "#/"
# Keys of a schema without a type that imply one.
_IMPLIED = {"properties": "object", "items": "array"}
_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class Kinds:
    """The kinds of one tool's parameters. What it takes to know one is bounded, whatever the schema is.

    schema  of the object that the tool is called with
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        # Thousands of parameters may refer to the same, and by a long way: of lists of values, by the object that has
        # one, and what references name.
        self._of_values: dict[int, frozenset[str]] = {}
        self._named: dict[str, Any] = {}

    def of(self, name: str) -> frozenset[str]:
        """JSON schema's names of the types that a property of the object may have; `integer` is a `number` too. Empty
        where that is not said."""
        return self.of_and_listed(name)[0]

    def of_and_listed(self, name: str) -> tuple[frozenset[str], Listed]:
        """The same, and the values that the schema lists."""
        waiting = [self._property(name)]
        found, listed, seen = set[str](), list[Sequence[Any]](), set[int]()
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            kinds, others = self._look(value)
            waiting += others
            if not (kinds or others) or len(seen) + len(waiting) > _MAX_PARTS:
                return frozenset(), ()
            found |= kinds
            if isinstance(value, Mapping) and value.get("nullable") is True:  # as OpenAPI 3.0 says it
                found.add("null")
            listed += _listed(value)
        return frozenset(found | {"integer"} if "number" in found else found), tuple(listed)

    def resolved(self, name: str) -> Any:
        """The schema of a property, or the one that it refers to and that is all it says; None if it refers to
        nothing."""
        value, seen = self._property(name), set[int]()
        while isinstance(value, Mapping) and "$ref" in value:
            if id(value) in seen or len(seen) >= _MAX_PARTS:
                return None
            seen.add(id(value))
            value = self._at(value["$ref"])
        return value

    def _property(self, name: str) -> Any:
        properties = self._schema.get("properties")
        return properties.get(name) if isinstance(properties, Mapping) else None

    def _look(self, value: Any) -> tuple[frozenset[str], list[Any]]:
        """(kinds, what may come instead) of a part of the schema; neither where anything may come, or what cannot be
        told."""
        if not isinstance(value, Mapping):
            return frozenset(), []
        if "$ref" in value:
            return frozenset(), [self._at(value["$ref"])]
        if "const" in value:
            return frozenset({kind_of_value(value["const"])}), []
        if isinstance(value.get("enum"), list):
            return self._of_enum(value), []
        if isinstance(value.get("type"), str):
            return frozenset({value["type"]}), []
        if isinstance(value.get("type"), list):
            return frozenset(map(str, value["type"])), []
        several = next((one for one in ("anyOf", "oneOf") if isinstance(value.get(one), list)), None)
        if several is not None:
            return frozenset(), value[several]
        implied = {kind for key, kind in _IMPLIED.items() if key in value}
        if implied or not isinstance(value.get("allOf"), list):
            return frozenset(implied), []
        # The first part of `allOf` that states a type.
        return frozenset(), next(([part] for part in value["allOf"][:_MAX_PARTS] if any(self._look(part))), [])

    def _of_enum(self, value: Schema) -> frozenset[str]:
        known = self._of_values.get(id(value))
        if known is None:
            known = self._of_values[id(value)] = frozenset(_KINDS[kind] for kind in set(map(type, value["enum"])))
        return known

    def _at(self, reference: Any) -> Any:
        """The target of a reference into the schema itself, None if there is none."""
        if not isinstance(reference, str) or not reference.startswith(_REFERENCE):
            return None
        if reference not in self._named:
            value: Any = self._schema
            for part in reference.removeprefix(_REFERENCE).split("/"):
                value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
            self._named[reference] = value
        return self._named[reference]


def _listed(value: Any) -> list[Sequence[Any]]:
    if not isinstance(value, Mapping) or "$ref" in value:
        return []
    if "const" in value:
        return [[value["const"]]]
    return [value["enum"]] if isinstance(value.get("enum"), list) else []


def is_listed(value: Any, listed: Listed) -> bool:
    """Whether it is one of the values that a schema lists; true is no 1."""
    is_bool = isinstance(value, bool)
    return any(value in values and isinstance(values[values.index(value)], bool) == is_bool for values in listed)


def kind_of_value(value: Any) -> str:
    """JSON schema's name of the type of a value."""
    return _KINDS[type(value)]
