"""What is too long is refused for what it is at least, before it is written as text: to write long numbers takes as
long as hundreds of requests, and Python's lock meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from service.api.schema.chat_messages import MAX_DATA_CHARS, ChatMessage
from service.api.schema.error_messages import bad_request
from service.api.schema.requests import ChatRequest
from service.api.schema.responses import ResponsesRequest
from service.fairness.thread_pool import LONG_TEXT_CHARS
from service.grammars.constraints import MAX_CONSTRAINT_BYTES, ConstraintError, schema_constraint, tag_constraint
from service.grammars.json_schemas import least_chars
from tests.api.conftest import BASE
from tests.support.http.server import Server

USER: dict[str, Any] = {"role": "user", "content": "a"}
NUMBER, NUM_NUMBERS = 10**4000, 400  # longer than one in a body may be
NUMBERS = [NUMBER] * NUM_NUMBERS
LONG = {"a": NUMBERS}
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
)


def _called(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def _refused(fields: dict[str, Any], sentence: str) -> Callable[[], object]:
    def work() -> None:
        with pytest.raises(ValidationError) as raised:
            ChatRequest.model_validate({"messages": [USER], **fields})
        message = bad_request(raised.value.errors()).message
        assert sentence in message and len(message) < 1_000, message[:200]

    return work


def _no_constraint(make: Callable[[Any], object], value: Any) -> Callable[[], object]:
    def work() -> None:
        with pytest.raises(ConstraintError):
            make(value)

    return work


WORKS: dict[str, Callable[[], object]] = {
    "a schema": _no_constraint(schema_constraint, {"enum": NUMBERS}),
    "a structural tag": _no_constraint(tag_constraint, {"structures": [{"schema": {"enum": NUMBERS}}]}),
    "tools": _refused(
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": LONG}}]}, "`tools` has at least"
    ),
    "a call's arguments": _refused({"messages": [_called(LONG)]}, "`arguments` of a call may have up to"),
    "variables of a template": _refused({"chat_template_kwargs": LONG}, "it may have up to"),
    "a part's type": _refused({"messages": [{**USER, "content": [{"type": NUMBERS}]}]}, "whose type is no text"),
    "a format's type": _refused({"response_format": {"type": NUMBERS}}, "`response_format` must be"),
    # Not refused: its size says where it is rendered.
    "a message's size": lambda: ChatMessage.model_validate(_called({"a": NUMBERS[150:]})).num_chars,
}


@pytest.fixture
def unwritable() -> Iterator[None]:
    """Python refuses to write or read numbers of so many digits, as it does in the server."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("unwritable")
@pytest.mark.parametrize("what", WORKS)
def test_what_is_too_long_is_not_written(what: str) -> None:
    with pytest.raises(ValueError, match="digits"):
        json.dumps(NUMBERS)
    WORKS[what]()


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function", "name": "f", "parameters": {"enum": [1] * 20_000}}]},
        {"tool_choice": {"type": "allowed_tools", "tools": [{"a": "b" * 20_000}]}},
        {"chat_template_kwargs": {"a": [1] * 20_000}},
        {"text": {"format": {"type": "json_schema", "schema": {"enum": [1] * 20_000}}}},
        {"input": "a" * 20_000},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_response_that_is_long_anywhere_becomes_a_chat_in_a_thread(field: dict[str, Any]) -> None:
    assert ResponsesRequest.model_validate({"input": "a"}).num_chars < 100
    assert ResponsesRequest.model_validate({"input": "a", **field}).num_chars >= LONG_TEXT_CHARS


@given(st.lists(_VALUES) | st.dictionaries(st.text(), _VALUES), st.integers(0, 300))
def test_no_more_is_counted_than_would_be_written(data: Any, enough: int) -> None:
    written = len(json.dumps(data, ensure_ascii=False))
    assert least_chars(data, written) <= written
    assert least_chars(data, enough) <= written


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ([1] * 1000, 3000),
        (["abc"] * 1000, 7000),
        ([2.5] * 1000, 5000),
        ({str(n): {} for n in range(100, 1100)}, 9000),
        ([10**400] * 10, 3300),
    ],
    ids=["numbers", "texts", "fractions", "objects", "long numbers"],
)
def test_what_is_counted_is_most_of_what_would_be_written(data: Any, count: int) -> None:
    assert count <= least_chars(data, 1 << 20) <= len(json.dumps(data))
    assert 100 < least_chars(data, 100) < 110 + 400, "the walk ends"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("kind", ["text", "object"])
def test_a_call_s_arguments_are_taken_up_to_their_bound(server: Server, path: str, kind: str) -> None:
    def status(num_chars: int) -> tuple[int, str]:
        given = "a" * num_chars if kind == "text" else {"a": "b" * (num_chars - 9)}
        answer = server.post(path, json={"model": BASE, "messages": [USER, _called(given), USER]})
        return answer.status_code, answer.text

    code, told = status(MAX_DATA_CHARS + 1)
    assert code == 400 and "`arguments` of a call may have up to 1048576 characters" in told
    code, told = status(MAX_DATA_CHARS)
    assert "`arguments`" not in told, "it may be too long for the context, and that is what it is told"


def test_variables_of_a_template_are_taken_up_to_their_bound(server: Server) -> None:
    def ask(num_chars: int) -> Any:
        body = {"model": BASE, "messages": [USER], "chat_template_kwargs": {"a": "b" * (num_chars - 9)}}
        return server.post("/v1/chat/completions", json={**body, "max_tokens": 1})

    assert ask(MAX_DATA_CHARS).status_code == 200
    refused = ask(MAX_DATA_CHARS + 1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"
    assert "up to 1048576 characters" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", [3, None, [], "x" * 200], ids=["number", "null", "list", "long text"])
def test_a_format_of_no_known_type_is_told_which_there_are(server: Server, kind: Any) -> None:
    body = {"model": BASE, "messages": [USER], "response_format": {"type": kind}}
    error = server.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "response_format"
    assert error["message"].startswith('`response_format` must be {"type": "text"}')


def test_a_tag_of_text_may_be_as_long_as_it_was_sent() -> None:
    numbers = list(range(1_000_000, 1_032_000))
    tag = {"structures": [{"begin": "<a>", "schema": {"enum": numbers}, "end": "</a>"}], "triggers": ["<a"]}
    text = json.dumps(tag, separators=(",", ":"))
    assert len(text) < MAX_CONSTRAINT_BYTES < len(json.dumps(tag))
    assert tag_constraint(text).text == text


def test_an_integer_that_python_does_not_read_is_told_by_its_digits() -> None:
    with pytest.raises(ConstraintError, match=r"^holds an integer of more than \d+ digits$"):
        schema_constraint(f'{{"minimum": {"7" * 5000}}}')
