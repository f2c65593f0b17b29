"""Engines behind `service.ray_serve.relay`, on this machine or on others, which come and go while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from service.cluster.engines import Engines
from service.cluster.routing import DEFAULT_RULE, ReplicaHealth, Rule
from service.engine.ipc.link import EngineLink
from service.engine.ipc.messages import EngineStatus, Ready
from service.engine.ipc.wire import Outbox, read_from_engine
from service.ray_serve.tcp_keepalive import end_when_vanished

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
RETRY_SECONDS = 0.2
# Time from the first ready engine for which the server waits for the others before it takes requests.
OTHERS_SECONDS = 30.0
_LOOK_SECONDS = 0.05
# How long requests of an engine that leaves may go on.
LEAVE_SECONDS = 600.0


@dataclass(frozen=True)
class Address:
    """Where a relay listens, the token to say to it, in hexadecimal digits, and what its engine serves: a word that is
    the same for the same model and store."""

    host: str
    port: int
    token: str
    serves: str = ""


class RemoteEngine(EngineLink):
    """An engine that another process runs. It is "restarting" while there is no connection, which is retried without
    end: its owner decides whether it comes back."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address = address
        self._keeping: asyncio.Task[None] | None = None
        self._last_pid: int | None = None

    async def start(self) -> None:
        """Connect, and stay connected; returns at once."""
        assert self._keeping is None, "started twice"
        self._keeping = asyncio.create_task(self._keep(), name="remote-engine")

    async def drain(self, limit_seconds: float) -> None:
        """Let its requests finish, up to `limit_seconds`, and disconnect; the engine goes on."""
        self._set_state("draining")
        until_seconds = time.monotonic() + limit_seconds
        while self._streams and time.monotonic() < until_seconds:
            await asyncio.sleep(_LOOK_SECONDS)
        await self.close()

    async def close(self) -> None:
        """Disconnect; every open stream raises EngineDied."""
        self._set_state("draining")
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        self._lose("The server has left the engine.")
        self._set_state("down", "The server has left the engine.")

    def kill(self) -> None:
        """Disconnect at once, whatever is still to be sent: its process is its owner's."""
        if self._outbox is not None:
            self._outbox.abort()

    async def _keep(self) -> None:
        while True:
            self._fatal = None
            try:
                await self._live()
                error = self._fatal or "The connection to the engine has ended."
            except OSError as fault:
                error = f"The engine at {self.address.host} cannot be reached: {fault or type(fault).__name__}."
            is_news = self.state == "ready"
            if self.state != "draining":
                self._set_state("restarting", error)
            if is_news or self._streams:
                self._lose(error)
            if self.state == "draining":
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _live(self) -> None:
        """The whole of one connection."""
        address = self.address
        connecting = asyncio.open_connection(address.host, address.port)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        end_when_vanished(writer)
        self._outbox = Outbox(writer)
        self._outbox.write(bytes.fromhex(address.token))
        while (messages := await read_from_engine(reader)) is not None:
            for message in messages:
                # Counters of an engine that lived on while it was not connected go on, too.
                if isinstance(message, Ready) and message.pid != self._last_pid:
                    self.num_restarts += self._last_pid is not None
                    self._last_pid = message.pid
            self._take_all(messages)

    def _lose(self, error: str) -> None:
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = self.ready = self.stats = self.cordoned = None
        self.tiers = {}
        self._lose_all(error)


class RemoteEngines(Engines):
    """Engines that others start and stop; `set_addresses` receives the list of them.

    num_expected  engines that there should be; fewer show as missing
    serves        see Address: token ids mean something else to an engine of another model
    """

    def __init__(self, num_expected: int, rule: Rule = DEFAULT_RULE, serves: str = "") -> None:
        super().__init__([], rule)
        self._num_expected, self._serves = num_expected, serves
        self._num_joined = 0
        self._replaces_others = False
        self._listeners: list[Callable[[int, EngineLink], None]] = []
        self._leaving: set[asyncio.Task[None]] = set()

    def on_client(self, listener: Callable[[int, EngineLink], None]) -> None:
        """Call `listener` with each engine's number and client, now or when it joins."""
        super().on_client(listener)
        self._listeners.append(listener)

    async def set_addresses(self, addresses: Mapping[str, Address]) -> None:
        """These engines and no others, by name, of those that serve the same. Those that leave get no new requests, and
        finish the ones they have. While there are only some that serve something else nobody leaves: at an upgrade to
        another model the last ones stay until the last server that can use them has gone."""
        same = {name: one for name, one in addresses.items() if one.serves == self._serves}
        self._replaces_others = self._replaces_others or len(same) < len(addresses)
        if addresses and not same:
            return
        addresses = same
        for member in [one for one in self._members if one.name not in addresses]:
            log.info("%s leaves", member.name)
            self._members.remove(member)
            leaving = asyncio.create_task(member.client.drain(LEAVE_SECONDS))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        known = {one.name for one in self._members}
        for name in sorted(addresses.keys() - known):
            log.info("%s joins", name)
            client = RemoteEngine(addresses[name])
            for listener in self._listeners:
                listener(self._num_joined, client)
            self._num_joined += 1
            self._members.append(ReplicaHealth(name, client))
            await client.start()

    async def wait_ready(self) -> Ready:
        """Wait until as many as expected are ready, or one is and the others have had their time.

        Where they are to take the places of engines of another model one is enough: the last of those stay until the
        server before has gone, which waits for this one."""
        until_seconds = None
        while True:
            num_ready = sum(one.state == "ready" for one in self.clients)
            if num_ready and until_seconds is None:
                until_seconds = time.monotonic() + OTHERS_SECONDS
            is_late = until_seconds is not None and time.monotonic() >= until_seconds
            ready = self.ready
            is_enough = num_ready >= self._num_expected or self._replaces_others
            if ready is not None and (is_enough or is_late):
                return ready
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def state(self) -> str:
        """As of engines that stay; while there is none, "starting" at first and "restarting" later."""
        if self._members:
            return super().state
        return "restarting" if self._num_joined else "starting"

    def replicas(self) -> dict[str, EngineStatus]:
        """Status of each engine, by name; missing ones are numbered."""
        said = super().replicas()
        for number in range(self._num_expected - len(said)):
            said[f"missing-{number}"] = EngineStatus("missing", None, 0, 0, {}, 0, None)
        return said

    async def drain(self, limit_seconds: float) -> None:
        """As of engines that stay."""
        await super().drain(limit_seconds)
        await self._forget_leaving()

    async def close(self) -> None:
        """As of engines that stay."""
        await super().close()
        await self._forget_leaving()

    async def _forget_leaving(self) -> None:
        leaving = list(self._leaving)
        for one in leaving:
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*leaving, return_exceptions=True)
