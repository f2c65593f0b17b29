"""Constraints on an answer, bounded before anybody parses them, and their grammars in llguidance's terms.

Nothing here imports llguidance: bounding is for the API process, `grammar_of` for the process that may die of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from service.grammars.json_schemas import TooManyParts, closed, least_chars, objects_of
from service.grammars.lark import ConstraintError, from_gbnf, lark_of_tag, regex_rule, with_policy

Kind = Literal["json_schema", "regex", "choice", "lark", "grammar", "structural_tag"]

# Bytes of one constraint. The schemas of large APIs have 150 KB.
MAX_CONSTRAINT_BYTES = 1 << 18
MAX_SCHEMA_DEPTH = 200
MAX_SCHEMA_VALUES = 1 << 15
_MAX_PARTS = 4 * MAX_SCHEMA_VALUES
MAX_CHOICES = 10_000
MAX_WHITESPACE_PATTERN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the answer's text.

    kind        of `text`: a JSON schema; a regular expression that the whole answer matches; a JSON list of texts, of
                which it is one; a grammar of llguidance's Lark; a grammar of Lark or of GBNF; a structural tag as JSON
    whitespace  regular expression of what may stand between the tokens of JSON; None: the usual
    around      a grammar of Lark in whose rules `answer` stands for this one; None: this one alone
    """

    kind: Kind
    text: str
    whitespace: str | None = None
    around: str | None = None


def schema_constraint(schema: Any, whitespace: str | None = None, *, closes_objects: bool = True) -> Constraint:
    """A JSON schema, as an object, a bool or text. ConstraintError for what is none, or is too large.

    closes_objects  see `closed_schema`; otherwise the schema is followed as it stands
    """
    schema = _parsed(schema)
    if not isinstance(schema, dict | bool):
        raise ConstraintError("must be a JSON schema: an object, or its text")
    if schema is False:
        raise ConstraintError("is the schema that nothing fits, so that there is no answer; leave it out")
    _bound_values(schema)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ConstraintError("holds `x-guidance`, which is no keyword of JSON schemas; leave it out")
    if whitespace is not None and len(whitespace) > MAX_WHITESPACE_PATTERN_CHARS:
        raise ConstraintError(f"has a white-space pattern of more than {MAX_WHITESPACE_PATTERN_CHARS} characters")
    if closes_objects:
        schema = closed_schema(schema)
    for one in objects_of(schema):
        _refuse_counted_names(one)
    return _bounded(Constraint("json_schema", json.dumps(schema, ensure_ascii=False), whitespace))


def choice_constraint(choices: list[str]) -> Constraint:
    """One of these texts. ConstraintError for none, or too many."""
    if not choices:
        raise ConstraintError("is an empty list; send at least one text")
    if len(choices) > MAX_CHOICES:
        raise ConstraintError(f"has {len(choices)} texts; this server takes {MAX_CHOICES}")
    _bound_size(sum(map(len, choices)))
    return _bounded(Constraint("choice", json.dumps(choices, ensure_ascii=False)))


def text_constraint(kind: Literal["regex", "lark", "grammar"], text: str) -> Constraint:
    """A regular expression or a grammar. ConstraintError for one that is empty or too large."""
    if not text:
        raise ConstraintError("is empty")
    return _bounded(Constraint(kind, text))


def tag_constraint(tag: Any, *, closes_objects: bool = True) -> Constraint:
    """A structural tag, as an object or text; `closes_objects` for its schemas as in `schema_constraint`.
    ConstraintError for what is none, or is too large."""
    parsed = _parsed(tag)
    if not isinstance(parsed, dict):
        raise ConstraintError("must be an object")
    _bound_values(parsed)
    if closes_objects:
        parsed = _with_closed_schemas(parsed)
    for one in objects_of(parsed):
        _refuse_counted_names(one)
    return _bounded(Constraint("structural_tag", json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))))


def closed_schema(schema: Any) -> Any:
    """A JSON schema whose objects take no other properties than those that it names, where it names some and does not
    say `additionalProperties`. ConstraintError for one that is too entangled to tell."""
    try:
        return closed(schema, _MAX_PARTS)
    except TooManyParts as error:
        raise ConstraintError(
            "has too many schemas that apply together; say `additionalProperties` where its objects are"
        ) from error


def _with_closed_schemas(tag: Any) -> Any:
    """A part of a structural tag with each JSON schema in it closed."""
    if isinstance(tag, list):
        return [_with_closed_schemas(one) for one in tag]
    if not isinstance(tag, dict):
        return tag
    return {
        name: closed_schema(value) if name in ("schema", "json_schema") else _with_closed_schemas(value)
        for name, value in tag.items()
    }


def grammar_of(constraint: Constraint, special_ids: Mapping[str, int]) -> str:
    """The constraint as llguidance reads it, not compiled. ConstraintError for GBNF and tags that cannot be read.

    special_ids  of the model's special tokens, by their texts
    """
    if constraint.kind == "json_schema":
        schema = with_policy(json.loads(constraint.text), constraint.whitespace)
        if constraint.around is None:
            return json.dumps({"grammars": [{"json_schema": schema}]})
        return _lark(f"{constraint.around}\nanswer: %json {json.dumps(schema)}")
    lark = _lark_text(constraint, special_ids)
    return _lark(lark if constraint.around is None else f"{constraint.around}\nanswer: %lark {{\n{lark}\n}}")


def _lark_text(constraint: Constraint, special_ids: Mapping[str, int]) -> str:
    """The grammar, in Lark, of what is no JSON schema."""
    match constraint.kind:
        case "regex":
            return f"start: {regex_rule(constraint.text)}"
        case "choice":
            # As one terminal: as alternatives of a rule, two thousand would be too many.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.text))
            return f"start: CHOICE\nCHOICE: {texts}"
        case "grammar":
            return from_gbnf(constraint.text)
        case "structural_tag":
            return lark_of_tag(json.loads(constraint.text), special_ids)
        case _:
            return constraint.text


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _parsed(given: Any) -> Any:
    """The JSON value of a text; anything else unchanged."""
    if not isinstance(given, str):
        return given
    _bound_bytes(given)
    try:
        return json.loads(given)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConstraintError(f"is not valid JSON ({error})") from error
    except ValueError as error:  # Python's own words are for programmers
        raise ConstraintError(f"holds an integer of more than {sys.get_int_max_str_digits()} digits") from error


def _bounded(constraint: Constraint) -> Constraint:
    _bound_bytes(constraint.text)
    return constraint


def _bound_bytes(text: str) -> None:
    _bound_size(len(text))
    try:
        _bound_size(len(text.encode()))
    except UnicodeEncodeError as error:
        raise ConstraintError("holds half of a surrogate pair; send valid Unicode") from error


def _bound_size(num_bytes: int) -> None:
    if num_bytes > MAX_CONSTRAINT_BYTES:
        raise ConstraintError(f"has {num_bytes} bytes; this server takes {MAX_CONSTRAINT_BYTES}")


def _bound_values(schema: Any) -> None:
    """Depth, number and size of all values."""
    level, num_values, depth = [schema], 0, 0
    while level:
        num_values += len(level)
        if num_values > MAX_SCHEMA_VALUES:
            raise ConstraintError(f"has more than {MAX_SCHEMA_VALUES} values")
        if depth > MAX_SCHEMA_DEPTH:
            raise ConstraintError(f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        level = [inner for value in level for inner in _children(value)]
        depth += 1
    _bound_size(least_chars(schema, MAX_CONSTRAINT_BYTES))


def _refuse_counted_names(schema: dict[Any, Any]) -> None:
    """A grammar counts a name that an object holds twice as two: of names that are not listed, only the first is sure
    to be another one."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_sure = 1 + (len(required) if isinstance(required, list) else 0)
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if isinstance(least, int) and least > num_sure and not is_closed:
        raise ConstraintError(
            f"has `minProperties` {least} for names that it does not list, which cannot be followed; list them in "
            "`required`"
        )


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []
