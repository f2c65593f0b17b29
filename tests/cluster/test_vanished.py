"""Servers and engines between which the network is gone without a word: each lets go of the other in time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest

from service.cluster.dispatch import Routed
from service.engine.ipc.client import EngineClient
from service.engine.ipc.config import EngineConfig
from service.engine.ipc.link import EngineDied
from service.engine.ipc.messages import Tokens
from service.ray_serve.relay import Relay
from service.ray_serve.remote import Address, RemoteEngines
from tests.support.engine.engine_process import request, running_client, small_config, soon, until
from tests.support.models.tiny_models import make_tiny_model
from tests.support.on_ray.vanished import vanished


class _Cable:
    """A port that stands for another one, until it is cut; then both ends hear nothing, not even that."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._cut = ExitStack()
        self._tasks = {asyncio.create_task(self._accept())}

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            one, _ = await loop.sock_accept(self._listener)
            other = socket.create_connection(("127.0.0.1", self._to))
            other.setblocking(False)
            self._ends += [one, other]
            self._tasks |= {asyncio.create_task(_carry(*pair)) for pair in ((one, other), (other, one))}

    def cut(self) -> None:
        self._cut.enter_context(vanished(self._listener, *self._ends))

    def mend(self) -> None:
        self._cut.close()

    async def close(self) -> None:
        self.mend()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in (self._listener, *self._ends):
            one.close()


async def _carry(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(source, 1 << 16):
            await loop.sock_sendall(target, data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    base = make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=20_000)
    return small_config(base, tmp_path_factory.mktemp("store"), kv_bytes=32 * 2**20)


@asynccontextmanager
async def _server(config: EngineConfig) -> AsyncIterator[tuple[EngineClient, Relay, _Cable, RemoteEngines]]:
    """One engine, and a server with a cable to it."""
    async with running_client(config) as client:
        relay = Relay(client)
        await relay.start("127.0.0.1")
        cable = _Cable(relay.port)
        engines = RemoteEngines(1)
        await engines.start()
        await engines.set_addresses({"far": Address("127.0.0.1", cable.port, relay.token.hex())})
        try:
            await soon(engines.wait_ready())
            yield client, relay, cable, engines
        finally:
            await engines.close()
            await cable.close()
            await relay.close(0)


async def _read(routed: Routed, news: asyncio.Event) -> None:
    while True:
        news.clear()
        while isinstance(routed.poll(), Tokens):
            pass
        await soon(news.wait())


def test_a_stream_ends_though_its_engine_has_left_the_list(config: EngineConfig) -> None:
    async def drive() -> None:
        async with _server(config) as (_, _, cable, engines):
            begun = engines.submit(request("begun", max_tokens=15_000))
            news = asyncio.Event()
            begun.listen(news.set)
            await soon(news.wait())
            cable.cut()
            await engines.set_addresses({})  # as Ray has it half a minute later
            with pytest.raises(EngineDied):
                await _read(begun, news)

    asyncio.run(drive())


def test_an_engine_forgets_a_server_that_has_vanished(config: EngineConfig) -> None:
    async def drive() -> None:
        async with _server(config) as (client, relay, cable, engines):
            engines.submit(request("endless", max_tokens=15_000))
            await until(lambda: client.stats is not None and client.stats.num_running == 1)
            assert client.ready is not None
            os.kill(client.ready.pid, signal.SIGSTOP)  # so that it does not come to its end meanwhile
            cable.cut()
            await until(lambda: relay.queued_tokens == 0)
            os.kill(client.ready.pid, signal.SIGCONT)
            await until(lambda: client.stats is not None and client.stats.num_running == 0)
            # Nobody is left to wait for.
            await soon(relay.close(10_000))

    asyncio.run(drive())


def test_an_engine_is_found_again_when_the_network_is_back(config: EngineConfig) -> None:
    async def drive() -> None:
        async with _server(config) as (client, _, cable, engines):
            cable.cut()
            await until(lambda: engines.state == "restarting")
            cable.mend()
            await soon(engines.wait_ready())
            assert engines.ready == client.ready
            assert engines.num_restarts == 0

    asyncio.run(drive())
