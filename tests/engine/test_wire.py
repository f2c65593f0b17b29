"""Frames between the processes, and the configuration that travels in the first of them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable

import pytest

from kernels.sampling.parameters import ScoredToken
from service.engine.ipc.config import EngineOptions
from service.engine.ipc.messages import Abort, Finished, FromEngine, Sampling, Submit, ToEngine, Tokens
from service.engine.ipc.wire import EngineSide, Outbox, frame, read_from_engine
from tests.support.engine.engine_mock import make_mock_engine

TO_ENGINE: list[ToEngine] = [
    Submit("r1", (1, 2, 3), Sampling(max_tokens=4, logit_bias={5: -1.5}, stop_token_ids=(7, 8), seed=2**62)),
    Submit("r2", (1,), Sampling(max_tokens=4), "digest", {"attention": 16}, tenant="tenant", weight=2.5),
    Abort("r1"),
]
FROM_ENGINE: list[FromEngine] = [
    Tokens("r1", (5,), (ScoredToken(5, -0.25, ((5, -0.25), (6, -2.0))),), (None, ScoredToken(2, -1.0))),
    Finished("r1", "stop", stop_token_id=5),
    make_mock_engine().engine.stats(),
]


def options(**fields: object) -> EngineOptions:
    return EngineOptions(model_dir="/model", store_root="/store", **fields)  # type: ignore[arg-type]


def test_the_engine_reads_what_was_sent_however_it_was_cut() -> None:
    ours, theirs = socket.socketpair()
    side = EngineSide(theirs.detach())
    content = frame(options(num_threads=3)) + frame(TO_ENGINE) + frame([]) + frame(TO_ENGINE[:1])

    def send_in_pieces() -> None:
        for start in range(0, len(content), 3):
            ours.sendall(content[start : start + 3])
        ours.close()

    sender = threading.Thread(target=send_in_pieces)
    sender.start()
    assert side.read_options() == options(num_threads=3)
    assert [side.read() for _ in range(4)] == [TO_ENGINE, [], TO_ENGINE[:1], None]
    sender.join()


def test_the_client_reads_what_the_engine_wrote() -> None:
    async def drive() -> list[list[FromEngine] | None]:
        ours, theirs = socket.socketpair()
        side = EngineSide(theirs.dup().detach())
        side.write(FROM_ENGINE)
        side.write(FROM_ENGINE[1:])
        reader, writer = await asyncio.open_connection(sock=ours)
        first, second = await read_from_engine(reader), await read_from_engine(reader)
        with theirs:
            theirs.shutdown(socket.SHUT_RDWR)  # what the end of the process does
        third = await read_from_engine(reader)
        writer.close()
        return [first, second, third]

    assert asyncio.run(drive()) == [FROM_ENGINE, FROM_ENGINE[1:], None]


def _said(drive: Callable[[Outbox[ToEngine]], Awaitable[None]]) -> list[list[ToEngine] | None]:
    """Frames that an engine reads of what `drive` says, to its end."""

    async def run() -> None:
        _, writer = await asyncio.open_connection(sock=ours)
        outbox = Outbox[ToEngine](writer)
        await drive(outbox)
        outbox.close()

    ours, theirs = socket.socketpair()
    side = EngineSide(theirs.detach())
    asyncio.run(run())
    return list(iter(side.read, None))


def test_what_is_said_in_one_turn_of_the_loop_is_one_frame() -> None:
    async def drive(outbox: Outbox[ToEngine]) -> None:
        for message in TO_ENGINE:
            outbox.send(message)
        await asyncio.sleep(0)
        outbox.send(TO_ENGINE[1])
        outbox.send(TO_ENGINE[2])

    assert _said(drive) == [TO_ENGINE, TO_ENGINE[1:]]


def test_a_message_that_cannot_be_expressed_is_nobody_else_s_loss() -> None:
    too_large = Submit("r3", (1,), Sampling(max_tokens=4, seed=2**70))

    async def drive(outbox: Outbox[ToEngine]) -> None:
        outbox.send(TO_ENGINE[0])
        with pytest.raises(OverflowError):
            outbox.send(too_large)
        outbox.send(TO_ENGINE[1])

    assert _said(drive) == [TO_ENGINE[:2]]


def test_what_is_said_after_the_end_goes_nowhere() -> None:
    async def drive(outbox: Outbox[ToEngine]) -> None:
        outbox.send(TO_ENGINE[0])
        outbox.close()
        outbox.send(TO_ENGINE[1])
        await asyncio.sleep(0)

    assert _said(drive) == [TO_ENGINE[:1]]


def test_a_frame_cut_off_by_death_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    side = EngineSide(theirs.detach())
    ours.sendall(frame(TO_ENGINE)[:-1])
    ours.close()
    assert side.read() is None


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"token_budget": 0}, "token_budget"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"kv_bytes": 0}, "kv_bytes"),
        ({"row_bytes": -1}, "row_bytes"),
        ({"token_budget": 8, "max_sequences": 9}, "at least max_sequences"),
        ({"fp8_activations": True, "batch_invariant": True}, "leave out one"),
    ],
)
def test_a_configuration_is_checked_when_it_is_made(fields: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        options(**fields)
