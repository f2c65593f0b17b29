"""One engine, wherever it runs: its last messages, and the streams of the requests that were sent to it.

Imports no torch. Everything runs in one event loop. Who owns: a link owns the streams of its requests until they end,
and their submitter may close one early, which aborts its request. A stream that is read slowly holds its own messages
(at most one per token) and delays no other; a listener is called at once. When the engine dies, every stream raises
EngineDied once its messages are read; requests are never sent again silently.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from typing import Literal
from uuid import uuid4

from service.engine.ipc.messages import (
    Abort,
    Cordon,
    Evict,
    Fatal,
    Finished,
    FromEngine,
    Load,
    Move,
    Pause,
    PauseMode,
    Pin,
    Ping,
    Ready,
    ResetPrefixCache,
    Resume,
    Sleep,
    Stats,
    Submit,
    Tier,
    ToEngine,
    Tokens,
)
from service.engine.ipc.wire import Outbox


class EngineDied(RuntimeError):
    """The engine ended, or was not there, before the request did; one sentence. The request may be sent again."""


class NeverSent(EngineDied):
    """The engine was not there when the request was to be sent to it."""


class TokenStream(AsyncIterator[Tokens | Finished]):
    """Messages of one request: Tokens, then one Finished. Raises EngineDied if the engine ends before, NeverSent if it
    has not had the request."""

    def __init__(self, request_id: str, on_close: Callable[[str], None]) -> None:
        self._request_id = request_id
        self._on_close = on_close
        self._messages: deque[Tokens | Finished] = deque()
        self._news = asyncio.Event()
        self._death: EngineDied | None = None
        self._is_over = False
        self._listener: Callable[[], None] | None = None

    def push(self, message: Tokens | Finished) -> None:
        self._messages.append(message)
        if self._listener is not None:
            self._listener()
        else:
            self._news.set()

    def die(self, error: EngineDied) -> None:
        self._death = error
        self._notify()

    def listen(self, listener: Callable[[], None], _begin_anew: Callable[[], bool] | None = None) -> None:
        """Call `listener` whenever `poll` would return a message or raise, now if it would already. It never raises.
        The stream may not be iterated any more. With one engine, no request ever begins anew."""
        self._listener = listener
        if self._messages or self._death is not None:
            listener()

    def poll(self) -> Tokens | Finished | None:
        """The next message, None while there is none or when the stream is over. Raises as the iteration does."""
        if self._is_over:
            return None
        if self._messages:
            message = self._messages.popleft()
            self._is_over = isinstance(message, Finished)
            return message
        if self._death is not None:
            self._is_over = True
            raise self._death
        return None

    async def __anext__(self) -> Tokens | Finished:
        while not self._is_over:
            message = self.poll()
            if message is not None:
                return message
            self._news.clear()
            await self._news.wait()
        raise StopAsyncIteration

    def _notify(self) -> None:
        if self._listener is not None:
            self._listener()
        else:
            self._news.set()

    async def aclose(self) -> None:
        """Abort the request unless it is over. Safe to call at any time."""
        if not self._is_over:
            self._is_over = True
            self._news.set()
            self._on_close(self._request_id)


log = logging.getLogger(__name__)

ASLEEP = "The engine sleeps; POST /wake_up wakes it."
State = Literal["starting", "ready", "restarting", "asleep", "draining", "down"]
# In which an engine may have adapters, pins and keys of prompts.
_WITH_ADAPTERS = ("ready", "asleep")


class EngineLink(abc.ABC):
    """One engine, wherever it runs: its last messages, and the streams of the requests that were sent to it.

    `state_error` is one sentence while the state is "restarting" or "down"; `ready` and `stats` are the last
    messages of the engine that runs now, else None; `cordoned` the reason for no new requests although it is ready;
    `tiers` where it holds adapters, by digest; `heard_seconds` the time of its last message, by time.monotonic().
    """

    def __init__(self) -> None:
        self.heard_seconds = time.monotonic()
        self.state: State = "starting"
        self.state_error: str | None = None
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.cordoned: str | None = None
        self.tiers: dict[str, Tier] = {}
        self.num_restarts = 0
        self._pinned: tuple[str, ...] = ()  # adapters, by each engine from its start on
        self._streams: dict[str, TokenStream] = {}
        self._stats_listeners: list[Callable[[Stats], None]] = []
        self._end_listeners: list[Callable[[str], None]] = []
        self._changed = asyncio.Event()
        self._outbox: Outbox[ToEngine] | None = None
        self._fatal: str | None = None

    # ---- life

    @abc.abstractmethod
    async def start(self) -> None:
        """Begin to keep it there; returns at once."""

    @abc.abstractmethod
    async def drain(self, limit_seconds: float) -> None:
        """Let running requests finish, up to `limit_seconds`, and let go of it. New ones are refused."""

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` and `wake` may be called: whether its process is this one's."""
        return False

    async def sleep(self, level: int) -> None:
        """Give the memory of its device back until `wake`: at level 1 by `Sleep`, at level 2, or where that cannot be,
        by the end of its process. Requests that have come since the pause before it raise NeverSent. Nothing happens to
        one that sleeps as deep. EngineDied where it ends for good."""
        raise NotImplementedError

    async def wake(self) -> None:
        """Wake one that sleeps, or start it anew, and wait until it is ready. EngineDied if it cannot start."""
        raise NotImplementedError

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of it now; every open stream raises EngineDied."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it, whatever it does; another one follows as after any death."""

    async def wait_ready(self) -> Ready:
        """Wait until the engine is ready. Raises EngineDied when it is down for good."""
        while self.state != "ready" or self.ready is None:
            if self.state in ("down", "draining"):
                raise EngineDied(self.state_error or "The engine is down.")
            self._changed.clear()
            await self._changed.wait()
        return self.ready

    # ---- requests; none of these waits

    def submit(self, request: Submit | Pause | Sleep | Resume) -> TokenStream:
        """Send a request to the engine, now. If the engine is not there, the stream raises NeverSent."""
        assert request.request_id not in self._streams, "request ids are unique"
        stream = TokenStream(request.request_id, self.abort)
        # Sleep and Resume are of an engine that takes nothing else.
        if self.state != "ready" and not (self.state == "asleep" and isinstance(request, Sleep | Resume)):
            stream.die(NeverSent(self.state_error or f"The engine is not ready ({self.state})."))
            return stream
        self._streams[request.request_id] = stream
        self._send(request)
        return stream

    def abort(self, request_id: str) -> None:
        """Forget a request; its stream ends without another message. Unknown ids are ignored."""
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    def move(self, request_id: str, adapter: str, adapter_rows: dict[str, int]) -> None:
        """Let a request go on with this adapter. Unknown ids are ignored."""
        if request_id in self._streams:
            self._send(Move(request_id, adapter, adapter_rows))

    def load(self, digest: str) -> None:
        """Hint that the adapter will be wanted. Nothing happens while the engine is not ready."""
        if self.state == "ready":
            self._send(Load(digest))

    def evict(self, digest: str) -> None:
        """Free an adapter's rows and host memory as soon as no request runs with it. A later engine never had it."""
        if self.state in _WITH_ADAPTERS:
            self._send(Evict(digest))
            if digest in self._pinned:  # an engine unpins one that it cannot read
                self._send(Pin(self._pinned))

    def pin(self, digests: Collection[str]) -> None:
        """Pin these adapters on the device, and no others; also on later engines."""
        self._pinned = tuple(digests)
        if self.state in _WITH_ADAPTERS:
            self._send(Pin(self._pinned))

    def reset_prefix_cache(self) -> None:
        """Forget what the prefix cache has. A later engine has nothing."""
        if self.state == "ready":
            self._send(ResetPrefixCache())

    async def pause(self, mode: PauseMode, limit_seconds: float) -> None:
        """Pause the engine, and wait until it is quiet. EngineDied if it ends before, or is resumed."""
        await self._answered(Pause(uuid4().hex, mode, limit_seconds))

    async def resume(self) -> None:
        """End the engine's pause. EngineDied if the engine ends before; a later engine is not paused."""
        await self._answered(Resume(uuid4().hex))

    async def _answered(self, request: Pause | Sleep | Resume) -> None:
        async for message in self.submit(request):
            if isinstance(message, Finished) and message.error is not None:
                raise EngineDied(message.error)

    @property
    def is_paused(self) -> bool:
        """Whether the running engine is paused, by its last report."""
        return self.stats is not None and self.stats.is_paused

    def ping(self) -> None:
        """Make the engine send Stats when its step is over."""
        if self.state == "ready":
            self._send(Ping())

    def on_stats(self, listener: Callable[[Stats], None]) -> None:
        """Call `listener` with every Stats, in the event loop."""
        self._stats_listeners.append(listener)

    def on_end(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with one sentence whenever the engine is gone, in the event loop."""
        self._end_listeners.append(listener)

    # ---- inner parts

    def _take_all(self, messages: Collection[FromEngine]) -> None:
        """Handle all messages of one frame."""
        self.heard_seconds = time.monotonic()
        for message in messages:
            self._take(message)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Tokens():
                stream = self._streams.get(message.request_id)
                if stream is not None:
                    stream.push(message)
            case Finished():
                stream = self._streams.pop(message.request_id, None)
                if stream is not None:
                    stream.push(message)
            case Stats():
                self._warn_of_compiling(message)
                self.stats = message
                self._move(message.moved_adapters)
                for listener in self._stats_listeners:
                    listener(message)
            case Ready():
                self.ready = message
                if self._pinned:
                    self._send(Pin(self._pinned))
                if self.state not in ("draining", "asleep"):
                    self._set_state("ready")
            case Fatal():
                self._fatal = message.error
            case Cordon():
                if message.reason is not None:
                    log.error("engine: gets no new requests: %s", message.reason)
                self.cordoned = message.reason

    def _warn_of_compiling(self, stats: Stats) -> None:
        before = 0 if self.stats is None else self.stats.num_kernel_variants_after_ready
        num_new = stats.num_kernel_variants_after_ready - before
        if num_new > 0:
            log.warning("engine: steps waited for kernels, %d variants compiled after it was ready", num_new)

    def _move(self, moved: dict[str, Tier]) -> None:
        for digest, tier in moved.items():
            if tier == "disk":
                self.tiers.pop(digest, None)
            else:
                self.tiers[digest] = tier

    def _lose_all(self, error: str, *, was_ready: bool = True) -> None:
        """Fail all requests of an engine that is gone. The log is quiet if it was drained before it was ready."""
        level = logging.INFO if was_ready else logging.DEBUG
        log.log(level if self.state in ("draining", "asleep") else logging.ERROR, "engine: %s", error)
        self._end_streams(NeverSent(ASLEEP) if self.state == "asleep" else EngineDied(error))
        for listener in self._end_listeners:
            listener(error)

    def _end_streams(self, error: EngineDied) -> None:
        """Fail all requests."""
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            self._send(Abort(request_id))
            stream.die(error)

    def _send(self, message: ToEngine) -> None:
        """Send a message in the frame of this iteration of the loop. After the engine's end it is dropped; the streams
        raise then."""
        if self._outbox is not None:
            self._outbox.send(message)

    def _set_state(self, state: State, error: str | None = None) -> None:
        self.state, self.state_error = state, error
        self._changed.set()
