"""State that the routers share: one object on the application, built by `service.server.app`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from fastapi import Request

from adapters.files.durable_files import StoreHealth
from adapters.files.manifest import AdapterRecord
from adapters.files.paths import layout_fingerprint
from adapters.layout import BaseLayout
from adapters.quota import ClientQuota
from adapters.store.name_index import Query
from adapters.store.store import AdapterStore
from kernels.sampling.parameters import NEUTRAL
from service.api.engine_protocol import EngineProtocol
from service.api.errors import NotReady, QueueFull
from service.api.metrics.adapter_metrics import MOST_LISTED, Resident, VersionOf
from service.api.metrics.metrics import Metrics
from service.api.page_cache import PageCache
from service.api.queue_limits import QueueLimits, logprob_shares
from service.api.response_store import ResponseStore
from service.api.schema.requests import MAX_HELD_LOGPROBS
from service.api.uploads.slots import UploadSlot, UploadSlots
from service.engine.ipc.messages import Ready, Tier
from service.fairness.client_identity import CLIENT
from service.grammars.trial import GrammarTrial
from service.settings import Settings
from service.tenants.tenants import Tenants
from service.text.chat_template import ChatTemplate
from service.text.template_worker import AdapterTemplate, TemplateWorkers
from service.text.tokenizer import TextTokenizer


class OpenJob(Protocol):
    """A request whose sequences run; `request_id` is its X-Request-Id."""

    request_id: str

    def end_early(self) -> None:
        """End it with what it has, and the finish_reason "abort"."""

    def follow(self, name: str) -> None:
        """A name of the store stands for something else."""


@dataclass
class Services:
    """The parts behind the routers. `store` is None when LoRA is off; `templates` are the model's chat templates by
    name, the usual one as "default".

    tenants      who may ask
    sampling_defaults  what a request has that does not say
    draining     SIGTERM has come: nothing new is admitted
    woken        what was asked to wake up of an engine that sleeps
    prepared     the operator's adapters are in the store, so that the first request finds them
    start_error  why the server never got so far, one sentence
    stop         ends the server; set by who runs it
    base_digest  16 hex digits that change with the base
    queue        slots of sequences
    calls        slots of what runs no sequence and takes time all the same: texts, listings, metrics. Apart from the
                 others, so that a full queue can be looked at, and looking fills no queue
    logprobs     log probabilities of answers that are not sent yet
    open_jobs    requests whose sequences run, in the order in which they began
    pages        of listings, as they were written last
    last_used_seconds  when a request for an adapter of the store last began to run, by name
    pins_changed what is pinned may be something else than before
    responses    of the Responses API; None where nothing is stored
    unkept       pinned names that are not kept, see `adapters.store.catalog`
    """

    settings: Settings
    engine: EngineProtocol
    layout: BaseLayout
    tokenizer: TextTokenizer
    templates: Mapping[str, ChatTemplate]
    metrics: Metrics
    tenants: Tenants = field(default_factory=Tenants)
    sampling_defaults: Mapping[str, float] = field(default_factory=lambda: NEUTRAL)
    store: AdapterStore | None = None
    responses: ResponseStore | None = None
    store_look: StoreHealth = field(default_factory=StoreHealth)
    draining: bool = False
    woken: set[str] = field(default_factory=set)
    prepared: bool = False
    start_error: str | None = None
    started_at_seconds: int = field(default_factory=lambda: int(time.time()))
    stop: Callable[[], None] | None = None
    open_jobs: dict[OpenJob, None] = field(default_factory=dict)
    pages: PageCache = field(default_factory=PageCache)
    template_workers: TemplateWorkers = field(default_factory=TemplateWorkers)
    last_used_seconds: dict[str, int] = field(default_factory=dict)
    pins_changed: asyncio.Event = field(default_factory=asyncio.Event)
    unkept: frozenset[str] = frozenset()
    grammar_trial: GrammarTrial = field(init=False)
    queue: QueueLimits = field(init=False)
    base_digest: str = field(init=False)
    calls: QueueLimits = field(init=False)
    logprobs: ClientQuota = field(default_factory=lambda: logprob_shares(MAX_HELD_LOGPROBS))
    _template_locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _loop: asyncio.AbstractEventLoop | None = None
    _uploads: UploadSlots = field(init=False)
    _no_uploads: asyncio.Event = field(default_factory=asyncio.Event)
    # Calls of `on_loop` before there was a loop.
    _before_loop: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grammar_trial = GrammarTrial(self.settings.model_dir)
        self.queue = QueueLimits(self.settings.max_queued_requests)
        self.base_digest = layout_fingerprint(self.layout)
        self.calls = QueueLimits(self.settings.max_queued_requests)
        self._uploads = UploadSlots(self.settings.max_uploads)
        self._no_uploads.set()
        self.metrics.by_adapter.version_of = self._version_of
        self.metrics.by_adapter.residents = self._residents

    def _version_of(self, name: str) -> VersionOf | None:
        """Any thread."""
        record = None if self.store is None else self.store.find(name)
        return None if record is None else VersionOf(record.current.number, record.digest)

    def _residents(self) -> tuple[list[Resident], int]:
        """See `AdapterMetrics`. Any thread; takes a millisecond or two."""
        held = dict(self.engine.tiers)
        if self.store is None or not held:
            return [], 0
        residents: list[Resident] = []
        tiers: tuple[Tier, Tier] = ("device", "host")
        for tier in tiers:
            there = frozenset(digest for digest, where in held.items() if where == tier)
            rows = self.store.page(Query(MOST_LISTED, in_digests=there)) if there else []
            residents += [Resident(one.name, tier, one.rank, one.is_pinned) for one in rows]
        return residents, sum(where == "device" for where in held.values())

    def adapter_templates(self, digest: str, special_tokens: Mapping[str, str]) -> dict[str, AdapterTemplate]:
        """The chat templates that an adapter ships, by name. Reads files."""
        assert self.store is not None, "an adapter without a store"
        sources = self.store.chat_templates(digest)
        return {name: AdapterTemplate(self.template_workers, one, special_tokens) for name, one in sources.items()}

    def template_lock(self, whose: str) -> asyncio.Lock:
        """Held while a chat with an adapter's own template waits for it to be rendered: of each adapter of a client, or
        of each tenant where there are several, one chat at a time, so that those of one do not stand in the way of
        another's."""
        key = (CLIENT.get(), whose)
        lock = self._template_locks.get(key)
        if lock is None:
            lock = self._template_locks[key] = asyncio.Lock()
        return lock

    @contextmanager
    def uploading(self) -> Iterator[UploadSlot]:
        """An adapter is on its way into the store: a server that shuts down waits for it, see `uploads_end`. QueueFull
        if this client may have no more now."""
        with self._uploads.holding() as slot:
            self._no_uploads.clear()
            try:
                yield slot
            finally:
                if self._uploads.num_open == 1:
                    self._no_uploads.set()

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """As `uploading`, for what has no body to send: it waits until it may have a slot."""
        with ExitStack() as held:
            while True:
                try:
                    held.enter_context(self.uploading())
                    break
                except QueueFull:
                    await self._uploads.next_end()
            yield

    async def uploads_end(self, limit_seconds: float) -> None:
        """Return when no adapter is on its way any more, at the latest after the limit."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._no_uploads.wait(), limit_seconds)

    def published(self, record: AdapterRecord) -> None:
        """An adapter is in the store: it may have metrics, and the engine may bring it in ahead of its first use."""
        self.changed(record.name)
        if self.engine.state == "ready":
            self.engine.load(record.digest)

    def used(self, name: str) -> None:
        """A request for an adapter begins to run; its name may be gone already."""
        if self.store is not None and self.store.has(name):
            self.last_used_seconds[name] = int(time.time())

    def changed(self, name: str) -> None:
        """A name is gone, or something of it is new. Have the metrics know it if the store has it now: the store
        changes in threads, so of an upload and a delete of one name that cross, the news may come in the other
        order."""
        self.pins_changed.set()
        for job in list(self.open_jobs):
            job.follow(name)
        if self.store is not None and self.store.has(name):
            self.metrics.by_adapter.know(name)
        else:
            self.metrics.by_adapter.forget(name)
            self.last_used_seconds.pop(name, None)

    def fail_start(self, error: str) -> None:
        """The server can never become ready."""
        self.start_error = error
        if self.stop is not None:
            self.stop()

    def bind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop that the engine client lives in; the store may be called in threads. What `on_loop` was asked for
        before is called now: a SIGTERM may come while the server starts."""
        self._loop = loop
        while self._before_loop:
            call, arguments = self._before_loop.pop(0)
            loop.call_soon(call, *arguments)

    def gone(self, digest: str) -> None:
        """An adapter's files are removed, after the last request for it, or damaged ones replaced. Any thread."""
        self.on_loop(self.engine.evict, digest)

    def changed_elsewhere(self, name: str) -> None:
        """Another server of the store has changed a name. Any thread."""
        self.on_loop(self.changed, name)

    def on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call something in the engine client's loop, from any thread or signal handler: once there is one, and never
        when it is closed."""
        if self._loop is None:
            self._before_loop.append((call, arguments))
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def require_ready(self) -> Ready:
        """The running engine's sizes. NotReady with what is going on, if there is none."""
        if self.draining:
            raise NotReady("The server is shutting down; send the request to another one.")
        ready = self.engine.ready
        if ready is None or self.engine.state != "ready":
            raise NotReady(engine_sentence(self.engine), headers={"Retry-After": "1"})
        if not self.prepared:
            raise NotReady(
                self.start_error or "The adapters are being loaded; try again in a moment.",
                headers={"Retry-After": "1"},
            )
        return ready


def engine_sentence(engine: EngineProtocol) -> str:
    """One sentence about an engine that is not ready."""
    cause = f" {engine.state_error}" if engine.state_error else ""
    if engine.state == "asleep":
        return cause.strip()
    if engine.state == "down":
        return f"The engine is down and will not be started again.{cause}"
    if engine.state == "restarting":
        return f"The engine is being restarted; try again in a moment.{cause}"
    return f"The engine is {engine.state}; try again in a moment.{cause}"


def services_of(request: Request) -> Services:
    """The application's `Services`, for routers."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
