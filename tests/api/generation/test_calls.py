"""What runs no sequence and takes time all the same: as many at a time as there are places, and beside the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Response

from service.api.access import auth
from service.api.adapter_routes import adapters
from service.api.errors import QueueFull
from service.api.metrics.metrics import Metrics
from service.api.page_cache import PageCache
from service.api.queue_limits import QueueLimits
from service.api.routes import health, models, tokenize
from service.api.schema.requests import DetokenizeRequest, TokenizeRequest
from service.api.state import Services
from service.fairness.client_identity import CLIENT
from service.tenants.tenants import Tenants
from tests.support.http.server import Server
from tests.support.limits import LIMIT_SECONDS

NUM_SLOTS = 8
MIB = 1 << 20


class Slow:
    """Stands for a tokenizer, a store and metrics that take their time, and notes in which threads."""

    vocab_size = 1000
    max_chars_per_token = None
    config, special_tokens = dict[str, Any](), dict[str, str]()

    def __init__(self) -> None:
        self.go = threading.Event()
        self.threads: set[threading.Thread] = set()

    def work(self, *_: Any, **__: Any) -> Any:
        self.threads.add(threading.current_thread())
        assert self.go.wait(LIMIT_SECONDS)
        return []

    encode = page = work

    def decode(self, *_: Any, **__: Any) -> str:
        return "".join(self.work())

    def render(self, _adapters: list[str]) -> bytes:
        return bytes(self.work())

    def num_names(self) -> int:
        return 0

    num_on_disk = num_changes = num_names


CALLS: dict[str, Callable[[Any], Any]] = {
    "tokenize": lambda request: tokenize.tokenize(request, TokenizeRequest(model="tiny", prompt="a" * 30_000)),
    "detokenize": lambda request: tokenize.detokenize(request, DetokenizeRequest(model="tiny", tokens=[1])),
    "models": lambda request: models.list_models(request, models.ModelFilters()),
    "adapters": lambda request: adapters.list_adapters(request, adapters.AdapterFilters()),
    "metrics": lambda request: health.metrics(request, health.MetricsQuery()),
}


def a_request(monkeypatch: pytest.MonkeyPatch, slow: Slow) -> tuple[Any, Services]:
    engine = SimpleNamespace(ready=None, state="ready", stats=None, tiers={}, num_restarts=0, replicas=dict)
    engine.places_of = lambda _digest: {}
    metrics = Metrics("tiny")
    monkeypatch.setattr(metrics, "render", slow.render)
    parts: Any = SimpleNamespace(
        settings=SimpleNamespace(base_name="tiny", model_dir="tiny"),
        engine=engine,
        tokenizer=slow,
        templates={},
        metrics=metrics,
        store=slow,
        tenants=Tenants(),
        started_at_seconds=0,
        queue=QueueLimits(NUM_SLOTS),
        calls=QueueLimits(NUM_SLOTS),
        pages=PageCache(),
    )
    for module in (adapters, auth, health, models, tokenize):
        monkeypatch.setattr(module, "services_of", lambda _request: parts)
    scope = {"multilora.caller": parts.tenants.anybody()}
    return SimpleNamespace(receive=lambda: asyncio.Event().wait(), scope=scope), cast(Services, parts)


async def sent(answer: Response) -> None:
    """The answer goes out: a long one has its places until then."""

    async def send(_message: Any) -> None:
        return

    await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, lambda: asyncio.Event().wait(), send)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_they_have_places_and_no_more_run_than_there_are(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], Any]
) -> None:
    slow = Slow()
    request, parts = a_request(monkeypatch, slow)

    async def run() -> None:
        running = [asyncio.create_task(call(request)) for _ in range(NUM_SLOTS)]
        await asyncio.sleep(0)
        assert parts.calls.num_open == NUM_SLOTS
        with pytest.raises(QueueFull) as caught:
            await call(request)
        assert caught.value.headers["Retry-After"]
        slow.go.set()
        for answer in await asyncio.gather(*running):
            await sent(answer)

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
    assert (parts.calls.num_open, parts.queue.num_open) == (0, 0)
    assert slow.threads
    assert threading.main_thread() not in slow.threads


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_payer_that_has_all_places_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], Any]
) -> None:
    slow = Slow()
    request, parts = a_request(monkeypatch, slow)

    async def run() -> None:
        CLIENT.set("flood")
        running = [asyncio.create_task(call(request)) for _ in range(NUM_SLOTS)]
        await asyncio.sleep(0)
        assert parts.calls.num_open == NUM_SLOTS
        CLIENT.set("another")
        late = asyncio.create_task(call(request))
        await asyncio.sleep(0)
        assert parts.calls.num_open == NUM_SLOTS + 1
        slow.go.set()
        for answer in await asyncio.gather(*running, late):
            await sent(answer)

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


@pytest.mark.parametrize(
    ("call", "num_slots"),
    [
        (lambda request: tokenize.tokenize(request, TokenizeRequest(model="tiny", prompt="a" * (MIB // 4))), 5),
        (lambda request: tokenize.detokenize(request, DetokenizeRequest(model="tiny", tokens=[1] * (MIB // 16))), 5),
        (lambda request: tokenize.tokenize(request, TokenizeRequest(model="tiny", prompt="a" * MIB)), NUM_SLOTS),
    ],
    ids=["text", "tokens", "more than there are"],
)
def test_long_texts_have_several(monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], Any], num_slots: int) -> None:
    slow = Slow()
    request, parts = a_request(monkeypatch, slow)

    async def run() -> None:
        running = asyncio.create_task(call(request))
        await asyncio.sleep(0)
        assert parts.calls.num_open == num_slots
        slow.go.set()
        await sent(await running)

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
    assert parts.calls.num_open == 0


def test_who_goes_away_gives_the_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    request, parts = a_request(monkeypatch, slow)

    async def run() -> None:
        running = asyncio.create_task(CALLS["tokenize"](request))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert parts.calls.num_open == 0
        slow.go.set()

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


def test_a_long_list_of_tokens_is_detokenised(server: Server) -> None:
    text = "the thing in and " * 5000
    tokens = server.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    assert "multilora_num_requests_open" in server.get("/metrics").text
