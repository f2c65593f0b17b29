"""JSON schemas of the kinds that JSONSchemaBench has: function calls, configurations, resources, events.

They are made from a seed, hold only what the grammars here can follow, and are small enough for a model of random
weights to come to an end: texts and lists have a largest length.
"""

from __future__ import annotations

import random
from typing import Any

_NAMES = (
    *(
        "id",
        "name",
        "type",
        "kind",
        "spec",
        "metadata",
        "labels",
        "url",
        "é",
        "a b",
        'quo"te',
        "back\\slash",
        "$ref-like",
    ),
    *("count", "enabled", "items", "tags", "created_at", "x-extra", "camelCase", "UPPER", "0", "deep.dotted"),
)
_PATTERNS = ("^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{3}$", "^(GET|POST)$", "^#[0-9a-f]{6}$", "^v[0-9]+\\.[0-9]+$", "[0-9]")
# Of those that a validator checks by their looks alone. 29 February is a date to a grammar in any year.
_FORMATS = ("uuid", "ipv4", "email", "date-time", "hostname")
_WORDS = ("red", "green", "null", "true", "a\nb", "<|im_end|>", "</s>", "ü", "😀", "", " ")
_MAX_DEPTH = 4


def make_schema(seed: int) -> dict[str, Any]:
    """The schema of this seed: always the same, an object at the root."""
    return _Maker(random.Random(seed)).root()


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: dict[str, Any] = {}

    def root(self) -> dict[str, Any]:
        for number in range(self._rng.choice((0, 0, 1, 2))):
            self._definitions[f"part{number}"] = self._scalar()
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A schema", **self._object(0)}
        if self._rng.random() < 0.15:
            self._definitions["tree"] = {
                "type": "object",
                "properties": {"value": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
                "required": ["value"],
                "additionalProperties": False,
            }
            schema["properties"]["tree"] = {"$ref": "#/$defs/tree"}
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _any(self, depth: int) -> dict[str, Any]:
        nested = (self._object, self._array, self._tuple, self._any_of, self._one_of, self._all_of, self._map)
        if depth < _MAX_DEPTH and self._rng.random() < 0.4:
            return self._rng.choice(nested)(depth + 1)
        if self._definitions and self._rng.random() < 0.2:
            return {"$ref": f"#/$defs/{self._rng.choice(sorted(self._definitions))}"}
        return self._scalar()

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(_NAMES, self._rng.randint(1, 5))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": [name for name in names if self._rng.random() < 0.6],
        }
        if self._rng.random() < 0.8:
            schema["additionalProperties"] = False
        elif self._rng.random() < 0.5:
            schema["additionalProperties"] = self._scalar()
        if self._rng.random() < 0.3:
            schema["description"] = "An object with some properties."
        return schema

    def _map(self, _depth: int) -> dict[str, Any]:
        if self._rng.random() < 0.5:
            return {"type": "object", "patternProperties": {"^x[a-c]$": self._scalar()}, "additionalProperties": False}
        return {"type": "object", "additionalProperties": self._scalar(), "minProperties": 1, "maxProperties": 3}

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._rng.choice((0, 0, 1, 2))
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": least + 2}

    def _tuple(self, depth: int) -> dict[str, Any]:
        items = [self._any(depth) for _ in range(self._rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth), {"type": "null"}]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        """Objects that tell themselves apart."""
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": self._any(depth)},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for kind in ("first", "second")
            ]
        }

    def _all_of(self, _depth: int) -> dict[str, Any]:
        low = self._rng.randint(-50, 50)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + self._rng.randint(0, 30)}]}

    def _scalar(self) -> dict[str, Any]:
        rng, low = self._rng, self._rng.randint(-100, 100)
        return rng.choice(
            (
                {"type": "boolean"},
                {"type": "null"},
                {"type": "string", "maxLength": rng.randint(0, 12)},
                {"type": "string", "minLength": 2, "maxLength": 6},
                {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12},
                {"type": "string", "format": rng.choice(_FORMATS)},
                {"type": "string", "enum": rng.sample(_WORDS, 3)},
                {"enum": [rng.choice(_WORDS), low, None, True, 1.5, ["a", {"b": 2}]]},
                {"const": rng.choice((*_WORDS, low, False, {"a": [1, "x"]}))},
                {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 20},
                {"type": "integer", "multipleOf": rng.choice((2, 5, 10)), "minimum": 0, "maximum": 1000},
                {"type": "number", "minimum": low, "maximum": low + 1},
                {"type": ["string", "null"], "maxLength": 5},
                {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9},
            )
        )
