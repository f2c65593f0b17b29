"""The whole application in this process, over the bundled model. Its engine answers at once and knows no model."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from adapters.row_plan import plan_rows
from service.app import create_app
from service.engine.messages import Finished, Ready, Submit, Tier, TokenLogprob, Tokens
from service.settings import Settings

LIMIT_SECONDS = 120.0
_MAX_ANSWER_TOKENS = 24


class _Messages:
    """What the engine says of one sequence: some tokens of its vocabulary, at once."""

    def __init__(self, request: Submit, vocab_size: int) -> None:
        sampling, name = request.sampling, request.request_id
        count = min(sampling.max_tokens, _MAX_ANSWER_TOKENS)
        first = sum(request.prompt_token_ids) + len(request.prompt_token_ids)
        token_ids = tuple((first + 7 * index) % vocab_size for index in range(count))
        self._messages: deque[Tokens | Finished] = deque()
        prompt = None
        if sampling.prompt_logprobs is not None:
            prompt = (None, *(_logprob(token, sampling.prompt_logprobs) for token in request.prompt_token_ids[1:]))
        for at, token in enumerate(token_ids):
            logprobs = () if sampling.logprobs is None else (_logprob(token, sampling.logprobs),)
            self._messages.append(Tokens(name, (token,), logprobs, prompt if at == 0 else None))
        if not token_ids and prompt is not None:
            self._messages.append(Tokens(name, (), (), prompt))
        self._messages.append(Finished(name, "length"))

    def listen(self, listener: Callable[[], None], _begin_anew: Callable[[], bool]) -> None:
        asyncio.get_running_loop().call_soon(listener)

    def poll(self) -> Tokens | Finished | None:
        return self._messages.popleft() if self._messages else None


def _logprob(token: int, num_top: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, tuple((other, -1.0 - other) for other in range(num_top)))


class ReadyEngine:
    """In the place of the engine's client."""

    state, state_error, stats, num_restarts = "ready", None, None, 0

    def __init__(self, vocab_size: int) -> None:
        self.tiers: dict[str, Tier] = {}
        self.ready = Ready(512, 4096, vocab_size, 64, "float32", "cpu", 0, 64 << 20, 4, 16)

    def submit(self, request: Submit) -> _Messages:
        return _Messages(request, self.ready.vocab_size)

    def abort(self, request_id: str) -> None:
        """Nothing runs."""

    load = evict = keep = abort

    def replicas(self) -> dict[str, Any]:
        return {}

    def places_of(self, _digest: str) -> dict[str, Tier]:
        return {}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Application:
    """Call it as a client would; after each call nothing may be held."""

    def __init__(self, root: Path, **more: Any) -> None:
        """more  settings"""
        settings = Settings(
            store_dir=root / "store",
            max_upload_bytes=4 << 20,  # type: ignore[arg-type]
            min_free_disk_bytes=0,  # type: ignore[arg-type]
            **more,
        )
        engine: Any = ReadyEngine(vocab_size=256)
        self.app = create_app(settings, engine)
        self.services = self.app.state.services
        ready = engine.ready = msgspec.structs.replace(engine.ready, vocab_size=self.services.tokenizer.vocab_size)
        self.services.store.row_plan = plan_rows(
            self.services.layout, ready.row_bytes, element_bytes=4, alignment=16, max_rank=None
        )
        self.services.prepared = True
        self.loop = asyncio.new_event_loop()

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
        assert (services.gate.num_open, services.calls.num_open) == (0, 0)
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
        start = sent[0]
        return Answer(
            start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in sent[1:])
        )
