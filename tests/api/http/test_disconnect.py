"""Work and answers for a client that may go: `service.api.http.sse`."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect

from service.api.http.sse import json_answer, until_disconnect


class Client:
    """A request, of whose client nothing comes but its going."""

    def __init__(self) -> None:
        self.goes = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.goes.wait()
        return {"type": "http.disconnect"}

    @property
    def request(self) -> Request:
        return cast(Request, self)


class Work:
    """It waits until it is let go on; `ended` says how it went."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.ended = asyncio.Event(), asyncio.Event(), ""

    async def __call__(self) -> str:
        self.begun.set()
        try:
            await self.go_on.wait()
            self.ended = "done"
        finally:
            self.ended = self.ended or "cancelled"
        return "answer"


def test_work_that_need_not_wait_takes_no_turn_of_the_loop() -> None:
    async def at_once() -> str:
        return "answer"

    async def run() -> None:
        turns: list[str] = []
        asyncio.get_running_loop().call_soon(turns.append, "a turn")
        assert await until_disconnect(Client().request, at_once()) == "answer"
        assert not turns

    asyncio.run(run())


def test_work_that_waits_is_done_while_the_client_stays() -> None:
    async def run() -> None:
        work = Work()
        answering = asyncio.create_task(until_disconnect(Client().request, work()))
        await work.begun.wait()
        work.go_on.set()
        assert (await answering, work.ended) == ("answer", "done")
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody watches any more"

    asyncio.run(run())


def test_the_work_of_a_client_that_goes_is_cancelled_and_nothing_else() -> None:
    async def run() -> None:
        client, work = Client(), Work()

        async def answer() -> str:
            with pytest.raises(ClientDisconnect):
                await until_disconnect(client.request, work())
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()
            await asyncio.sleep(0)  # what comes after it may wait
            return "gone"

        answering = asyncio.create_task(answer())
        await work.begun.wait()
        client.goes.set()
        assert (await answering, work.ended) == ("gone", "cancelled")

    asyncio.run(run())


@pytest.mark.parametrize("client_goes", [False, True])
def test_whoever_else_cancels_it_is_obeyed(client_goes: bool) -> None:
    async def run() -> None:
        client, work = Client(), Work()
        answering = asyncio.create_task(until_disconnect(client.request, work()))
        await work.begun.wait()
        if client_goes:
            client.goes.set()
            await asyncio.sleep(0)  # its going is being told
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        assert work.ended == "cancelled"

    asyncio.run(run())


@pytest.mark.parametrize("stays", [True, False])
def test_what_an_answer_holds_is_released_when_it_has_been_sent_or_its_client_is_gone(stays: bool) -> None:
    released, body = [], bytearray()
    answer = json_answer({"tokens": list(range(99))}, lambda: released.append(True))

    async def send(message: Any) -> None:
        assert not released
        if not stays:
            raise OSError("gone")
        body.extend(message.get("body", b""))

    sending = answer({"type": "http", "asgi": {"spec_version": "2.4"}}, Client().receive, send)
    if stays:
        asyncio.run(sending)
        assert json.loads(body) == {"tokens": list(range(99))}
    else:
        with pytest.raises(OSError, match="gone"):
            asyncio.run(sending)
    assert released == [True]


def test_what_an_answer_that_cannot_be_written_holds_is_released() -> None:
    released = []
    with pytest.raises(TypeError):
        json_answer({"tokens": object()}, lambda: released.append(True))
    assert released == [True]


def test_what_a_long_answer_holds_is_held_until_it_is_read() -> None:
    """The server waits for unsent output before a message, and for nothing behind the last one."""
    released, was_read, body = [], [False], bytearray()
    answer = json_answer({"tokens": [1] * 100_000}, lambda: released.append(True))

    async def send(message: Any) -> None:
        was_read[0] = bool(body)  # all that was sent before
        body.extend(message.get("body", b""))

    asyncio.run(answer({"type": "http", "asgi": {"spec_version": "2.4"}}, Client().receive, send))
    assert was_read == [True]
    assert json.loads(body) == {"tokens": [1] * 100_000}
    assert released == [True]
