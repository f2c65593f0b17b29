"""Two hundred constraints that are none: each is a 400 with a sentence, and the server goes on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from service.grammars.constraints import MAX_CHOICES, MAX_CONSTRAINT_BYTES, MAX_SCHEMA_DEPTH, MAX_SCHEMA_VALUES
from tests.api.conftest import BASE
from tests.support.http.json_schemas import make_schema
from tests.support.http.server import Server

_SPOILED: tuple[dict[str, Any], ...] = (
    {"type": "objet"},
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "string"}},
    {"$ref": "#/$defs/nobody"},
    {"$ref": "http://example.com/schema.json"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "(a"},
    {"type": "string", "format": "uri-reference"},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "integer", "minimum": "low"},
    {"enum": []},
    {"anyOf": []},
    {"properties": []},
    {"required": "name"},
    {"items": 3},
    {"type": "object", "minProperties": 2},
)


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _chain(length: int, link: Any) -> dict[str, Any]:
    parts = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{length}": {"type": "string"}}}


# What crashes, stalls or fills the library, or would.
_HOSTILE: tuple[dict[str, Any], ...] = (
    {"guided_json": _chain(3000, lambda ref: ref)},
    {"guided_json": _chain(2500, lambda ref: {"anyOf": [ref, {"type": "null"}]})},
    {"guided_json": _chain(3000, lambda ref: {"items": ref})},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"allOf": [{"$ref": "#"}, {"type": "object"}]}},
    {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    {"guided_json": _nested(MAX_SCHEMA_DEPTH + 1)},
    {"guided_json": {"enum": list(range(MAX_SCHEMA_VALUES))}},
    {"guided_json": {"const": "x" * MAX_CONSTRAINT_BYTES}},
    {"guided_json": {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}},
    {"guided_choice": [str(number) for number in range(MAX_CHOICES + 1)]},
    {"guided_regex": "a" * (MAX_CONSTRAINT_BYTES + 1)},
    {"guided_regex": "(" * 50_000 + "a" + ")" * 50_000},
    {"guided_grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    {"guided_grammar": "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000},
    {"guided_grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(12_000)) + '\na12000: "x"'},
    {"guided_grammar": "start: start start"},
    {"guided_json": "\ud800"},
)
_PLAIN: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "xml"}},
    {"response_format": {}},
    {"response_format": "json_object"},
    {"response_format": ["json_object"]},
    {"response_format": {"type": "json_object", "schema": {}}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": None}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}}},
    {"response_format": {"type": "structural_tag"}},
    {"response_format": {"type": "structural_tag", "format": {"type": "spiral"}}},
    {"response_format": {"type": "structural_tag", "format": {"type": "tag", "begin": "a", "end": "b"}}},
    {"response_format": {"type": "structural_tag", "format": {"type": "any_text", "excludes": ["a"]}}},
    {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}, "triggers": ["a"]}},
    {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
    {"response_format": {"type": "structural_tag", "structures": [{"begin": "b", "end": ""}], "triggers": ["a"]}},
    {"response_format": {"type": "structural_tag", "structures": [{"begin": "b", "end": ""}], "triggers": [""]}},
    {"response_format": {"type": "structural_tag", "structures": [{"begin": "b"}], "triggers": ["b"]}},
    {"structured_outputs": []},
    {"structured_outputs": {"regx": "a"}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
    {"structured_outputs": {"json": {}, "whitespace_pattern": "("}},
    {"structured_outputs": {"json": {}, "whitespace_pattern": "a" * 1000}},
    {"structured_outputs": {"json": {}, "disable_additional_properties": []}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": "[" * 100_000}},
    {"structured_outputs": {"json": "3"}},
    {"structured_outputs": {"structural_tag": "{}"}},
    {"structured_outputs": {"structural_tag": "[]"}},
    {"structured_outputs": {"structural_tag": "{"}},
    {"structured_outputs": {"grammar": "root = a"}},
    {"structured_outputs": {"grammar": ""}},
    {"guided_grammar": "start: nobody"},
    {"guided_grammar": "start: <[9999]>"},
    {"guided_grammar": "start: <|nobody|>"},
    {"guided_grammar": "start: %json {"},
    {"guided_grammar": "\x00"},
    {"guided_choice": []},
    {"guided_choice": "a"},
    {"guided_choice": [1]},
    {"guided_choice": ["\ud800"]},
    {"guided_regex": "(?=a)"},
    {"guided_regex": r"(a)\1"},
    {"guided_regex": r"\ba"},
    {"guided_regex": "[z-a]"},
    {"guided_regex": "a{5,2}"},
    {"guided_regex": ""},
    {"guided_regex": 3},
    {"guided_json": 3},
    {"guided_json": []},
    {"guided_json": False},
    {"guided_whitespace_pattern": " "},
    {"guided_decoding_backend": "outlines"},
    {"json_schema": "{"},
    {"ebnf": "root"},
    {"structural_tag": "{}"},
)


def _spoiled(seed: int) -> dict[str, Any]:
    """A good schema with one property that cannot be followed, which must be there."""
    schema = make_schema(seed)
    schema["properties"]["bad"] = _SPOILED[seed % len(_SPOILED)]
    schema.setdefault("required", []).append("bad")
    return {"guided_json": schema} if seed % 2 else {"structured_outputs": {"json": json.dumps(schema)}}


BAD = [*_PLAIN, *_HOSTILE, *(_spoiled(seed) for seed in range(200 - len(_PLAIN) - len(_HOSTILE)))]


@pytest.mark.parametrize("num_at_once", [4])
def test_each_is_a_400_with_a_sentence_and_the_server_goes_on(server: Server, num_at_once: int) -> None:
    assert len(BAD) == 200
    engines = server.engine_pids()

    def ask(bad: dict[str, Any]) -> tuple[int, Any]:
        path, text = (
            ("/v1/completions", {"prompt": "the"})
            if len(json.dumps(bad)) % 2
            else ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]})
        )
        body = json.dumps({"model": BASE, **text, "max_tokens": 5, **bad})  # httpx would not spell half a character
        answer = server.post(path, content=body, headers={"Content-Type": "application/json"})
        return answer.status_code, answer.json()

    with ThreadPoolExecutor(num_at_once) as pool:
        asked = [pool.submit(ask, bad) for bad in BAD]
        while not all(one.done() for one in asked):
            assert server.get("/health").status_code == 200
    for bad, done in zip(BAD, asked, strict=True):
        status, answer = done.result()
        shown = json.dumps(bad)[:300]
        assert status == 400, (shown, answer)
        message = answer["error"]["message"]
        assert message.endswith(".") and len(message) > 20, (shown, message)
        assert "Traceback" not in message and "0xf0000" not in message, (shown, message)
        assert len(message) < 1000, (shown, message)
    assert server.engine_pids() == engines
    good = {"model": BASE, "prompt": "the", "guided_choice": ["fine"]}
    assert server.post("/v1/completions", json=good).json()["choices"][0]["text"] == "fine"
