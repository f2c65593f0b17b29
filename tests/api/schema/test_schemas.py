"""Generated JSON schemas over HTTP: every answer that ends by itself is valid, whoever answers and however it is asked.

`NUM_SCHEMAS=1000 pytest tests/api/schema/test_schemas.py` is the long form.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from tests.api.conftest import ADAPTERS, BASE
from tests.support.http.json_schemas import make_schema
from tests.support.http.server import Server

NUM_SCHEMAS = int(os.environ.get("NUM_SCHEMAS", "120"))
BATCH_ITEMS = 60
MAX_TOKENS = 300
FORMATS = FormatChecker(["ipv4", "uuid", "email"])


def request_of(seed: int) -> dict[str, Any]:
    """In turn: of the base and each adapter, as chat and completion, by each field that takes a schema."""
    schema = make_schema(seed)
    named = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}
    asked = [{"response_format": named}, {"structured_outputs": {"json": schema}}, {"guided_json": json.dumps(schema)}]
    text: dict[str, Any] = {"messages": [{"role": "user", "content": "the"}]} if seed % 2 else {"prompt": "the"}
    speaker = (BASE, *ADAPTERS)[seed % 4]
    return {**text, **asked[seed % 3], "model": speaker, "max_tokens": MAX_TOKENS, "seed": seed, "temperature": 0.8}


def answers(server: Server, seeds: list[int]) -> dict[int, tuple[str, str]]:
    """Text and finish_reason of each."""
    given = {}
    for at in range(0, len(seeds), BATCH_ITEMS):
        some = seeds[at : at + BATCH_ITEMS]
        reply = server.post("/v1/completions/batch", json={"items": [request_of(seed) for seed in some]})
        assert reply.status_code == 200, reply.text
        for seed, item in zip(some, reply.json()["items"], strict=True):
            assert "error" not in item, (seed, item)
            choice = item["choices"][0]
            given[seed] = (choice.get("text") or choice["message"]["content"], choice["finish_reason"])
    return given


def _first_of_each_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What some readers make of an object that has a name twice; Python's own takes the last."""
    return dict(reversed(pairs))


def test_every_answer_that_ends_by_itself_is_valid(server: Server) -> None:
    given = answers(server, list(range(NUM_SCHEMAS)))
    ended = {seed: text for seed, (text, reason) in given.items() if reason == "stop"}
    for seed, text in ended.items():
        validator = Draft202012Validator(make_schema(seed), format_checker=FORMATS)
        for value in (json.loads(text), json.loads(text, object_pairs_hook=_first_of_each_name)):
            assert not [error.message for error in validator.iter_errors(value)], (seed, text)
    # Otherwise nothing was shown.
    assert len(ended) > 0.6 * NUM_SCHEMAS


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_gives_the_same(server: Server, seed: int) -> None:
    request = request_of(seed)
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    whole = server.post(path, json=request).json()["choices"][0]
    text, reason = "", None
    with server.http.stream("POST", f"{server.url}{path}", json={**request, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                reason = choice["finish_reason"] or reason
    assert (text, reason) == (whole.get("text") or whole["message"]["content"], whole["finish_reason"])
