"""A sequence between the engine and its reader: what is freed, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.api.admission import Plan, Prompt, Target
from service.api.errors import EngineFailed, NotReady, status_of
from service.api.generation import SequenceRun
from service.api.metrics import Metrics
from service.api.state import Services
from service.engine.client import EngineClient, EngineDied, NeverSent, TokenStream
from service.engine.messages import Sampling, Submit, Tokens
from service.text.stop_strings import StopAutomaton
from service.text.tokenizer import TextTokenizer
from tests.support.tiny_models import make_tokenizer

PLAN = Plan("r", Prompt((1,), ""), Sampling(max_tokens=100), StopAutomaton(["the"]), True, False)


class OneStream:
    """An engine with the stream of one request; notes what was aborted."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.stream = TokenStream("r", self.abort)

    def submit(self, _request: Submit) -> TokenStream:
        return self.stream

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


@pytest.fixture
def parts(tmp_path: Path) -> Services:
    """As much of `Services` as a sequence needs."""
    make_tokenizer(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    return cast(
        Services, SimpleNamespace(tokenizer=tokenizer, metrics=Metrics("tiny"), engine=OneStream(), draining=False)
    )


def test_a_stop_string_ends_the_engine_s_work_although_nobody_reads_on(parts: Services) -> None:
    engine = cast(Any, parts.engine)
    engine.stream.push(Tokens("r", tuple(parts.tokenizer.encode("the")), None))

    async def run() -> None:
        async for piece in SequenceRun(parts, Target("tiny", None), PLAN).pieces():
            assert (piece.finish_reason, engine.aborted) == ("stop", ["r"])
            break

    asyncio.run(run())


@pytest.mark.parametrize(("death", "kind", "status"), [(EngineDied, EngineFailed, 500), (NeverSent, NotReady, 503)])
def test_only_what_was_sent_is_lost(
    parts: Services, death: type[EngineDied], kind: type[Exception], status: int
) -> None:
    cast(Any, parts.engine).stream.die(death("The engine is gone."))
    with pytest.raises(kind, match="The engine is gone") as caught:
        asyncio.run(SequenceRun(parts, Target("tiny", None), PLAN).collect())
    assert status_of(caught.value) == status


def test_nothing_is_sent_to_an_engine_that_is_not_there() -> None:
    async def run() -> None:
        client = EngineClient(cast(Any, SimpleNamespace()))
        with pytest.raises(NeverSent):
            await anext(client.submit(Submit("r", (1,), Sampling(max_tokens=1), None)))

    asyncio.run(run())
