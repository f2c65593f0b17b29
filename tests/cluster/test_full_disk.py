"""A replica whose disk is full: what is written on is a small file system that the test mounts and fills."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from adapters.files.durable_files import DiskWatch, write_fault
from service.engine.ipc.client import EngineClient
from service.ray_serve.relay import Relay
from service.ray_serve.remote import Address, RemoteEngines
from tests.support.engine.engine_process import request, running_client, small_config, soon, until
from tests.support.http.server import running_server
from tests.support.http.small_disk import filled, small_disk
from tests.support.http.uploads import parts_of
from tests.support.models.tiny_models import make_adapter, make_tiny_model


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk"):
        yield tmp_path / "disk"


def test_what_can_be_written_is_found_by_writing(tmp_path: Path, disk: Path) -> None:
    assert write_fault(disk) is None
    with filled(disk):
        assert write_fault(disk) == "full"
        assert write_fault(tmp_path) is None
    assert write_fault(disk) is None
    assert write_fault(tmp_path / "none") == "unreachable"
    assert list(disk.iterdir()) == []


def test_a_replica_gets_nothing_while_its_disk_is_full_and_another_is_there(tmp_path: Path, disk: Path) -> None:
    config = small_config(make_tiny_model("llama", tmp_path / "base"), tmp_path / "store")

    async def drive() -> None:
        async with AsyncExitStack() as stack:
            relays = {}
            for name in ("full", "other"):
                client: EngineClient = await stack.enter_async_context(running_client(config))
                relay = relays[name] = Relay(client)
                await relay.start("127.0.0.1")
                stack.push_async_callback(relay.close, 0)
            engines = RemoteEngines(2)
            stack.push_async_callback(engines.close)
            await engines.start()
            await engines.set_addresses(
                {name: Address("127.0.0.1", one.port, one.token.hex()) for name, one in relays.items()}
            )
            await soon(engines.wait_ready())
            watch = DiskWatch([disk, tmp_path / "not-made-yet"], relays["full"].cordon)
            await watch.look()

            def states() -> list[str]:
                return [one.state for one in engines.replicas().values()]

            def taken_by(prefix: str) -> set[str]:
                routed = [engines.submit(request(f"{prefix}-{n}")) for n in range(16)]
                return {one.member.name for one in routed if one.member is not None}

            assert taken_by("before") == {"full", "other"}
            with filled(disk):
                await watch.look()
                await until(lambda: states() == ["disk-full", "ready"])
                assert taken_by("full") == {"other"}
                # Where none is left that could write, what can be computed is.
                relays["other"].cordon("disk-full")
                await until(lambda: states() == ["disk-full", "disk-full"])
                assert "full" in taken_by("both")
                assert engines.state == "ready"
            await watch.look()
            relays["other"].cordon(None)
            await until(lambda: states() == ["ready", "ready"])
            assert "full" in taken_by("after")

    asyncio.run(drive())


def test_a_server_that_comes_while_the_disk_is_full_is_told(tmp_path: Path) -> None:
    config = small_config(make_tiny_model("llama", tmp_path / "base"), tmp_path / "store")

    async def drive() -> None:
        async with running_client(config) as client:
            relay = Relay(client)
            await relay.start("127.0.0.1")
            relay.cordon("disk-full")
            engines = RemoteEngines(1)
            await engines.start()
            await engines.set_addresses({"one": Address("127.0.0.1", relay.port, relay.token.hex())})
            await until(lambda: [one.state for one in engines.replicas().values()] == ["disk-full"])
            await engines.close()
            await relay.close(0)

    asyncio.run(drive())


def test_health_tells_that_the_store_is_full_and_requests_are_served(tmp_path: Path, disk: Path) -> None:
    base = make_tiny_model("llama", tmp_path / "base")
    make_adapter(base, tmp_path / "one", rank=4, target_modules=["q_proj"], seed=1)
    files = parts_of(tmp_path / "one")
    settings = {"model_name": "tiny", "store_dir": disk / "store", "min_free_disk_bytes": 0}
    with running_server(base, tmp_path / "server", **settings) as server:
        with filled(disk):
            assert server.get("/health").json()["store"] == "full"
            assert server.http.put(f"{server.url}/v1/adapters/one", files=files).status_code == 507
            body = {"model": "tiny", "prompt": "the cat", "max_tokens": 4}
            assert server.post("/v1/completions", json=body).status_code == 200
        assert "store" not in server.get("/health").json()
        assert server.http.put(f"{server.url}/v1/adapters/one", files=files).status_code == 201
