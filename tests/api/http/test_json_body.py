"""JSON bodies: refused before they cost much, parsed where nobody waits, and together within a budget."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from service.api.access.auth import Access
from service.api.entry.error_handlers import add_error_handlers
from service.api.entry.middleware import BodyRule, EntryMiddleware
from service.api.errors import ApiError, BodyTooLarge, QueueFull
from service.api.http import json_body
from service.api.http.json_body import (
    LARGE_BODY_BYTES,
    MAX_CONTAINERS,
    MAX_STRINGS,
    MAX_VALUES,
    BodyBudget,
    JsonRoute,
    check_counts,
    check_inner_counts,
)
from service.api.metrics.metrics import Metrics
from service.api.schema.requests import DetokenizeRequest
from service.tenants.tenants import Tenants
from tests.api.conftest import Checkpoints
from tests.support.http.scripted_server import scripted_server
from tests.support.http.server import Server, wait_for
from tests.support.limits import LIMIT_SECONDS

MIB = 1 << 20
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def num_of(value: Any) -> tuple[int, int, int]:
    """(lists and objects, texts, commas) of a JSON value."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = list(value) if isinstance(value, list) else [part for pair in value.items() for part in pair]
    counts = [num_of(one) for one in inner]
    sums = [sum(column) for column in zip(*counts, strict=True)] if counts else [0, 0, 0]
    return sums[0] + 1, sums[1], sums[2] + max(0, len(value) - 1)


NASTY = st.text(alphabet='[]{},"\\\\ab\n\u2200')
VALUES = st.recursive(
    st.none() | st.integers() | NASTY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NASTY, inner, max_size=4),
    max_leaves=20,
)


class TestCounts:
    @given(value=VALUES)
    def test_they_are_those_of_the_parsed_value(self, value: Any) -> None:
        """Each limit exactly met is taken, and one less is not."""
        body = json.dumps(value, ensure_ascii=False).encode()
        names = ("MAX_CONTAINERS", "MAX_STRINGS", "MAX_VALUES")
        counts = num_of(value)
        with pytest.MonkeyPatch.context() as patch:
            for name, count in zip(names, counts, strict=True):
                patch.setattr(json_body, name, count)
            check_counts(body)
            for name, count in zip(names, counts, strict=True):
                if count:
                    patch.setattr(json_body, name, count - 1)
                    with pytest.raises(BodyTooLarge, match=f"more than {count - 1} "):
                        check_counts(body)
                    patch.setattr(json_body, name, count)

    @given(body=st.binary(max_size=200) | st.text(alphabet='[]{},"\\\\', max_size=60).map(str.encode))
    def test_what_is_no_json_ends_the_counting_too(self, body: bytes) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_body, "MAX_CONTAINERS", 3)
            try:
                check_counts(body)
            except BodyTooLarge:
                return

    @pytest.mark.parametrize(
        ("item", "what"),
        [(b"[]", "lists"), (b"{}", "lists"), (b"[[[[]]]]", "lists"), (b'""', "texts"), (b"1", "values")],
    )
    def test_a_body_of_the_largest_size_is_not_parsed_if_it_holds_too_much(self, item: bytes, what: str) -> None:
        body = b"[" + (item + b",") * ((4 * MIB) // (len(item) + 1) - 1) + item + b"]"
        tracemalloc.start()
        with pytest.raises(BodyTooLarge, match=what):
            check_counts(body)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 4 * len(body)

    def test_as_much_as_the_interface_offers_is_taken(self) -> None:
        check_counts(json.dumps({"tokens": [1] * (1 << 20)}).encode())
        check_counts(json.dumps({"prompt": '[{,\\"' * MIB}).encode())
        check_counts(json.dumps({"input": [[index, index] for index in range(2048)]}).encode())
        item = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}] * 15, "stop": ["a"] * 32}
        check_counts(json.dumps({"items": [item] * 256}).encode())
        assert MAX_STRINGS >= 4 * MAX_CONTAINERS
        assert MAX_VALUES > 1 << 20

    def test_long_histories_are_taken(self) -> None:
        """1,500 turns of a question with its parts, a call of a tool, what came of it and an answer."""
        arguments = '{"a": [1, {"b": 2}]}'
        called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turn: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "text", "text": "and this?"}]},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "a", "content": "{}"},
            {"role": "assistant", "content": "this"},
        ]
        check_counts(json.dumps({"messages": turn * 1500}).encode())
        check_inner_counts([arguments] * 1500)


@given(value=VALUES | st.floats(allow_nan=False, allow_infinity=False))
@example(value=[10**600, -(2**63), 2**64, -0.0, 1e-320, "\ud800", "\ud83d", {"a\udc00": []}])
@example(value=[{"a": 1}, "\U0001f600\x7f\x00"])
def test_values_are_those_of_python_s_parser(value: Any) -> None:
    for text in (
        json.dumps(value),
        json.dumps(value, indent=1),
        f'[{json.dumps(value)}, 1e400, NaN, {{"a": 1, "a": 2}}]',
    ):
        assert repr(json_body.parsed(text.encode())) == repr(json.loads(text))


def an_app(budget: BodyBudget, **limits: Any) -> FastAPI:
    """Detokenises nothing, with the layers that bodies go through; `threads` are those in which bodies were parsed."""
    app = FastAPI()
    app.router.route_class = JsonRoute
    app.state.held = []

    @app.post("/")
    async def endpoint(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
        app.state.held.append((budget.num_bytes, await request.body()))
        return {"count": len(body.tokens)}

    add_error_handlers(app)
    rule = BodyRule(**{"limit_bytes": 4 * MIB, **limits})
    access = Access(Tenants(), ())
    app.add_middleware(EntryMiddleware, access=access, metrics=Metrics("x"), body_rule=lambda *_: rule, budget=budget)
    return app


def post(app: FastAPI, *contents: bytes) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await asyncio.gather(*(client.post("/", content=content, headers=JSON) for content in contents))

    return asyncio.run(run())


@pytest.mark.parametrize("num_tokens", [1, 100_000])
def test_large_bodies_are_parsed_beside_the_loop(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    threads, parse = [], json_body.parsed

    def noted(body: bytes) -> Any:
        threads.append(threading.current_thread())
        return parse(body)

    monkeypatch.setattr(json_body, "parsed", noted)
    budget = BodyBudget(MIB)
    app = an_app(budget)
    (answer,) = post(app, json.dumps({"tokens": [1] * num_tokens}).encode())
    assert answer.json() == {"count": num_tokens}
    assert (threads[0] is threading.main_thread()) == (num_tokens == 1)
    assert app.state.held == [(0, b"")], "a parsed body is still held"
    assert budget.num_bytes == 0


@pytest.mark.parametrize("wrong", [b'{"tokens": [', b"{}", json.dumps(dict.fromkeys(map(str, range(300)))).encode()])
@pytest.mark.parametrize("padding", [0, LARGE_BODY_BYTES], ids=["small", "large"])
def test_a_body_that_is_wrong_is_forgotten_at_once(wrong: bytes, padding: int) -> None:
    """The errors that tell of it hold it: they are in no circle, which Python's collector would leave for minutes, or,
    where it cannot look into pydantic's, for good."""
    kinds = (ValidationError, RequestValidationError, HTTPException, json.JSONDecodeError, ApiError)

    def num_errors() -> int:
        return sum(issubclass(type(one), kinds) for one in gc.get_objects())

    app = an_app(BodyBudget(MIB))
    gc.collect()
    gc.disable()
    try:
        num_before = num_errors()
        assert [answer.status_code for answer in post(app, b" " * padding + wrong)] == [400]
        json_body.LARGE_BODIES.submit("", int).result(LIMIT_SECONDS)  # its thread has let go of what it did before
        assert num_errors() <= num_before
    finally:
        gc.enable()


def test_bodies_share_one_budget_and_are_told_when_to_come_back() -> None:
    budget = BodyBudget(1000)
    app = an_app(budget)
    body = json.dumps({"tokens": [1] * 200}).encode()
    assert 550 < len(body) <= 1000
    assert [answer.status_code for answer in post(app, body)] == [200]
    budget.acquire("", 900)
    (refused,) = post(app, body)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "queue_full"
    assert budget.num_bytes == 900
    budget.release("", 900)
    assert [answer.status_code for answer in post(app, body)] == [200]


def test_no_payer_holds_what_others_need() -> None:
    """Bodies may be sent as slowly as a kilobyte a second: whoever holds many holds them for long."""
    budget = BodyBudget(600, 10)
    budget.acquire("one", 600)
    with pytest.raises(QueueFull, match="of which you have 600; a client gets as much as it leaves free"):
        budget.acquire("one", 1)
    budget.acquire("two", 300)
    with pytest.raises(QueueFull):
        budget.acquire("two", 1)
    budget.acquire("three", 150)
    for index in range(200):
        budget.acquire(f"small {index}", 10)
    with pytest.raises(QueueFull):
        budget.acquire("small 199", 1)


def test_bodies_that_go_to_disk_are_not_in_the_budget() -> None:
    app = an_app(BodyBudget(10), is_buffered=False)
    assert post(app, json.dumps({"tokens": [1] * 200}).encode())[0].status_code == 200


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_large_body_that_is_wrong_is_told_as_a_small_one(server: Server, size: int) -> None:
    unknown = server.post("/v1/completions", json={"model": "tiny", "prompt": "a" * size, "odd": 1})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "odd")
    broken = server.post("/v1/completions", content=b'{"prompt": "' + b"a" * size, headers=JSON)
    assert broken.status_code == 400
    assert "not valid JSON" in broken.json()["error"]["message"]
    lists = server.post("/v1/completions", content=b"[" + b"[]," * size + b"[]]", headers=JSON)
    assert lists.status_code == (400 if size == 1 else 413)


@pytest.mark.parametrize("padding", [0, 100_000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": ', "Expecting value"),
        (b'{"prompt": "\xff"}', "it is not in UTF-8"),
        (b'{"max_tokens": 1' + b"0" * 640 + b"}", "a number has more than 640 digits"),
        (b'{"prompt": ' + b"[" * 15_000 + b"]" * 15_000 + b"}", "its lists and objects are nested too deeply"),
    ],
    ids=["cut off", "not UTF-8", "long number", "deep"],
)
def test_what_is_no_json_is_told_why(server: Server, body: bytes, words: str, padding: int) -> None:
    answer = server.post("/v1/completions", content=b" " * padding + body, headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["message"], error["param"]) == (f"The body is not valid JSON: {words}.", None)


def test_a_third_payer_s_body_gets_in_while_two_others_hold_all_that_they_may(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Bodies that never end, of two addresses, and whole ones."""
    settings = {"max_buffered_bytes": 4 * MIB, "max_body_bytes": 2 * MIB, "stall_limit_seconds": 2 * LIMIT_SECONDS}
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(scripted_server(checkpoints.base, tmp_path, **settings))
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))

        def hold(source: str, num_bytes: int) -> None:
            one = opened.enter_context(socket.create_connection(address, source_address=(source, 0)))
            one.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (2 * MIB) + b" " * num_bytes)

        def send(source: str, num_bytes: int) -> int:
            with httpx.Client(transport=httpx.HTTPTransport(local_address=source), timeout=LIMIT_SECONDS) as client:
                content = b" " * num_bytes + b'{"prompt": "a"}'
                return client.post(f"{server.url}/tokenize", content=content, headers=JSON).status_code

        for source, num_bytes in (("127.0.0.2", 2 * MIB - 1), ("127.0.0.3", MIB)):
            assert send(source, MIB // 4) == 200
            hold(source, num_bytes)
            wait_for(lambda source=source: send(source, MIB // 4) == 429, "the body to be held")
        assert send("127.0.0.4", MIB // 4) == 200
