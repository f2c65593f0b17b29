"""The whole application in this process, over the bundled model. Its engine answers at once and knows no model."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from adapters.row_plan import plan_rows
from kernels.sampling.parameters import ScoredToken
from service.cluster.engines import Engines
from service.engine.ipc.link import EngineLink
from service.engine.ipc.messages import Finished, Ready, Submit, Tier, Tokens
from service.engine.ipc.wire import Outbox, read_to_engine
from service.server.app import create_app
from service.settings import Settings
from tests.support.on_ray.through_ray import is_on_ray

if TYPE_CHECKING:
    from tests.hostile.on_ray import ApplicationOnRay

LIMIT_SECONDS = 120.0
_MAX_ANSWER_TOKENS = 24


def _logprob(token: int, num_top: int, asked: tuple[int, ...] = ()) -> ScoredToken:
    return ScoredToken(token, -1.0, tuple((other, -1.0 - other) for other in (*range(num_top), *asked)))


class ReadyEngine(EngineLink):
    """Says some tokens of its vocabulary, at once. What is said to it comes in frames, as to any engine."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._hearing = set[asyncio.Task[None]]()
        self.state = "ready"
        self.ready = Ready(512, 4096, vocab_size, 64, "float32", "cpu", 0, 64 << 20, 4, 16)

    async def start(self) -> None:
        """It is there, and can be spoken to from now on."""
        self._outbox = Outbox(cast("asyncio.StreamWriter", self))

    async def drain(self, limit_seconds: float) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Likewise."""

    def kill(self) -> None:
        """Nobody does."""

    def replicas(self) -> dict[str, Any]:
        return {}

    def places_of(self, _digest: str) -> dict[str, Tier]:
        return {}

    def is_closing(self) -> bool:
        """As a connection that stays."""
        return False

    def write(self, data: bytes) -> None:
        """As a connection whose other end has these bytes at once."""
        hearing = asyncio.get_running_loop().create_task(self._hear(data))
        self._hearing.add(hearing)
        hearing.add_done_callback(self._hearing.discard)

    async def _hear(self, data: bytes) -> None:
        assert self.ready is not None
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        messages = await read_to_engine(reader)
        assert messages is not None, "no frame of ours"
        for request in messages:
            if isinstance(request, Submit):
                for one in _messages(request, self.ready.vocab_size):
                    asyncio.get_running_loop().call_soon(self._take, one)


def _messages(request: Submit, vocab_size: int) -> Iterator[Tokens | Finished]:
    """What the engine says of one sequence."""
    sampling, name = request.sampling, request.request_id
    count = min(sampling.max_tokens, _MAX_ANSWER_TOKENS)
    first = sum(request.prompt_token_ids) + len(request.prompt_token_ids)
    prompt = None
    if sampling.prompt_logprobs is not None:
        prompt = (None, *(_logprob(token, sampling.prompt_logprobs) for token in request.prompt_token_ids[1:]))
    for at in range(count):
        token = (first + 7 * at) % vocab_size
        logprobs = (
            () if sampling.logprobs is None else (_logprob(token, sampling.logprobs, sampling.logprob_token_ids),)
        )
        yield Tokens(name, (token,), logprobs, prompt if at == 0 else None)
    if not count and prompt is not None:
        yield Tokens(name, (), (), prompt)
    yield Finished(name, "length")


def _engine(vocab_size: int) -> ReadyEngine | Engines:
    """Several behind one server where TEST_REPLICAS says so, as in `tests.support.http.server_process`."""
    engines = [ReadyEngine(vocab_size) for _ in range(int(os.environ.get("TEST_REPLICAS", "1")))]
    return Engines(engines) if len(engines) > 1 else engines[0]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Application:
    """Make it by `application`. Call it as a client would; after each call nothing may be held."""

    def __init__(self, root: Path, **more: Any) -> None:
        """more  settings"""
        settings = Settings(
            store_dir=root / "store",
            max_upload_bytes=4 << 20,  # type: ignore[arg-type]
            min_free_disk_bytes=0,  # type: ignore[arg-type]
            responses_store_bytes=1 << 20,  # type: ignore[arg-type]
            classifier_from_token=("a", "b"),
            **more,
        )
        self.loop = asyncio.new_event_loop()
        engine = _engine(vocab_size=256)
        self.app = create_app(settings, engine)
        self.services = self.app.state.services
        for one in engine.clients if isinstance(engine, Engines) else (engine,):
            assert one.ready is not None
            one.ready = msgspec.structs.replace(one.ready, vocab_size=self.services.tokenizer.vocab_size)
            self.loop.run_until_complete(one.start())
        ready = engine.ready
        assert ready is not None
        self.services.store.row_plan = plan_rows(
            self.services.layout, ready.row_bytes, element_bytes=4, alignment=16, max_rank=None
        )
        self.services.prepared = True

    def close(self) -> None:
        self.loop.close()
        self.services.store.check_integrity()
        self.services.store.close()
        self.services.template_workers.close()
        self.services.grammar_trial.close()

    def call(self, method: str, path: str, body: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()) -> Answer:
        """One request. AssertionError for a 5xx, an answer that is no JSON, or places that are not given back."""
        answer = self.loop.run_until_complete(asyncio.wait_for(self._call(method, path, body, headers), LIMIT_SECONDS))
        assert answer.status < 500, answer
        kind = answer.headers.get(b"content-type", b"")
        if kind.startswith(b"application/json"):
            told = json.loads(answer.body)
            assert answer.status < 400 or told["error"]["message"], answer
            assert b"/tmp" not in answer.body
        else:
            assert answer.status < 400, answer
        services = self.services
        assert (services.queue.num_open, services.calls.num_open) == (0, 0)
        assert services.store.staging_bytes.num_bytes == 0
        return answer

    async def _call(self, method: str, path: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> Answer:
        gone, sent = asyncio.Event(), list[dict[str, Any]]()
        waiting = deque([{"type": "http.request", "body": body, "more_body": False}])
        raw_path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "path": raw_path,
            "raw_path": raw_path.encode("utf-8", "replace"),
            "query_string": query.encode("utf-8", "replace"),
            "headers": [(b"host", b"x"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "scheme": "http",
        }

        async def receive() -> dict[str, Any]:
            if waiting:
                return waiting.popleft()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        await asyncio.gather(*self.services.responses.running.values())
        start = sent[0]
        return Answer(
            start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in sent[1:])
        )


def application(root: Path, **more: Any) -> Application | ApplicationOnRay:
    """In this process, or where TEST_SERVED_BY says so."""
    if not is_on_ray():
        return Application(root, **more)
    from tests.hostile.on_ray import ApplicationOnRay

    return ApplicationOnRay(root, **more)
