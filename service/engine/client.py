"""The API process's end: starts the engine process, restarts it, and gives each request its stream of messages.

Imports no torch. Everything runs in one event loop, and `start` must be called in a thread that outlives the engine
(the kernel ends the engine with the thread that started it).

Who owns: the client owns the process and the streams; a stream is owned by who submitted. Closing a stream early
aborts its request. A stream that is read slowly holds its own messages (at most one per token) and delays nobody;
whoever listens to it has them at once. When the engine dies, every stream raises EngineDied once its messages are read;
requests are never sent again silently. The next engine starts empty and reads its adapters from the store.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Literal

from service.child_process import child_environment
from service.engine.config import EngineOptions
from service.engine.messages import (
    Abort,
    Ask,
    Drain,
    EngineSaid,
    Evict,
    Fatal,
    Finished,
    FromEngine,
    Keep,
    Load,
    Ready,
    Stats,
    Submit,
    Tier,
    ToEngine,
    Tokens,
)
from service.engine.wire import frame, read_from_engine

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "draining", "down"]
MAX_DEATHS = 3
DEATHS_WITHIN_SECONDS = 60.0
EXIT_GRACE_SECONDS = 5.0
# An engine that could not even begin is tried again after this time, and twice it: what it lacked may come back.
RETRY_SECONDS = 2.0


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
        self._tell()

    def die(self, error: EngineDied) -> None:
        self._death = error
        self._tell()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `poll` has something to give or to raise, now if it has already. It never raises."""
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

    def _tell(self) -> None:
        self._news.set()
        if self._listener is not None:
            self._listener()

    async def aclose(self) -> None:
        """Give up; the engine forgets the request unless it is over. Safe to call at any time."""
        if not self._is_over:
            self._is_over = True
            self._news.set()
            self._on_close(self._request_id)


class EngineLink(abc.ABC):
    """One engine, wherever it runs: what it has said, and the streams of the requests that were sent to it.

    `state_error` is one sentence while the state is "restarting" or "down"; `ready` and `stats` are what the engine
    that lives now has said, else None; `tiers` where it holds adapters, by digest; `heard_seconds` when it said
    something last, by time.monotonic().
    """

    def __init__(self) -> None:
        self.heard_seconds = time.monotonic()
        self.state: State = "starting"
        self.state_error: str | None = None
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.tiers: dict[str, Tier] = {}
        self.num_restarts = 0
        self._kept: tuple[str, ...] = ()  # adapters, by each engine from its start on
        self._streams: dict[str, TokenStream] = {}
        self._stats_listeners: list[Callable[[Stats], None]] = []
        self._end_listeners: list[Callable[[str], None]] = []
        self._changed = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._fatal: str | None = None

    # ---- life

    @abc.abstractmethod
    async def start(self) -> None:
        """Begin to keep it there; returns at once."""

    @abc.abstractmethod
    async def drain(self, limit_seconds: float) -> None:
        """Let running requests finish, up to `limit_seconds`, and let go of it. New ones are refused."""

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

    def submit(self, request: Submit) -> TokenStream:
        """Send a request to the engine, now. The stream says how it went, also if the engine is not there."""
        assert request.request_id not in self._streams, "request ids are unique"
        stream = TokenStream(request.request_id, self.abort)
        if self.state != "ready":
            stream.die(NeverSent(self.state_error or f"The engine is not ready ({self.state})."))
            return stream
        self._streams[request.request_id] = stream
        self._send(request)
        return stream

    def abort(self, request_id: str) -> None:
        """Forget a request; its stream ends without another message. Unknown ids are ignored."""
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    def load(self, digest: str) -> None:
        """Hint that the adapter will be wanted. Nothing happens while the engine is not ready."""
        if self.state == "ready":
            self._send(Load(digest))

    def evict(self, digest: str) -> None:
        """Forget what was read of an adapter, as soon as no request runs with it. A later engine never had it."""
        if self.state == "ready":
            self._send(Evict(digest))
            if digest in self._kept:  # an engine gives up one that it cannot read until it is told anew
                self._send(Keep(self._kept))

    def keep(self, digests: Collection[str]) -> None:
        """Have these adapters on the device, asked for or not, and no others for that reason. Later engines too."""
        self._kept = tuple(digests)
        if self.state == "ready":
            self._send(Keep(self._kept))

    def ask(self) -> None:
        """Have it say Stats when its step is over."""
        if self.state == "ready":
            self._send(Ask())

    def on_stats(self, listener: Callable[[Stats], None]) -> None:
        """Call `listener` with every Stats, in the event loop."""
        self._stats_listeners.append(listener)

    def on_end(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with one sentence whenever the engine is gone, in the event loop."""
        self._end_listeners.append(listener)

    # ---- inner parts

    def _take(self, message: FromEngine) -> None:
        self.heard_seconds = time.monotonic()
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
                self.stats = message
                self._move(message.moved_adapters)
                for listener in self._stats_listeners:
                    listener(message)
            case Ready():
                self.ready = message
                if self._kept:
                    self._send(Keep(self._kept))
                if self.state != "draining":
                    self._set_state("ready")
            case Fatal():
                self._fatal = message.error

    def _move(self, moved: dict[str, Tier]) -> None:
        for digest, tier in moved.items():
            if tier == "disk":
                self.tiers.pop(digest, None)
            else:
                self.tiers[digest] = tier

    def _lose_all(self, error: str) -> None:
        """The engine is gone, and with it all requests."""
        log.log(logging.INFO if self.state == "draining" else logging.ERROR, "engine: %s", error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.die(EngineDied(error))
        for listener in self._end_listeners:
            listener(error)

    def _send(self, message: ToEngine) -> None:
        """Into the socket's buffer. After the engine's end it goes nowhere, and the streams are told of that."""
        if self._writer is not None:
            self._writer.write(frame([message]))

    def _set_state(self, state: State, error: str | None = None) -> None:
        self.state, self.state_error = state, error
        self._changed.set()


class EngineClient(EngineLink):
    """An engine process of this process's own; see the module's docstring.

    environment  variables of the engine process beside this one's, to give it a device of its own
    """

    def __init__(self, options: EngineOptions, environment: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.options = options
        self._environment = dict(environment or {})
        self._closing = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    # ---- life

    async def start(self) -> None:
        """Start the engine process and keep it running; returns at once."""
        assert self._supervisor is None, "started twice"
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def drain(self, limit_seconds: float) -> None:
        """Let running requests finish, up to `limit_seconds`, and wait for the engine's end. New ones are refused."""
        was_ready = self.state == "ready"
        self._closing.set()
        self._set_state("draining")
        if self._supervisor is None:
            self._set_state("down")
            return
        if was_ready:
            self._send(Drain(limit_seconds))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._supervisor), limit_seconds + EXIT_GRACE_SECONDS)
        await self.close()

    async def close(self) -> None:
        """Kill the engine process if it lives; every open stream raises EngineDied."""
        self._closing.set()
        if self.state != "down":
            self._set_state("draining")
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._supervisor is not None:
            await self._supervisor

    def on_client(self, listener: Callable[[int, EngineLink], None]) -> None:
        """Call `listener` with each engine's number and client; there is this one."""
        listener(0, self)

    def replicas(self) -> Mapping[str, EngineSaid]:
        """Of several engines, each; of one there is nothing to tell apart."""
        return {}

    def places_of(self, _digest: str) -> Mapping[str, Tier]:
        """Likewise, where an adapter is."""
        return {}

    def kill(self) -> None:
        """End the engine process, whatever it does; the next one is started as after any death."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    # ---- inner parts

    async def _supervise(self) -> None:
        """Run engines one after the other until the first says that it cannot start, or too many have died."""
        try:
            await self._run_engines()
        except Exception as error:
            # Without this task nobody would ever start an engine, or say that there is none.
            log.exception("the engine is given up")
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            self._writer = self.ready = self.stats = None
            self.tiers = {}
            self._lose_all(str(error))
            self._set_state("down", f"The engine cannot be kept running: {type(error).__name__}: {error}")

    async def _run_engines(self) -> None:
        deaths: deque[float] = deque()
        was_ever_ready = False
        while True:
            was_ready, error = await self._live()
            was_ever_ready |= was_ready
            self._lose_all(error)
            if self.state == "draining":
                self._set_state("down", "The server is shutting down.")
                return
            if self._fatal is not None and not was_ever_ready:
                self._set_state("down", self._fatal)
                return
            now = time.monotonic()
            deaths.append(now)
            while now - deaths[0] > DEATHS_WITHIN_SECONDS:
                deaths.popleft()
            if len(deaths) >= MAX_DEATHS:
                seconds = round(DEATHS_WITHIN_SECONDS)
                self._set_state("down", f"The engine died {MAX_DEATHS} times within {seconds} seconds. Last: {error}")
                return
            self._set_state("restarting", error)
            self.num_restarts += 1
            if not was_ready:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), RETRY_SECONDS * len(deaths))
            if self._closing.is_set():
                self._set_state("down", "The server is shutting down.")
                return

    async def _live(self) -> tuple[bool, str]:
        """The whole life of one engine process. Returns whether it was ever ready, and how it ended."""
        self._fatal = None
        try:
            self._process, reader, self._writer = await _spawn(self._environment)
        except OSError as error:
            return False, f"The engine process could not be started: {error.strerror or error}"
        self._writer.write(frame(self.options))
        if self.state == "draining":  # closed while the process was being made
            self._process.kill()
        while (messages := await read_from_engine(reader)) is not None:
            for message in messages:
                self._take(message)
        self._writer.close()
        self._writer = self.stats = None
        self.tiers = {}
        if self.state == "ready":
            self._set_state("restarting", "The engine process has ended.")
        code = await self._exit_code(self._process)
        was_ready, self.ready = self.ready is not None, None
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return was_ready, self._fatal or f"The engine process {ending}."

    async def _exit_code(self, process: asyncio.subprocess.Process) -> int:
        """Its stream has ended, so it must end soon, or is helped to."""
        try:
            return await asyncio.wait_for(process.wait(), EXIT_GRACE_SECONDS)
        except TimeoutError:
            process.kill()
            return await process.wait()


async def _spawn(
    environment: Mapping[str, str],
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """A new engine process, and our end of the socket pair. Raises OSError, with nothing left open."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        # fd 2 for its stdout: nothing but logs may come out of the engine.
        process = await asyncio.create_subprocess_exec(
            # -P: what lies in the directory that the server was started in is none of ours.
            *(sys.executable, "-P", "-m", "service.engine.process", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,
            env={**child_environment(), **environment},
        )
        undo.callback(process.kill)
        reader, writer = await asyncio.open_connection(sock=ours)
        undo.pop_all()
    return process, reader, writer
