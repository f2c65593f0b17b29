"""A streamed answer on its way to the client: past the layers or through them, the bytes are the same."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernels.sampling.parameters import ScoredToken
from service.api.errors import EngineFailed
from service.api.generation import stream
from service.api.generation.job import GenerationJob
from service.api.generation.sequence import OutputChunk
from service.api.generation.stream import EventStream
from service.api.http.sse import TextEvent, encode_event
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.scripted_server import scripted_server
from tests.support.limits import LIMIT_SECONDS

TEXT = "the thing in the tin"


class Said:
    """A job: what a test says, and whether it was closed."""

    def __init__(self) -> None:
        self.waiting: deque[OutputChunk | Exception] = deque()
        self.listener: Callable[[], object] = lambda: None
        self.is_finished, self.num_closed = False, 0

    @property
    def has_news(self) -> bool:
        return bool(self.waiting)

    def listen(self, listener: Callable[[], object]) -> None:
        self.listener = listener
        listener()

    def say(self, what: OutputChunk | Exception) -> None:
        self.waiting.append(what)
        self.listener()

    def poll(self) -> tuple[int, OutputChunk] | None:
        if not self.waiting:
            return None
        what = self.waiting.popleft()
        if isinstance(what, Exception):
            raise what
        self.is_finished = what.finish_reason is not None
        return 0, what

    def close(self) -> None:
        self.num_closed += 1


class Chunks:
    def first(self) -> Iterator[str]:
        yield "first"

    def added(self, _index: int, piece: OutputChunk) -> Iterator[str]:
        yield from piece.text.split()

    def last(self) -> Iterator[str]:
        yield "last"


class Client:
    """Both ways to it. It has read everything while `reads` is set."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.num_at_once = self.num_sent = 0
        self.reads, self.goes = asyncio.Event(), asyncio.Event()

    @property
    def can_write_pieces(self) -> bool:
        return self.reads.is_set()

    def write_pieces(self, pieces: Iterable[bytes]) -> None:
        assert self.can_write_pieces
        self._get(pieces)
        self.num_at_once += 1

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
            self._get([message["body"]])
            self.num_sent += 1

    async def receive(self) -> Any:
        await self.goes.wait()
        return {"type": "http.disconnect"}

    def _get(self, pieces: Iterable[bytes]) -> None:
        self.got += [piece.decode().removeprefix("data: ").strip('"\n') for piece in pieces]


async def settle() -> None:
    """Everybody has done what can be done without news."""
    for _ in range(20):
        await asyncio.sleep(0)


def answered(reads: Iterable[bool], last: OutputChunk | Exception) -> tuple[Client, Said, list[Exception]]:
    """What comes of two words for each of `reads`, during which the client reads or not, and of `last`."""
    failed: list[Exception] = []

    async def run() -> tuple[Client, Said]:
        client, job = Client(), Said()
        scope = {"multilora.connection": client, "multilora.notes": SimpleNamespace(failed=failed.append)}
        client.reads.set()
        answer = EventStream(cast(GenerationJob, job), Chunks())
        answering = asyncio.create_task(answer(scope, client.receive, cast(Any, client.send)))
        await settle()
        for number, does_read in enumerate(reads):
            (client.reads.set if does_read else client.reads.clear)()
            job.say(OutputChunk(f"{number}a {number}b"))
            await settle()
        job.say(last)
        client.reads.set()
        await asyncio.wait_for(answering, LIMIT_SECONDS)
        return client, job

    return *asyncio.run(run()), failed


def test_a_client_that_waits_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there is news, which comes behind the pings, in its order."""
    monkeypatch.setattr(stream, "PING_SECONDS", 0.001)

    async def run() -> list[str]:
        client, job = Client(), Said()
        client.reads.set()
        scope = {"multilora.connection": client, "multilora.notes": SimpleNamespace()}
        pinged = EventStream(cast(GenerationJob, job), Chunks(), ping=b"ping")
        answering = asyncio.create_task(pinged(scope, client.receive, cast(Any, client.send)))
        async with asyncio.timeout(LIMIT_SECONDS):
            for number, word in enumerate(("one", "two")):
                while client.got.count("ping") < 2 * (number + 1):
                    await asyncio.sleep(0)
                job.say(OutputChunk(word))
            job.say(OutputChunk("end", finish_reason="stop"))
            await answering
        return client.got

    got = asyncio.run(run())
    assert got[:3] == ["first", "ping", "ping"]
    assert [one for one in got if one != "ping"] == ["first", "one", "two", "end", "last", "[DONE]", ""]


@pytest.mark.parametrize("bits", range(16))
def test_events_come_in_order_however_the_client_reads(bits: int) -> None:
    reads = [bool(bits >> place & 1) for place in range(4)]
    client, job, failed = answered(reads, OutputChunk("end", finish_reason="stop"))
    assert client.got == ["first", *(f"{n}{half}" for n in range(4) for half in "ab"), "end", "last", "[DONE]", ""]
    assert (job.num_closed, failed) == (1, [])
    assert client.num_at_once >= all(reads) * 4


@pytest.mark.parametrize("last", [OutputChunk("end", finish_reason="stop"), EngineFailed("It is gone.")])
def test_what_ends_a_stream_is_one_write(last: OutputChunk | Exception) -> None:
    client, _, _ = answered([True], last)
    assert client.got[-2:] == ["[DONE]", ""] and client.num_sent == len(["first", ""])


@pytest.mark.parametrize("does_read", [True, False])
def test_a_failure_is_an_event_behind_what_came_before_it(does_read: bool) -> None:
    client, job, failed = answered([True, does_read], EngineFailed("It is gone."))
    assert client.got[:5] == ["first", "0a", "0b", "1a", "1b"]
    assert "It is gone." in client.got[5] and client.got[6:] == ["[DONE]", ""]
    assert (job.num_closed, [str(one) for one in failed]) == (1, ["It is gone."])


def test_what_is_long_is_left_to_the_task_and_comes_in_its_place() -> None:
    long = OutputChunk("long", logprobs=[ScoredToken(1, 0.0, tuple((n, 0.0) for n in range(10_000)))])

    async def run() -> list[str]:
        client, job = Client(), Said()
        client.reads.set()
        scope = {"multilora.connection": client}
        answer = EventStream(cast(GenerationJob, job), Chunks())
        answering = asyncio.create_task(answer(scope, client.receive, cast(Any, client.send)))
        await settle()
        for piece in (OutputChunk("before"), long, OutputChunk("behind"), OutputChunk("end", finish_reason="length")):
            job.say(piece)
        await asyncio.wait_for(answering, LIMIT_SECONDS)
        return client.got

    assert asyncio.run(run()) == ["first", "before", "long", "behind", "end", "last", "[DONE]", ""]


@pytest.mark.parametrize("does_read", [True, False])
def test_a_client_that_goes_ends_it(does_read: bool) -> None:
    async def run() -> tuple[list[str], int]:
        client, job = Client(), Said()
        client.reads.set()
        scope = {"multilora.connection": client}
        answer = EventStream(cast(GenerationJob, job), Chunks())
        answering = asyncio.create_task(answer(scope, client.receive, cast(Any, client.send)))
        await settle()
        if not does_read:
            client.reads.clear()
        job.say(OutputChunk("word"))
        client.goes.set()
        await settle()
        client.reads.set()  # the connection is lost, and whoever waited for it goes on
        await asyncio.wait_for(answering, LIMIT_SECONDS)
        return client.got, job.num_closed

    assert asyncio.run(run()) == (["first", "word"], 1)


@pytest.mark.parametrize("text", ["", "word", 'a "quoted"\\word', "\n\t\x00</script>", "Grüße, 世界 🙂"])
def test_what_stands_around_a_text_is_encoded_as_with_it(text: str) -> None:
    def make(text: str) -> dict[str, Any]:
        return {"id": "data: {}", "choices": [{"index": 1, "delta": {"content": text}, "logprobs": None}]}

    assert TextEvent(make)(text) == encode_event(make(text))


class TestOnTheWire:
    @pytest.fixture(scope="class")
    def answers(self, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
        """What the server writes to a client of each version of HTTP."""
        with scripted_server(checkpoints.base, tmp_path_factory.mktemp("wire"), model_name=BASE) as server:
            server.says(TEXT)
            port = server.client.base_url.port
            return {version: _posted(port, version) for version in ("1.0", "1.1")}

    def test_each_event_is_a_chunk(self, answers: dict[str, bytes]) -> None:
        rest, chunks = answers["1.1"].partition(b"\r\n\r\n")[2], []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            chunks.append(rest[: int(size, 16)])
            assert rest[int(size, 16) :].startswith(b"\r\n")
            rest = rest[int(size, 16) + 2 :]
        assert chunks.pop() == b""
        assert all(re.fullmatch(rb"data: [^\n]+\n\n", chunk) for chunk in chunks)
        assert chunks[-1] == b"data: [DONE]\n\n" and len(chunks) > 4
        assert _text(b"".join(chunks)) == TEXT

    def test_a_client_of_http_1_0_has_no_chunks(self, answers: dict[str, bytes]) -> None:
        body = answers["1.0"].partition(b"\r\n\r\n")[2]
        assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")
        assert _text(body) == TEXT


def _posted(port: int | None, version: str) -> bytes:
    body = b'{"model": "%s", "prompt": "a", "max_tokens": 100, "stream": true}' % BASE.encode()
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "Host: a",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    head = "\r\n".join([*lines, "", ""])
    with socket.create_connection(("127.0.0.1", port or 0), LIMIT_SECONDS) as connection:
        connection.sendall(head.encode() + body)
        with connection.makefile("rb") as answer:
            return answer.read()


def _text(events: bytes) -> str:
    return "".join(re.findall(r'"text":"([^"]*)"', events.decode()))
