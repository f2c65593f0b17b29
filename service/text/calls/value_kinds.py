"""What kinds of JSON a tool's parameter may be, as far as its schema says so plainly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
_MAX_REFERENCES = 16
_REFERENCE = "#/"


def kinds_of(schema: Schema, name: str) -> frozenset[str]:
    """JSON schema's names of the types that a property of an object may have; `integer` is a `number` too. Empty where
    that is not said."""
    properties = schema.get("properties")
    value = properties.get(name) if isinstance(properties, Mapping) else None
    found = _kinds(value, schema, _MAX_REFERENCES)
    return found | {"integer"} if found is not None and "number" in found else found or frozenset()


def resolved(value: Any, schema: Schema) -> Any:
    """A schema, or the one in `schema` that it refers to and that is all it says."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(value, Mapping) or "$ref" not in value:
            return value
        value = _at(schema, value["$ref"])
    return None


def _kinds(value: Any, schema: Schema, depth: int) -> frozenset[str] | None:
    """None where anything may come, or what cannot be told."""
    value = resolved(value, schema)
    if not isinstance(value, Mapping) or not depth:
        return None
    if "const" in value:
        return frozenset({kind_of_value(value["const"])})
    if isinstance(value.get("enum"), list):
        return frozenset(map(kind_of_value, value["enum"]))
    if isinstance(value.get("type"), str):
        return frozenset({value["type"]})
    if isinstance(value.get("type"), list):
        return frozenset(map(str, value["type"]))
    for several in ("anyOf", "oneOf"):
        if isinstance(value.get(several), list):
            found = [_kinds(one, schema, depth - 1) for one in value[several]]
            return None if None in found else frozenset().union(*(one for one in found if one is not None))
    return None


def kind_of_value(value: Any) -> str:
    """JSON schema's name of the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _at(schema: Schema, reference: Any) -> Any:
    """What a reference into the schema itself names, None if it names nothing there."""
    if not isinstance(reference, str) or not reference.startswith(_REFERENCE):
        return None
    value: Any = schema
    for part in reference.removeprefix(_REFERENCE).split("/"):
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value
