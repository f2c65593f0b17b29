"""Run an engine process under its client, from a synchronous test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from service.engine.ipc.client import EngineClient
from service.engine.ipc.config import EngineConfig
from service.engine.ipc.link import EngineDied, TokenStream
from service.engine.ipc.messages import Finished, Sampling, Submit, Tokens
from tests.support.limits import LIMIT_SECONDS

MIB = 2**20
T = TypeVar("T")


def small_config(model_dir: Path, store_root: Path, **fields: Any) -> EngineConfig:
    """Budgets that fit a tiny model."""
    defaults: dict[str, Any] = {
        "token_budget": 32,
        "max_sequences": 8,
        "block_size_tokens": 4,
        "kv_bytes": 4 * MIB,
        "row_bytes": 4 * MIB,
        "host_tier_bytes": 16 * MIB,
        "num_threads": 1,
        "stats_interval_seconds": 0.01,
    }
    return EngineConfig(model_dir=str(model_dir), store_root=str(store_root), **(defaults | fields))


@asynccontextmanager
async def running_client(config: EngineConfig, **options: Any) -> AsyncIterator[EngineClient]:
    """A client whose engine is ready; killed at the end. With the client's own `options`."""
    client = EngineClient(config, **options)
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


@contextmanager
def event_loop_with_client(config: EngineConfig) -> Iterator[tuple[asyncio.Runner, EngineClient]]:
    """A loop that several tests share, and with it one engine process."""
    with asyncio.Runner() as runner:
        context = running_client(config)
        client = runner.run(context.__aenter__())
        try:
            yield runner, client
        finally:
            runner.run(_leave(context))


async def _leave(context: Any) -> None:
    await context.__aexit__(None, None, None)


def request(request_id: str, prompt: tuple[int, ...] = (1, 5, 9), **sampling: Any) -> Submit:
    """A greedy request that goes on until max_tokens."""
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | sampling
    return Submit(request_id, prompt, Sampling(**fields))


async def collect(stream: TokenStream) -> tuple[list[int], Finished | EngineDied]:
    """All tokens of a request and how it ended."""
    tokens: list[int] = []
    try:
        async for message in stream:
            if isinstance(message, Finished):
                return tokens, message
            tokens.extend(message.token_ids)
    except EngineDied as died:
        return tokens, died
    raise AssertionError("the stream ended without a last message")


async def first_tokens(stream: TokenStream) -> Tokens:
    message = await anext(stream)
    assert isinstance(message, Tokens)
    return message


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that another process does."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def soon(awaitable: Awaitable[T]) -> T:
    """What comes of it, which must come without a wait for anything that nobody does."""
    async with asyncio.timeout(LIMIT_SECONDS):
        return await awaitable
