"""`$ref` in a client's schemas: what leads to itself alone is found before an answer has come so far."""

from __future__ import annotations

from typing import Any

import pytest

from service.grammars.constraints import ConstraintError, grammar_of, schema_constraint, tag_constraint
from service.grammars.json_schemas import endless_reference, refers_to_definitions_alone

_SELF = {"A": {"$ref": "#/$defs/A"}}
_RING = {"A": {"$ref": "#/$defs/B"}, "B": {"allOf": [{"type": "object"}, {"$ref": "#/$defs/C"}]}}
_RING |= {"C": {"anyOf": [{"$ref": "#/$defs/A"}]}}


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"$ref": "#"}, "#"),
        ({"allOf": [{"$ref": "#"}]}, "#"),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": _SELF}, "#/$defs/A"),
        ({"type": "array", "items": {"$ref": "#/%24defs/A"}, "$defs": _SELF}, "#/$defs/A"),
        ({"prefixItems": [{"$ref": "#/prefixItems/0"}]}, "#/prefixItems/0"),
        ({"properties": {"a/b": {"$ref": "#/properties/a~1b"}}}, "#/properties/a~1b"),
        ({"items": {"$ref": "#/$defs/A"}, "$defs": _RING}, "#/$defs/A"),
        # What nothing refers to is never met.
        ({"type": "string", "$defs": _SELF}, None),
        # Each begins with something of its own.
        ({"type": "array", "items": {"$ref": "#"}}, None),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]}, None),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"type": "null"}}}, None),
        # No references, or none within the schema.
        ({"properties": {"$ref": {"type": "string"}}}, None),
        ({"$ref": "#name"}, None),
        ({"$ref": "https://example.com/x.json"}, None),
        ({"$ref": "#/$defs/missing"}, None),
    ],
    ids=str,
)
def test_what_leads_to_itself_alone_is_found(schema: dict[str, Any], reference: str | None) -> None:
    assert endless_reference(schema) == reference
    if reference is not None:
        with pytest.raises(ConstraintError, match="refers to itself without end; let it refer to a schema"):
            grammar_of(schema_constraint(schema), {})


def test_a_long_chain_is_followed_to_its_end() -> None:
    chain: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(5000)}
    assert endless_reference({"$ref": "#/$defs/d0", "$defs": chain}) is None
    chain["d5000"] = {"$ref": "#/$defs/d2500"}
    assert endless_reference({"$ref": "#/$defs/d0", "$defs": chain}) == "#/$defs/d2500"


def test_a_tag_s_schema_is_looked_at_too() -> None:
    tag = '{"structures": [{"begin": "<a>", "schema": {"$ref": "#"}, "end": "</a>"}], "triggers": ["<a>"]}'
    with pytest.raises(ConstraintError, match="refers to itself without end"):
        grammar_of(tag_constraint(tag), {})


@pytest.mark.parametrize(
    ("reference", "does"), [("#/$defs/A", True), ("#/definitions/A", True), ("#", False), ("#/properties/x", False)]
)
def test_parts_keep_their_meaning_where_all_references_are_to_definitions(reference: str, does: bool) -> None:
    assert refers_to_definitions_alone({"properties": {"y": {"items": {"$ref": reference}}}}) == does
