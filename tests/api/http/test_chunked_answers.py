"""Long answers come in pieces and read as if they had come whole."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.gil_lock import GIL_LOCK
from service.api.http.chunked_answers import json_answer, pieces
from service.api.threads import NUM_THREADS, in_turn
from service.fairness.client_identity import CLIENT
from tests.support.limits import LIMIT_SECONDS
from tests.support.tiers import examples

LONG = {"tokens": list(range(300_000)), "count": 300_000, "text": 'é"\\\n\x00\U0001f600' * 100_000, "none": None}
LOGPROBS = {"choices": [{"logprobs": {"top": [{str(one): -0.5 for one in range(20)} for _ in range(3000)]}}] * 3}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=9), inner, max_size=9),
    max_leaves=9,
)


@pytest.mark.parametrize("content", [LONG, LOGPROBS, [[], {}, [LONG]], "x" * 70_000, [], {}, [[[1] * 9000]]])
def test_the_pieces_are_small_and_make_the_whole(content: Any) -> None:
    made = list(pieces(content))
    assert json.loads(b"".join(made)) == content
    assert max(map(len, made)) < 1 << 19


@settings(max_examples=examples(50), deadline=None)
@given(value=VALUES, times=st.sampled_from((1, 3, 511, 512, 4097)))
def test_any_value_reads_as_it_was(value: Any, times: int) -> None:
    content = {"a": [value] * times, "b": value}
    assert json.loads(b"".join(pieces(content))) == json.loads(json.dumps(content))


@pytest.mark.parametrize(("content", "is_long"), [({"a": 1}, False), (LONG, True)])
def test_what_it_held_is_given_back_when_it_has_gone(content: Any, is_long: bool) -> None:
    closed: list[bool] = []
    answer = json_answer(content, lambda: closed.append(True))
    assert closed == [True] * (not is_long)
    body: list[bytes] = []

    async def send(message: Any) -> None:
        assert not is_long or not closed
        body.append(message.get("body", b""))

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    asyncio.run(answer(scope, lambda: asyncio.Event().wait(), send))
    assert closed == [True]
    assert json.loads(b"".join(body)) == content


def test_a_client_that_goes_gives_it_back_too() -> None:
    closed: list[bool] = []
    answer = json_answer(LONG, lambda: closed.append(True))

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("gone")

    with pytest.raises(Exception, match=r".*"):
        asyncio.run(answer({"type": "http", "asgi": {"spec_version": "2.4"}}, lambda: asyncio.Event().wait(), send))
    assert closed == [True]


def test_an_answer_s_pieces_are_made_in_its_payer_s_threads_and_in_turns_at_python_s_lock() -> None:
    """A client whose work has all the threads that it may have gets no piece; another one gets all of its own."""
    go = threading.Event()

    async def never() -> Any:
        await asyncio.Event().wait()

    async def body_of(client: str) -> bytes:
        CLIENT.set(client)
        body = bytearray()

        async def send(message: Any) -> None:
            body.extend(message.get("body", b""))

        scope: Any = {"type": "http", "asgi": {"spec_version": "2.4"}}
        await json_answer(LONG)(scope, never, send)
        return bytes(body)

    async def run() -> None:
        CLIENT.set("flood")
        flood = [asyncio.create_task(in_turn(go.wait, LIMIT_SECONDS)) for _ in range(NUM_THREADS)]
        await asyncio.sleep(0)
        late = asyncio.create_task(body_of("flood"))
        num_before = GIL_LOCK.num_pieces
        try:
            assert json.loads(await body_of("other")) == LONG
            assert GIL_LOCK.num_pieces - num_before >= len(list(pieces(LONG)))
            assert not late.done()
        finally:
            go.set()
        assert json.loads(await late) == LONG
        await asyncio.gather(*flood)

    asyncio.run(run())
