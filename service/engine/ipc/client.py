"""The API process's end: starts the engine process, and restarts it.

Imports no torch. Everything runs in one event loop, and `start` must be called in a thread that outlives the engine
(the kernel ends the engine with the thread that started it).

Who owns: the client owns the process. The next engine starts empty and reads its adapters from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from uuid import uuid4

from kernels.child_process import child_environment, ending_of
from service.engine.ipc.config import EngineOptions
from service.engine.ipc.link import ASLEEP, EngineDied, EngineLink, NeverSent
from service.engine.ipc.messages import Drain, EngineStatus, Resume, Sleep, Tier
from service.engine.ipc.wire import Outbox, frame, read_from_engine

log = logging.getLogger(__name__)

MAX_DEATHS = 3
DEATHS_WITHIN_SECONDS = 60.0
EXIT_GRACE_SECONDS = 5.0
# An engine that could not even begin is tried again after this time, and twice it: what it lacked may come back.
RETRY_SECONDS = 2.0
# The module that the engine process runs; benchmarks have another.
ENGINE_MODULE = "service.engine.process"


class EngineClient(EngineLink):
    """An engine process of this process's own; see the module's docstring.

    environment   variables of the engine process beside this one's, to give it a device of its own
    rest_seconds  an engine that has died too often is "down" for so long and then tried again; None: for good, which is
                  for a server without another one, that can be started anew
    """

    def __init__(
        self,
        options: EngineOptions,
        environment: Mapping[str, str] | None = None,
        rest_seconds: float | None = None,
    ) -> None:
        super().__init__()
        self.options, self._rest_seconds = options, rest_seconds
        self._environment = dict(environment or {})
        self._closing = asyncio.Event()
        self._woken = asyncio.Event()  # or closing
        self._falling_asleep_or_waking = asyncio.Lock()
        self._supervisor: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    # ---- life

    async def start(self) -> None:
        """Start the engine process and keep it running; returns at once. Does nothing the second time."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def drain(self, limit_seconds: float) -> None:
        """Let running requests finish, up to `limit_seconds`, and wait for the engine's end. New ones are refused."""
        was_ready = self.state == "ready"
        self._closing.set()
        self._woken.set()
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
        self._woken.set()
        if self.state != "down":
            self._set_state("draining")
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._supervisor is not None:
            await self._supervisor

    @property
    def can_sleep(self) -> bool:
        """See `EngineLink`."""
        return True

    async def sleep(self, level: int) -> None:
        """See `EngineLink`. A process that is killed owns nothing but memory, and the next one reads all again."""
        async with self._falling_asleep_or_waking:
            if self.state in ("draining", "down"):
                raise EngineDied(self.state_error or "The engine is down.")
            if level == 1 and (self.state == "asleep" or await self._dozes_off()):
                return
            self._set_asleep()
            self.kill()
            while self.state == "asleep" and self._process is not None:
                self._changed.clear()
                await self._changed.wait()

    async def wake(self) -> None:
        """See `EngineLink`."""
        async with self._falling_asleep_or_waking:
            if self.state == "asleep" and self._process is not None:
                with contextlib.suppress(EngineDied):  # then it is started anew
                    await self._answered(Resume(uuid4().hex))
                    self._set_state("ready")
            if self.state == "asleep":
                self._set_state("starting")
                self._woken.set()
        await self.wait_ready()

    async def _dozes_off(self) -> bool:
        """Whether an engine that is ready sleeps now, and lives on."""
        if self.state != "ready":
            return False
        self._set_asleep()
        self._end_streams(NeverSent(ASLEEP))
        try:
            await self._answered(Sleep(uuid4().hex))
        except EngineDied as refusal:
            log.warning("the engine ends for its sleep: %s", refusal)
            return False
        return True

    def _set_asleep(self) -> None:
        if self.state != "asleep":
            self._woken.clear()
            self._set_state("asleep", ASLEEP)

    def on_client(self, listener: Callable[[int, EngineLink], None]) -> None:
        """Call `listener` with each engine's number and client; there is this one."""
        listener(0, self)

    def replicas(self) -> Mapping[str, EngineStatus]:
        """The status of each of several engines; empty, since this is one."""
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
            self._outbox = self.ready = self.stats = None
            self.tiers = {}
            self._lose_all(str(error))
            self._set_state("down", f"The engine cannot be kept running: {type(error).__name__}: {error}")

    async def _run_engines(self) -> None:
        deaths: deque[float] = deque()
        was_ever_ready = False
        while True:
            was_ready, error = await self._live()
            was_ever_ready |= was_ready
            self._lose_all(error, was_ready=was_ready)
            if self.state == "asleep":
                await self._sleep()
                if not self._closing.is_set():
                    self.num_restarts += 1
                    continue
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
                if self._rest_seconds is None:
                    return
                await self._rest(self._rest_seconds)
                deaths.clear()
            if not self._closing.is_set():
                self._set_state("restarting", error)
                self.num_restarts += 1
                if not was_ready:
                    await self._rest(RETRY_SECONDS * len(deaths))
            if self._closing.is_set():
                self._set_state("down", "The server is shutting down.")
                return

    async def _sleep(self) -> None:
        """Until it is woken, or the server is to end; there is no process any more."""
        self._process = None
        self._changed.set()
        log.info("the engine sleeps")
        await self._woken.wait()

    async def _rest(self, seconds: float) -> None:
        """Or until the server is to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _live(self) -> tuple[bool, str]:
        """The whole life of one engine process. Returns whether it was ever ready, and how it ended."""
        self._fatal = None
        try:
            self._process, reader, writer = await _spawn(self._environment)
        except OSError as error:
            return False, f"The engine process could not be started: {error.strerror or error}"
        self._outbox = outbox = Outbox(writer)
        outbox.write(frame(self.options))
        if self.state in ("draining", "asleep"):  # since while the process was being made
            self._process.kill()
        while (messages := await read_from_engine(reader)) is not None:
            self._take_all(messages)
        outbox.close()
        self._outbox = self.stats = None
        self.tiers = {}
        if self.state == "ready":
            self._set_state("restarting", "The engine process has ended.")
        code = await self._exit_code(self._process)
        was_ready, self.ready = self.ready is not None, None
        return was_ready, self._fatal or f"The engine process {ending_of(code)}."

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
            *(sys.executable, "-P", "-m", ENGINE_MODULE, str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,
            env={**child_environment(), **environment},
        )
        undo.callback(process.kill)
        reader, writer = await asyncio.open_connection(sock=ours)
        undo.pop_all()
    return process, reader, writer
