"""The engine process and its client: messages, deaths, restarts, draining."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from service.engine.ipc.client import MAX_DEATHS, EngineClient
from service.engine.ipc.config import EngineConfig
from service.engine.ipc.link import EngineDied, TokenStream
from service.engine.ipc.messages import Finished, Stats, Tokens
from service.engine.ipc.wire import frame
from service.engine.startup.build import build_engine
from service.machine import num_usable_cpus
from tests.support.engine.engine_process import (
    collect,
    event_loop_with_client,
    first_tokens,
    request,
    running_client,
    small_config,
    soon,
    until,
)
from tests.support.http.server import is_alive
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_tiny_model

ONE_DAY_SECONDS = 86_400.0  # nobody waits for this to pass


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine an engine may take its time to come and to go."""
    monkeypatch.setattr("service.engine.ipc.client.DEATHS_WITHIN_SECONDS", ONE_DAY_SECONDS)
    monkeypatch.setattr("service.engine.ipc.client.EXIT_GRACE_SECONDS", LIMIT_SECONDS)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model_dir = make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=20_000)
    return small_config(model_dir, tmp_path_factory.mktemp("store"), kv_bytes=64 * 2**20)


@pytest.fixture(scope="module")
def shared(config: EngineConfig) -> Iterator[tuple[asyncio.Runner, EngineClient]]:
    """One engine for the tests that leave it alive."""
    with event_loop_with_client(config) as pair:
        yield pair


def test_tokens_are_those_of_an_engine_in_this_process(
    config: EngineConfig, shared: tuple[asyncio.Runner, EngineClient]
) -> None:
    runner, client = shared
    engine = build_engine(config)
    for i in range(4):
        engine.submit(request(f"r{i}", (1, 2, 3 + i), max_tokens=4 + i))
    expected: dict[str, list[int]] = {}
    for event in engine.run_until_idle():
        if isinstance(event, Tokens):
            expected.setdefault(event.request_id, []).extend(event.token_ids)
    engine.close()

    async def drive() -> list[list[int]]:
        streams = [client.submit(request(f"r{i}", (1, 2, 3 + i), max_tokens=4 + i)) for i in range(4)]
        return [(await collect(stream))[0] for stream in streams]

    assert runner.run(drive()) == [expected[f"r{i}"] for i in range(4)]


def test_ready_tells_what_admission_needs(config: EngineConfig, shared: tuple[asyncio.Runner, EngineClient]) -> None:
    ready = shared[1].ready
    assert ready is not None
    assert ready.max_model_len_tokens == 20_000
    assert 0 < ready.kv_capacity_tokens <= config.kv_bytes
    assert (ready.vocab_size, ready.dtype, ready.row_element_bytes, ready.row_alignment) == (304, "float32", 4, 4)


def test_a_refused_request_says_whose_fault_it_is(shared: tuple[asyncio.Runner, EngineClient]) -> None:
    runner, client = shared
    _, ended = runner.run(collect(client.submit(request("bad", (9999,)))))
    assert isinstance(ended, Finished)
    assert (ended.reason, ended.client_fault) == ("error", True)


def test_closing_a_stream_early_frees_the_request(shared: tuple[asyncio.Runner, EngineClient]) -> None:
    runner, client = shared

    async def drive() -> Stats | None:
        stream = client.submit(request("long", max_tokens=15_000))
        await first_tokens(stream)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await until(lambda: client.stats is not None and client.stats.num_running == 0)
        return client.stats

    stats = runner.run(drive())
    assert stats is not None
    assert (stats.kv_blocks_used, stats.num_waiting) == (0, 0)


def test_a_slow_reader_delays_nobody(shared: tuple[asyncio.Runner, EngineClient]) -> None:
    runner, client = shared

    async def drive() -> tuple[int, int]:
        unread = client.submit(request("unread", max_tokens=300))
        others = [client.submit(request(f"read-{i}", max_tokens=20)) for i in range(5)]
        done = [await soon(collect(stream)) for stream in others]
        return sum(len(tokens) for tokens, _ in done), len((await collect(unread))[0])

    assert runner.run(drive()) == (100, 300)


def test_stats_are_told_and_add_up(shared: tuple[asyncio.Runner, EngineClient]) -> None:
    runner, client = shared
    told: list[Stats] = []
    client.on_stats(told.append)

    expected = [(3, 1, 0)] + [(1, 1, 0)] * 7

    def is_told() -> bool:
        """The news of the test before may come only now, so the last steps are ours."""
        steps = [step for stats in told for step in stats.steps][-8:]
        return [step[:3] for step in steps] == expected and all(step[3] > 0 for step in steps)

    async def drive() -> None:
        await collect(client.submit(request("r", (1, 2, 3), max_tokens=8)))
        await until(lambda: told and told[-1].num_running == 0 and is_told())

    runner.run(drive())
    for earlier, later in pairwise(told):
        assert later.num_steps - earlier.num_steps == len(later.steps)


def test_an_adapter_that_is_not_in_the_store_is_an_error_of_its_request(
    shared: tuple[asyncio.Runner, EngineClient],
) -> None:
    runner, client = shared
    submit = request("r")
    _, ended = runner.run(collect(client.submit(type(submit)("r", (1,), submit.sampling, "f" * 64))))
    assert isinstance(ended, Finished)
    assert "f" * 64 in (ended.error or "")


def test_killed_thrice_it_restarts_twice_and_then_stays_down(config: EngineConfig) -> None:
    async def drive() -> list[str]:
        states: list[str] = []
        async with running_client(config) as client:
            for death in range(3):
                ready = await client.wait_ready()
                tokens, _ = await collect(client.submit(request("short")))
                assert len(tokens) == 6
                streams = [client.submit(request(f"r{i}", max_tokens=15_000)) for i in range(3)]
                await first_tokens(streams[0])
                os.kill(ready.pid, signal.SIGKILL)
                for stream in streams:
                    _, ended = await soon(collect(stream))
                    assert isinstance(ended, EngineDied)
                    assert "signal 9" in str(ended)
                if death < 2:
                    # A request that comes now is told so, at once; it is not kept for the next engine.
                    _, ended = await collect(client.submit(request("early")))
                    assert isinstance(ended, EngineDied)
            await until(lambda: client.state == "down")
            with pytest.raises(EngineDied, match="3 times within 86400 seconds"):
                await client.wait_ready()
            _, ended = await collect(client.submit(request("late")))
            states += [client.state, client.state_error or "", str(ended)]
            assert client.num_restarts == 2
        return states

    state, error, refusal = asyncio.run(drive())
    assert state == "down"
    assert "3 times within 86400 seconds" in error
    assert refusal == error


class TestRestarts:
    """What keeps an engine from starting again may pass."""

    def test_a_lack_of_descriptors_is_waited_for(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        async def drive() -> int:
            async with running_client(config) as client:
                assert client.ready is not None
                break_pairs(monkeypatch, times=1)
                os.kill(client.ready.pid, signal.SIGKILL)
                await until(lambda: client.state != "ready")
                await soon(client.wait_ready())
                return client.num_restarts

        assert asyncio.run(drive()) == 2

    def test_without_end_it_is_given_up_and_the_server_can_still_end(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def drive() -> str | None:
            async with running_client(config) as client:
                assert client.ready is not None
                break_pairs(monkeypatch, times=99)
                os.kill(client.ready.pid, signal.SIGKILL)
                await until(lambda: client.state == "down")
                error = client.state_error
                await soon(client.drain(ONE_DAY_SECONDS))
                return error

        assert "died 3 times" in (error := asyncio.run(drive()) or "")
        assert "Too many open files" in error

    def test_one_of_several_is_tried_again_after_a_rest(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody starts a server anew whose other engines serve."""

        async def drive() -> None:
            async with running_client(config, rest_seconds=0.01) as client:
                assert client.ready is not None
                killed = client.ready.pid
                break_pairs(monkeypatch, times=2 * MAX_DEATHS)
                os.kill(killed, signal.SIGKILL)
                await until(lambda: client.ready is not None and client.ready.pid != killed)
                _, ended = await soon(collect(client.submit(request("after"))))
                assert isinstance(ended, Finished)

        asyncio.run(drive())

    def test_a_fault_of_our_own_is_told_and_the_server_can_still_end(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_stream: TokenStream, _message: object) -> None:
            raise RuntimeError("nobody thought of this")

        async def drive() -> None:
            started = noted_engines(monkeypatch)
            async with running_client(config) as client:
                (process,) = started
                monkeypatch.setattr(TokenStream, "push", fail)
                _, ended = await soon(collect(client.submit(request("r"))))
                assert isinstance(ended, EngineDied)
                await until(lambda: client.state == "down")
                assert "nobody thought of this" in (client.state_error or "")
                assert (client.ready, client.stats) == (None, None)
                await soon(client.drain(ONE_DAY_SECONDS))
                assert await soon(process.wait()) == -signal.SIGKILL

        asyncio.run(drive())

    def test_a_model_that_is_away_for_a_while_ends_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model_dir = make_tiny_model("llama", tmp_path / "model")
        monkeypatch.setattr("service.engine.ipc.client.RETRY_SECONDS", 1.0)

        async def drive() -> None:
            async with running_client(small_config(model_dir, tmp_path / "store")) as client:
                assert client.ready is not None
                model_dir.rename(tmp_path / "away")
                os.kill(client.ready.pid, signal.SIGKILL)
                await until(lambda: client.num_restarts == 2)
                assert "config.json" in (client.state_error or "")
                assert (client.ready, client.stats) == (None, None)
                (tmp_path / "away").rename(model_dir)
                await soon(client.wait_ready())

        asyncio.run(drive())

    def test_a_drain_does_not_wait_for_the_next_try(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def drive() -> str:
            async with running_client(config) as client:
                assert client.ready is not None
                break_pairs(monkeypatch, times=99)
                monkeypatch.setattr("service.engine.ipc.client.RETRY_SECONDS", ONE_DAY_SECONDS)
                os.kill(client.ready.pid, signal.SIGKILL)
                await until(lambda: client.num_restarts == 2)
                await soon(client.drain(ONE_DAY_SECONDS))
                return client.state

        assert asyncio.run(drive()) == "down"


def break_pairs(monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """No descriptors are left for an engine, so many times; then all is well."""
    make_pair, failures = socket.socketpair, iter(range(times))

    def pair() -> tuple[socket.socket, socket.socket]:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return make_pair()

    monkeypatch.setattr("service.engine.ipc.client.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("service.engine.ipc.client.socket.socketpair", pair)


def noted_engines(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """All that are started from now on, in their order."""
    start: Any = asyncio.create_subprocess_exec
    started: list[asyncio.subprocess.Process] = []

    async def noted(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return started


def test_draining_finishes_what_runs_and_refuses_what_comes(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drive() -> None:
        started = noted_engines(monkeypatch)
        async with running_client(config) as client:
            stream = client.submit(request("running", max_tokens=200))
            await first_tokens(stream)
            draining = asyncio.create_task(client.drain(ONE_DAY_SECONDS))
            await asyncio.sleep(0)
            late = client.submit(request("late"))
            assert isinstance((await collect(late))[1], EngineDied)
            tokens, ended = await collect(stream)
            await draining
            assert (len(tokens), client.state) == (199, "down")
            assert isinstance(ended, Finished)
            assert ended.reason == "length"
            assert [process.returncode for process in started] == [0]

    asyncio.run(drive())


def test_a_drain_ends_at_its_limit(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def drive() -> None:
        started = noted_engines(monkeypatch)
        async with running_client(config) as client:
            stream = client.submit(request("endless", max_tokens=15_000))
            await first_tokens(stream)
            await soon(client.drain(0.05))
            _, ended = await collect(stream)
            assert isinstance(ended, Finished)
            assert (ended.reason, ended.error) == ("error", "The server is shutting down.")
            assert [process.returncode for process in started] == [0]

    asyncio.run(drive())


def test_an_engine_that_cannot_start_stays_down_and_says_why(tmp_path: Path) -> None:
    async def drive() -> EngineClient:
        client = EngineClient(small_config(tmp_path, tmp_path))
        await client.start()
        with pytest.raises(EngineDied, match=r"config\.json"):
            await client.wait_ready()
        return client

    client = asyncio.run(drive())
    assert client.state == "down"
    assert client.num_restarts == 0


@pytest.mark.parametrize(
    ("error", "has_traceback"), [("ModelError('odd')", False), ("ValueError('odd')", True), ("KeyError('odd')", True)]
)
def test_only_what_nobody_foresaw_at_the_start_has_a_traceback(
    config: EngineConfig, error: str, has_traceback: bool
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(config))
        code = f"""
import sys
from service.engine import process
from service.models.spec.config_json import ModelError

def fail(_device):
    raise {error}

process.may_find_accelerator = fail  # the first that a start asks
sys.argv[1:] = ["{theirs.fileno()}"]
sys.exit(process.main())
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        assert done.returncode == 1
        assert ("Traceback" in done.stderr) == has_traceback
        assert b"odd" in ours.recv(1000)


PARENT = """
import asyncio, sys
import msgspec
from service.engine.ipc.client import MAX_DEATHS, EngineClient
from service.engine.ipc.config import EngineConfig

async def main():
    client = EngineClient(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    await client.start()
    print((await client.wait_ready()).pid, flush=True)
    loaded = {"torch", "transformers", "numpy"} & set(sys.modules)
    print(sorted(loaded), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_engine_dies_with_its_parent_which_has_no_torch(config: EngineConfig) -> None:
    arguments = [sys.executable, "-c", PARENT, msgspec.json.encode(config).decode()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline().strip() == "[]"
        assert is_alive(pid)
        parent.kill()
    asyncio.run(until(lambda: not is_alive(pid)))


def test_threads_of_a_cpu_are_as_many_as_timed_steps_say(
    config: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """However the CPU is named."""

    async def drive() -> None:
        async with running_client(msgspec.structs.replace(config, device="cpu:0", num_threads=None)) as client:
            assert client.ready is not None and client.ready.device == "cpu:0"

    asyncio.run(drive())
    said = re.findall(r"CPU threads: (\d+) of at most (\d+), by timed decode steps", capfd.readouterr().err)
    assert len(said) == 1
    assert 1 <= int(said[0][0]) <= int(said[0][1]) <= num_usable_cpus()


def test_signals_to_the_group_do_not_end_the_engine(shared: tuple[asyncio.Runner, EngineClient]) -> None:
    runner, client = shared
    assert client.ready is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(client.ready.pid, number)
    tokens, _ = runner.run(collect(client.submit(request("after"))))
    assert len(tokens) == 6
