"""Engines behind relays, used over TCP: what a server elsewhere gets is what a server beside them gets."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from service.api.metrics.metrics import Metrics
from service.cluster.dispatch import MOST_EXPECTED_TOKENS, Routed
from service.engine.ipc.client import EngineClient
from service.engine.ipc.config import EngineConfig
from service.engine.ipc.link import EngineDied
from service.engine.ipc.messages import EngineStatus, Finished, Tokens
from service.ray_serve.relay import TOKEN_BYTES, Relay
from service.ray_serve.remote import Address, RemoteEngine, RemoteEngines
from tests.support.engine.engine_process import collect, request, running_client, small_config, soon, until
from tests.support.models.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    base = make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=20_000)
    return small_config(base, tmp_path_factory.mktemp("store"), kv_bytes=32 * 2**20)


def _address(relay: Relay) -> Address:
    return Address("127.0.0.1", relay.port, relay.token.hex())


@asynccontextmanager
async def _relays(config: EngineConfig, number: int) -> AsyncIterator[list[tuple[EngineClient, Relay]]]:
    async with AsyncExitStack() as stack:
        running = []
        for client in [await stack.enter_async_context(running_client(config)) for _ in range(number)]:
            relay = Relay(client)
            await relay.start("127.0.0.1")
            stack.push_async_callback(relay.close, 0)
            running.append((client, relay))
        yield running


@asynccontextmanager
async def _engines(relays: list[tuple[EngineClient, Relay]]) -> AsyncIterator[RemoteEngines]:
    engines = RemoteEngines(len(relays))
    await engines.start()
    await engines.set_addresses({f"replica-{n}": _address(relay) for n, (_, relay) in enumerate(relays)})
    try:
        await soon(engines.wait_ready())
        yield engines
    finally:
        await engines.close()


async def _all_of(routed: Routed) -> tuple[list[int], Finished | EngineDied]:
    news, tokens = asyncio.Event(), list[int]()
    routed.listen(news.set)
    while True:
        try:
            while (message := routed.poll()) is not None:
                if isinstance(message, Tokens):
                    tokens.extend(message.token_ids)
                else:
                    return tokens, message
        except EngineDied as died:
            return tokens, died
        news.clear()
        await soon(news.wait())


def _pid(client: EngineClient) -> int:
    assert client.ready is not None
    return client.ready.pid


def test_answers_and_sizes_are_the_engine_s_own(config: EngineConfig) -> None:
    async def drive() -> None:
        async with _relays(config, 1) as relays, _engines(relays) as engines:
            ((client, relay),) = relays
            assert engines.ready == client.ready
            here = await collect(client.submit(request("here", max_tokens=40)))
            there = await _all_of(engines.submit(request("there", max_tokens=40)))
            assert there[0] == here[0] and len(here[0]) == 40
            assert isinstance(there[1], Finished) and there[1].reason == "length"
            assert relay.queued_tokens == 0

    asyncio.run(drive())


def test_who_does_not_know_the_token_gets_nothing(config: EngineConfig) -> None:
    async def drive() -> None:
        async with _relays(config, 1) as relays:
            ((_, relay),) = relays
            for said in (bytes(TOKEN_BYTES), b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
                writer.write(said)
                assert await soon(reader.read()) == b""
                writer.close()

    asyncio.run(drive())


def test_who_answers_in_an_engine_s_place_and_is_none_is_left_alone_until_the_engine_is_there(
    config: EngineConfig,
) -> None:
    """The port of a replica that is gone may be another's before Ray says so."""

    async def drive() -> None:
        async with _relays(config, 1) as relays:
            ((_, relay),) = relays
            strangers = []

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                strangers.append(await reader.readexactly(TOKEN_BYTES))
                if len(strangers) < 3:
                    writer.write(len(b"nobody").to_bytes(4, "big") + b"nobody")
                    writer.close()
                    return
                there, to_there = await asyncio.open_connection("127.0.0.1", relay.port)
                to_there.write(strangers[-1])
                while data := await there.read(1 << 16):
                    writer.write(data)

            async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
                host, port = server.sockets[0].getsockname()
                engine = RemoteEngine(Address(host, port, relay.token.hex()))
                await engine.start()
                await soon(engine.wait_ready())
                await engine.close()

    asyncio.run(drive())


def test_what_had_not_begun_goes_elsewhere_and_what_had_ends_with_the_reason(config: EngineConfig) -> None:
    async def drive() -> None:
        async with _relays(config, 2) as relays, _engines(relays) as engines:
            begun = engines.submit(request("begun", max_tokens=15_000))
            news = asyncio.Event()
            begun.listen(news.set)
            await soon(news.wait())
            assert isinstance(begun.poll(), Tokens)
            assert begun.member is not None
            number = int(begun.member.name.removeprefix("replica-"))
            # Stopped, it can answer none of those that are sent to it now.
            os.kill(_pid(relays[number][0]), signal.SIGSTOP)
            waiting = [engines.submit(request(f"waiting-{n}")) for n in range(80)]
            assert {one.member.name for one in waiting if one.member} == {"replica-0", "replica-1"}
            os.kill(_pid(relays[number][0]), signal.SIGKILL)
            for one in waiting:
                tokens, ended = await _all_of(one)
                assert len(tokens) == 6 and isinstance(ended, Finished)
            _, ended = await _all_of(begun)
            assert isinstance(ended, EngineDied) and "killed by signal 9" in str(ended)
            # It comes back by itself, and is used again.
            await until(lambda: {one.state for one in engines.replicas().values()} == {"ready"})
            assert sum(one.num_sent_again for one in engines.replicas().values()) > 0

    asyncio.run(drive())


def test_engines_come_and_go_and_those_that_go_finish(config: EngineConfig) -> None:
    async def drive() -> None:
        async with _relays(config, 2) as relays, _engines(relays[:1]) as engines:
            seen: list[int] = []
            engines.on_client(lambda number, _client: seen.append(number))
            first = engines.submit(request("first", max_tokens=2_000))
            await engines.set_addresses({"new": _address(relays[1][1])})
            await soon(engines.wait_ready())
            assert seen == [0, 1]
            assert list(engines.replicas()) == ["new"]
            second = engines.submit(request("second"))
            assert second.member is not None and second.member.name == "new"
            tokens, ended = await _all_of(first)
            assert len(tokens) == 2_000 and isinstance(ended, Finished)
            # Nobody is left, so that its replica may end.
            await soon(relays[0][1].close(60))

    asyncio.run(drive())


def test_engines_of_another_model_get_nothing_and_the_last_of_its_own_stay(config: EngineConfig) -> None:
    """As at an upgrade to another model: token ids of one mean nothing to the other."""

    async def drive() -> None:
        async with _relays(config, 2) as relays, _engines(relays[:1]) as engines:
            own, other = {"replica-0": _address(relays[0][1])}, replace(_address(relays[1][1]), serves="other")
            for addresses in ({**own, "other": other}, {"other": other}):
                await engines.set_addresses(addresses)
                assert list(engines.replicas()) == ["replica-0"]
                routed = engines.submit(request(f"with-{len(addresses)}"))
                assert routed.member is not None and routed.member.name == "replica-0"
                tokens, ended = await _all_of(routed)
                assert len(tokens) == 6 and isinstance(ended, Finished)

    asyncio.run(drive())


def test_who_replaces_servers_of_another_model_begins_with_one_engine(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines of before that are left stay until it serves, in the places of those that it lacks."""
    monkeypatch.setattr("service.ray_serve.remote.OTHERS_SECONDS", math.inf)

    async def drive() -> None:
        async with _relays(config, 1) as ((_, relay),):
            engines = RemoteEngines(2)
            await engines.start()
            await engines.set_addresses({"other": Address("127.0.0.1", 9, "00", serves="other")})
            await engines.set_addresses({"own": _address(relay)})
            await soon(engines.wait_ready())
            await engines.close()

    asyncio.run(drive())


def test_without_engines_it_is_said_what_is_missing(config: EngineConfig) -> None:
    async def drive() -> None:
        engines = RemoteEngines(2)
        assert {name: one.state for name, one in engines.replicas().items()} == {
            "missing-0": "missing",
            "missing-1": "missing",
        }
        _, ended = await _all_of(engines.submit(request("nowhere")))
        assert isinstance(ended, EngineDied)
        async with _relays(config, 1) as relays, _engines(relays) as engines:
            await engines.set_addresses({})
            assert engines.state == "restarting"

    asyncio.run(drive())


def test_requests_of_a_server_that_is_lost_are_aborted(config: EngineConfig) -> None:
    async def drive() -> None:
        async with _relays(config, 1) as relays:
            ((client, relay),) = relays
            engine = RemoteEngine(_address(relay))
            await engine.start()
            await soon(engine.wait_ready())
            engine.submit(request("endless", max_tokens=15_000))
            await until(lambda: client.stats is not None and client.stats.num_running == 1)
            assert relay.queued_tokens > 0
            await engine.close()
            await until(lambda: client.stats is not None and client.stats.num_running == 0)
            assert relay.queued_tokens == 0

    asyncio.run(drive())


def test_a_long_output_counts_as_load_until_its_end(config: EngineConfig) -> None:
    async def drive() -> None:
        async with _relays(config, 1) as relays, _engines(relays) as engines:
            ((_, relay),) = relays
            routed, news, num_tokens = engines.submit(request("long", max_tokens=400)), asyncio.Event(), 0
            routed.listen(news.set)
            assert routed.member is not None
            while num_tokens < 300:
                await soon(news.wait())
                news.clear()
                while isinstance(message := routed.poll(), Tokens):
                    num_tokens += len(message.token_ids)
                    assert routed.member.queued_tokens == min(400 - num_tokens, MOST_EXPECTED_TOKENS)
                assert relay.queued_tokens > 0 or isinstance(message, Finished)

    asyncio.run(drive())


def test_of_engines_that_have_left_no_gauge_stays() -> None:
    metrics = Metrics("base", 0)
    there = EngineStatus("ready", None, 7, 1, {"device": 3}, 0, None)
    metrics.show_replicas({"old": there, "kept": there})
    metrics.show_replicas({"kept": there})
    lines = metrics.render().decode().splitlines()
    old = {line.partition("{")[0] for line in lines if 'replica="old"' in line}
    assert old and all(name.endswith(("_total", "_created")) for name in old)
    assert any(line.startswith("multilora_replica_up") and 'replica="kept"' in line for line in lines)


def test_with_no_engine_every_adapter_is_on_disk() -> None:
    engines = RemoteEngines(2)
    assert (engines.tiers.get("a", "disk"), engines.tiers["a"], len(engines.tiers)) == ("disk", "disk", 0)
    assert engines.places_of("a") == {}
