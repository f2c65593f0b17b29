"""The adapter that calls a tool: its data, and what it does with sums that no training has seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from examples.bundled_calculator import (
    CALCULATOR,
    CHAT_TEMPLATE,
    NO_TOOL,
    call_text,
    first_turn,
    held_out_calls,
    second_turn,
    sums,
    talks,
    tool_of,
)
from examples.bundled_jobs import HELD_OUT_CASES
from examples.train_adapters import ADAPTERS_DIR, BATCH_ROWS
from examples.train_base import BASE_DIR
from tests.support.http.server import Server, running_server

# Tool and argument: the names that it saw most, and others that it has to read.
NAMES = (("calculator", "expression"), ("abacus", "sum"))
ASK: dict[str, Any] = {"model": CALCULATOR.name, "temperature": 0, "max_tokens": 160}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Server]:
    with running_server(
        BASE_DIR,
        tmp_path_factory.mktemp("calculator"),
        max_batch_items=HELD_OUT_CASES,
        max_queued_requests=HELD_OUT_CASES,
        kv_bytes="32MiB",
        device=device,
    ) as running:
        yield running


def answers(server: Server, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a batch, in order."""
    reply = httpx.post(f"{server.url}/v1/completions/batch", json={"items": items}, timeout=600)
    assert reply.status_code == 200, reply.text
    assert not [item for item in reply.json()["items"] if "error" in item]
    return [item["choices"][0] for item in reply.json()["items"]]


def test_the_template_renders_what_was_trained() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    assert (ADAPTERS_DIR / CALCULATOR.name / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    tools, messages = [tool_of("calc", "x")], [{"role": "user", "content": "1 + 2"}]
    render = {"chat_template": CHAT_TEMPLATE, "tokenize": False, "add_generation_prompt": True}
    first = first_turn("1 + 2", "calc", "x")
    assert tokenizer.apply_chat_template(messages, tools=tools, **render) == first
    assert tokenizer.apply_chat_template(messages, **render) == first_turn("1 + 2", None, "")
    function = {"name": "calc", "arguments": {"x": "1 + 2"}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    messages += [called, {"role": "tool", "content": "3"}]
    rendered = tokenizer.apply_chat_template(messages, tools=tools, **render)
    assert rendered == second_turn(first, call_text("calc", "x", "1 + 2"), "3")


def test_no_held_out_question_was_trained_on() -> None:
    cases = {question for question, _ in held_out_calls()}
    num_trained = BATCH_ROWS * CALCULATOR.steps
    trained = {question for _, question, _ in islice(sums("training", held_out=False), num_trained)}
    assert len(cases) == HELD_OUT_CASES
    assert not trained & cases
    assert not [prompt for prompt, _ in islice(talks("training", held_out=False), num_trained) if prompt in cases]


@pytest.mark.parametrize(("tool", "argument"), NAMES)
def test_it_calls_the_tool_with_the_sum(server: Server, tool: str, argument: str) -> None:
    """At least nine of ten calls are exactly right, names included."""
    cases = held_out_calls()
    items = [
        {**ASK, "messages": [{"role": "user", "content": question}], "tools": [tool_of(tool, argument)]}
        for question, _ in cases
    ]
    right = 0
    for choice, (_, expression) in zip(answers(server, items), cases, strict=True):
        calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        called = [(call["name"], json.loads(call["arguments"])) for call in calls]
        right += (choice["finish_reason"], called) == ("tool_calls", [(tool, {argument: expression})])
    assert right >= 0.9 * len(cases), right


def test_it_says_what_the_tool_said(server: Server) -> None:
    cases = held_out_calls()
    items, wanted = [], []
    for number, (question, expression) in enumerate(cases):
        function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        call = {"id": "c", "type": "function", "function": function}
        result = str(number * number * 7 - 300)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": result},
        ]
        items.append({**ASK, "messages": messages, "tools": [tool_of("calculator", "expression")]})
        wanted.append(f"The answer is {result}.")
    said = [choice["message"]["content"] for choice in answers(server, items)]
    assert sum(one == other for one, other in zip(said, wanted, strict=True)) >= 0.9 * len(cases)


def test_without_a_tool_it_calls_none(server: Server) -> None:
    items = [{**ASK, "messages": [{"role": "user", "content": question}]} for question, _ in held_out_calls(50)]
    said = [choice["message"]["content"] for choice in answers(server, items)]
    assert said.count(NO_TOOL) >= 45
