"""Grammars, schemas and regular expressions that are ambiguous, huge, deep, or costly to compile or to follow."""

from __future__ import annotations

import json
from typing import Any

from bench.hostile.target import Attack, Target, in_turn, spread

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# About forty bytes each; what they write may be read in more ways than there are atoms.
AMBIGUOUS = (
    'start: s\ns: s s s | s s | "a" | "b"',
    'start: s\ns: x s x | x s | s x | x\nx: "a" | "a" x | x "a"',
    'root ::= s\ns ::= s s s | s s | "a" | "b"',
    'start: a*\na: b*\nb: ("a" | "aa")*',
)
REGEXES = (
    "((a|b|.)*(.*)*(.*)*)*!",
    "(.{1,1000}){1,1000}",
    "(x+x+)+y",
    "[a-z]{1,200000}",
    ".*a.{300}",
    "(?=a)b",
    "(" * 50_000 + "a" + ")" * 50_000,
    "|".join("ab" * (number % 9 + 1) for number in range(20_000)),
    "a" * 300_000,
)
LARK = (
    "start: " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "start: a0\n" + "\n".join(f"a{number}: a{number + 1}" for number in range(10_000)) + '\na10000: "x"',
    "start: start start",
    "start: " + " | ".join(f"/a{{{number}}}b*/" for number in range(1, 2_000)),
    'start: "' + "a" * 250_000 + '"',
)


def _chain(length: int) -> dict[str, Any]:
    links = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _doubling(levels: int) -> dict[str, Any]:
    """Of so many levels, each of which has the next one twice."""
    parts = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}}]}
        for n in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{levels}": {"type": "integer"}}}


SCHEMAS: tuple[dict[str, Any], ...] = (
    _chain(3_000),
    _nested(90),
    _nested(400),
    _doubling(40),
    {"$ref": "#"},
    {"type": "object", "properties": {f"property-{number}": {"type": "string"} for number in range(5_000)}},
    {"enum": [f"value-{number}" for number in range(15_000)]},
    {"type": "integer", "multipleOf": 999_983},
    {"type": "string", "pattern": "^(a|b|.)*(.*)*x{1,5000}$"},
    {"type": "string", "minLength": 100_000, "maxLength": 10_000_000},
    {"type": "array", "items": {"type": "array", "minItems": 1_000}, "minItems": 1_000},
    {"allOf": [{"type": "object", "properties": {f"p{number}": {}}} for number in range(500)]},
)


def attacks(target: Target) -> dict[str, Attack]:
    """By what is told of them."""

    def completion(fields: dict[str, Any], times: int = 1, **others: Any) -> Attack:
        body = {"prompt": "the", "max_tokens": 200, "ignore_eos": True, **fields, **others}
        return target.post(COMPLETIONS, body, times)

    def schema(one: dict[str, Any]) -> Attack:
        return completion({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": one}}})

    tags = [{"begin": f"<{number}>", "schema": _nested(20), "end": f"</{number}>"} for number in range(500)]
    structural = {"type": "structural_tag", "structures": tags, "triggers": ["<"]}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": _nested(30)}} for n in range(128)]
    asked = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 20,
        "tools": tools,
        "tool_choice": "required",
    }
    return {
        "ambiguous grammars of 40 bytes": in_turn(*(completion({"guided_grammar": one}) for one in AMBIGUOUS)),
        "64 ambiguous grammars at once, half of them streamed": spread(
            [completion({"guided_grammar": one, "stream": stream}, 8) for one in AMBIGUOUS for stream in (False, True)],
            8,
        ),
        "an ambiguous grammar with 16 choices": completion({"guided_grammar": AMBIGUOUS[0]}, n=16),
        "long and deep grammars": in_turn(*(completion({"guided_grammar": one}) for one in LARK)),
        "huge, deep and circular schemas": in_turn(*map(schema, SCHEMAS)),
        "32 schemas at once, each its own": spread([schema({"enum": [n, "x" * 9_000]}) for n in range(32)], 32),
        "a schema that takes too long, 12 times at once": spread([schema(SCHEMAS[7])] * 12, 12),
        "regular expressions that backtrack or count far": in_turn(
            *(completion({"guided_regex": one}) for one in REGEXES)
        ),
        "10,000 choices, 500 structural tags, 128 tools": in_turn(
            completion({"guided_choice": [f"choice {number}" for number in range(10_000)]}),
            completion({"response_format": structural}),
            target.post(CHATS, asked),
        ),
        "a batch of 64 ambiguous grammars": target.post(
            "/v1/completions/batch",
            json.dumps(
                {
                    "items": [
                        {"model": target.model, "prompt": "a", "max_tokens": 50, "guided_grammar": AMBIGUOUS[n % 4]}
                        for n in range(64)
                    ]
                }
            ).encode(),
        ),
    }
