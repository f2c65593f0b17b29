"""A sequence between the engine and its reader: what is freed, and when."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernels.sampling.parameters import ScoredToken
from service.api.admission.model_resolution import Part, ResolvedModel
from service.api.admission.pipeline import Admitted, QueueSlots
from service.api.admission.plans import PlannedSequence
from service.api.admission.prompts import Prompt
from service.api.errors import BadRequest, EngineFailed, NotReady, QueueFull, status_of
from service.api.generation.job import GenerationJob
from service.api.generation.sequence import OutputChunk
from service.api.http.sse import encode_event
from service.api.metrics.metrics import Metrics
from service.api.queue_limits import logprob_shares
from service.api.routes.chat import ChatAnswer
from service.api.routes.completions import CompletionAnswer
from service.api.schema.requests import ChatRequest, CompletionRequest
from service.api.state import Services
from service.cluster.engines import Engines
from service.engine.ipc.client import EngineClient
from service.engine.ipc.link import EngineDied, EngineLink, NeverSent, TokenStream
from service.engine.ipc.messages import Finished, FromEngine, Sampling, Submit, Tokens
from service.fairness.client_identity import CLIENT
from service.tenants.keys_file import Limits
from service.tenants.limits import Tenant
from service.tenants.tenants import Tenants
from service.text.stop_strings import StopAutomaton, StopStrings
from service.text.tokenizer import TextTokenizer
from tests.support.models.tiny_models import make_tokenizer


class Streams:
    """An engine with the streams of its requests; notes what was aborted."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.streams: dict[str, TokenStream] = {}
        self.submitted: list[Submit] = []
        self.death: EngineDied | None = None

    def submit(self, request: Submit) -> TokenStream:
        self.submitted.append(request)
        stream = self.streams[request.request_id] = TokenStream(request.request_id, self.abort)
        if self.death is not None:
            stream.die(self.death)
        return stream

    def abort(self, request_id: str) -> None:
        if request_id not in self.aborted:
            self.aborted.append(request_id)


@pytest.fixture
def parts(tmp_path: Path) -> Services:
    """As much of `Services` as a sequence needs."""
    make_tokenizer(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    return cast(
        Services,
        SimpleNamespace(
            tokenizer=tokenizer,
            metrics=Metrics("tiny"),
            engine=Streams(),
            draining=False,
            base_digest="0",
            open_jobs={},
            used=lambda _name: None,
            logprobs=logprob_shares(100_000),
        ),
    )


class Slots:
    """What `Admitted` gives back."""

    def __init__(self) -> None:
        self.num_open, self.has_adapter = 0, True

    def acquire(self, num_slots: int, _client: str) -> None:
        self.num_open += num_slots

    def release(self, num_slots: int, _client: str) -> None:
        self.num_open -= num_slots

    def end_lease(self) -> None:
        assert self.has_adapter
        self.has_adapter = False


@pytest.fixture
def slots() -> Slots:
    return Slots()


def admitted(slots: Slots, plans: list[PlannedSequence], tenant: Tenant | None = None) -> Admitted:
    """A request that has its slots and an adapter."""
    version = SimpleNamespace(number=1, digest="d")
    record: Any = SimpleNamespace(
        name="tiny", digest="d", version=version, manifest=SimpleNamespace(rows={}, invocation=())
    )
    lease: Any = SimpleNamespace(release=slots.end_lease, record=record)
    tenant = tenant or Tenants().default
    held = QueueSlots(cast(Any, slots), tenant, "tiny", len(plans))
    charge = tenant.take_tokens(sum(plan.most_tokens for plan in plans))
    model = ResolvedModel("tiny", "tiny", "d", (Part(record, "tiny"),), (lease,))
    return Admitted(tenant, model, plans, held, charge)


def a_job(
    parts: Services,
    slots: Slots,
    plans: list[PlannedSequence],
    *,
    is_streamed: bool = True,
    tenant: Tenant | None = None,
) -> GenerationJob:
    return GenerationJob(parts, admitted(slots, plans, tenant), is_streamed)


def plan(request_id: str, stop: str = "the", **sampling: Any) -> PlannedSequence:
    return PlannedSequence(
        request_id, Prompt((1,), ""), Sampling(max_tokens=100, **sampling), StopAutomaton([stop]), True, False
    )


async def pieces_of(job: GenerationJob) -> AsyncIterator[tuple[int, OutputChunk]]:
    """(choice, piece) as they come."""
    news = asyncio.Event()
    job.listen(news.set)
    while not job.is_finished:
        news.clear()
        while (one := job.poll()) is not None:
            yield one
        if not job.is_finished:
            await news.wait()


async def streamed(job: GenerationJob) -> list[tuple[int, str, str | None]]:
    """(choice, text, finish_reason) of what comes."""
    return [(index, piece.text, piece.finish_reason) async for index, piece in pieces_of(job)]


PIECES = (
    OutputChunk("one", token_ids=[1]),
    OutputChunk('"two"\\\n', token_ids=[2]),
    OutputChunk("", token_ids=[3]),
    OutputChunk("dr\u00f6i \U0001f642", token_ids=[4]),
    OutputChunk("three", finish_reason="stop", stop_reason=7),
)


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_events_encoded_around_their_text_are_those_encoded_whole(parts: Services, kind: str) -> None:
    """An event that tells the usage so far is encoded whole."""

    def said(suffix: str, **options: bool) -> tuple[list[bytes], int]:
        plans = [plan(f"{index}{suffix}") for index in range(2)]
        asked: dict[str, Any] = {
            "model": "tiny",
            "stream": True,
            "n": 2,
            "stream_options": {"include_usage": True, **options},
        }
        answer: CompletionAnswer | ChatAnswer = (
            CompletionAnswer(parts, CompletionRequest(prompt="a", **asked), admitted(Slots(), plans))
            if kind == "completion"
            else ChatAnswer(
                parts,
                ChatRequest(messages=cast(Any, [{"role": "user", "content": "a"}]), **asked),
                admitted(Slots(), plans),
            )
        )
        try:
            chunks = [chunk for piece in PIECES for index in (1, 0) for chunk in answer.added(index, piece)]
        finally:
            answer.job.close()
        num_around = sum(isinstance(chunk, bytes) for chunk in chunks)
        events = [chunk if isinstance(chunk, bytes) else encode_event(chunk) for chunk in chunks]
        return [
            re.sub(rb'"id":"[^"]*"|"created":\d+|,"usage":{(?:[^{}]|{[^{}]*})*}', b"", event) for event in events
        ], num_around

    around, num_around = said("a")
    whole, num_none = said("w", continuous_usage_stats=True)
    assert around == whole and len(around) == 8
    assert (num_around, num_none) == (4 if kind == "completion" else 6, 0)


def test_a_stop_string_ends_the_engine_s_work_although_nobody_reads(parts: Services, slots: Slots) -> None:
    engine = cast(Any, parts.engine)
    job = a_job(parts, slots, [plan("r")])
    engine.streams["r"].push(Tokens("r", tuple(parts.tokenizer.encode("the")), None))
    assert (engine.aborted, slots.num_open, slots.has_adapter) == (["r"], 0, False)
    assert asyncio.run(streamed(job)) == [(0, "", "stop")]
    job.close()
    assert engine.aborted == ["r"]


def test_who_takes_what_comes_at_once_hears_the_end_too(parts: Services, slots: Slots) -> None:
    job, taken = a_job(parts, slots, [plan("r")]), list[tuple[int, OutputChunk] | None]()
    job.listen(lambda: taken.append(job.poll()))
    stream = cast(Any, parts.engine).streams["r"]
    stream.push(Tokens("r", tuple(parts.tokenizer.encode("a"))))
    stream.push(Finished("r", "length"))
    assert [one and one[1].finish_reason for one in taken] == [None, "length"]
    assert (job.is_finished, job.outcomes, slots.num_open, slots.has_adapter) == (True, ["length"], 0, False)


def test_the_engine_is_told_whose_a_sequence_is_and_unused_tokens_come_back(parts: Services, slots: Slots) -> None:
    tenant = Tenant("acme", Limits(weight=2.5, tokens_per_minute=1000, requests_in_flight=5), lambda: 0.0)
    engine = cast(Any, parts.engine)
    job = a_job(parts, slots, [plan("a"), plan("b")], tenant=tenant)
    assert [(one.tenant, one.weight) for one in engine.submitted] == [("acme", 2.5)] * 2

    def left() -> tuple[str, str]:
        headers = tenant.headers()
        return headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]

    assert left() == ("3", str(1000 - 2 * 101))
    for token_id in parts.tokenizer.encode("in and"):
        engine.streams["a"].push(Tokens("a", (token_id,)))
    engine.streams["a"].push(Finished("a", "length"))
    num_generated = len(parts.tokenizer.encode("in and"))
    assert left() == ("4", str(1000 - (1 + num_generated) - 101))
    job.close()
    assert left() == ("5", str(1000 - (1 + num_generated) - 1)), "the prompt may have been computed"


def test_what_nobody_reads_gives_its_places_back_as_it_ends(parts: Services, slots: Slots) -> None:
    engine = cast(Any, parts.engine)
    job = a_job(parts, slots, [plan("a"), plan("b"), plan("c")])
    tokens = tuple(parts.tokenizer.encode("in and"))
    for num_ended, name in enumerate("bac"):
        assert (slots.num_open, slots.has_adapter) == (3 - num_ended, True)
        for token_id in tokens:
            engine.streams[name].push(Tokens(name, (token_id,)))
        engine.streams[name].push(Finished(name, "length"))
    assert (slots.num_open, slots.has_adapter) == (0, False)
    assert asyncio.run(streamed(job)) == [(1, "in and", "length"), (0, "in and", "length"), (2, "in and", "length")]
    job.close()
    assert slots.num_open == 0


@pytest.mark.parametrize("num_begun", [0, 1])
def test_what_is_closed_early_gives_back_what_it_still_holds(parts: Services, slots: Slots, num_begun: int) -> None:
    engine = cast(Any, parts.engine)
    job = a_job(parts, slots, [plan("a"), plan("b")])
    for name in "ab"[:num_begun]:
        engine.streams[name].push(Finished(name, "length"))
    job.close()
    job.close()
    assert (slots.num_open, slots.has_adapter) == (0, False)
    assert set("ab"[num_begun:]) <= set(engine.aborted)


def test_what_is_closed_is_gone_with_who_had_it(parts: Services, slots: Slots) -> None:
    """Python's collector has nothing to do: of a few hundred requests that end together it would make one stretch."""
    job = a_job(parts, slots, [plan("a"), plan("b")])
    job.listen(job.poll)
    cast(Any, parts.engine).streams["a"].push(Finished("a", "length"))
    left = [weakref.ref(one) for one in (job, *job.runs)]
    gc.disable()
    try:
        job.close()
        cast(Any, parts.engine).streams.clear()
        del job
        assert [one() for one in left] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_what_waits_for_a_stream_s_reader_is_bounded(
    parts: Services, slots: Slots, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr("service.api.generation.sequence.MAX_WAITING_ENTRIES", 12)
    engine = cast(Any, parts.engine)
    job = a_job(parts, slots, [plan("r", logprobs=2)], is_streamed=is_streamed)
    (token_id,) = parts.tokenizer.encode("a")
    entry = ScoredToken(token_id, -1.0, ((token_id, -1.0), (token_id + 1, -2.0)))
    for _ in range(5):
        engine.streams["r"].push(Tokens("r", (token_id,), (entry,)))
    assert (slots.num_open, engine.aborted) == ((0, ["r"]) if is_streamed else (1, []))
    if is_streamed:
        with pytest.raises(BadRequest, match="More than 12 tokens"):
            asyncio.run(streamed(job))
    else:
        engine.streams["r"].push(Finished("r", "length"))
        assert asyncio.run(job.collect())[0].text == "aaaaa"


def test_a_reader_that_keeps_up_may_have_as_much_as_comes(
    parts: Services, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.generation.sequence.MAX_WAITING_ENTRIES", 2)
    stream = cast(Any, parts.engine).streams
    job = a_job(parts, slots, [plan("r")])
    (token_id,) = parts.tokenizer.encode("a")

    async def run() -> None:
        stream["r"].push(Tokens("r", (token_id,)))
        text = ""
        async for _, piece in pieces_of(job):
            text += piece.text
            if len(text) == 9:
                stream["r"].push(Finished("r", "length"))
            elif piece.finish_reason is None:
                stream["r"].push(Tokens("r", (token_id,)))
        assert text == "a" * 9

    asyncio.run(run())


class TestHeldLogprobs:
    """Log probabilities count from when they come until their client has them."""

    @staticmethod
    def say(parts: Services, *request_ids: str) -> None:
        """Three of them for each."""
        entry = ScoredToken(65, -1.0, ((65, -1.0), (66, -2.0)))
        for request_id in request_ids:
            cast(Any, parts.engine).streams[request_id].push(Tokens(request_id, (65,), (entry,)))

    def test_those_of_a_whole_answer_count_until_it_is_sent(self, parts: Services, slots: Slots) -> None:
        job = a_job(parts, slots, [plan("a", logprobs=2), plan("b", logprobs=2)], is_streamed=False)
        prompt_entries = (None, ScoredToken(1, -1.0, ((1, -1.0), (2, -2.0))))
        cast(Any, parts.engine).streams["a"].push(Tokens("a", (), (), prompt_entries))
        self.say(parts, "a", "b", "a")
        for name in "ab":
            cast(Any, parts.engine).streams[name].push(Finished(name, "length"))
        asyncio.run(job.collect())
        sent = job.hand_over()
        job.close()
        assert parts.logprobs.num_held == 12
        sent()
        assert parts.logprobs.num_held == 0

    def test_those_of_an_answer_that_nobody_gets_do_not(self, parts: Services, slots: Slots) -> None:
        job = a_job(parts, slots, [plan("a", logprobs=2)], is_streamed=False)
        self.say(parts, "a")
        job.close()
        assert parts.logprobs.num_held == 0

    @pytest.mark.parametrize(("keeps", "num_held"), [(False, 3), (True, 9)])
    def test_those_of_a_stream_count_while_they_wait(
        self, parts: Services, slots: Slots, keeps: bool, num_held: int
    ) -> None:
        job = GenerationJob(parts, admitted(slots, [plan("a", logprobs=2)]), True, keeps_logprobs=keeps)
        self.say(parts, "a", "a")
        assert job.poll() is not None
        self.say(parts, "a")
        assert parts.logprobs.num_held == num_held
        job.close()
        assert parts.logprobs.num_held == 0

    @pytest.mark.parametrize("is_streamed", [False, True])
    def test_more_than_its_payer_may_hold_end_an_answer(self, parts: Services, slots: Slots, is_streamed: bool) -> None:
        parts.logprobs = logprob_shares(8)
        job = a_job(parts, slots, [plan("a", logprobs=2), plan("b", logprobs=2)], is_streamed=is_streamed)
        self.say(parts, "a", "b", "a")
        for name in "ba":
            cast(Any, parts.engine).streams[name].push(Finished(name, "length"))
        with pytest.raises(QueueFull, match="hold 6 log probabilities, of which you have 6") as caught:
            asyncio.run(streamed(job) if is_streamed else job.collect())
        assert (status_of(caught.value), caught.value.headers["Retry-After"]) == (429, "1")
        job.close()
        assert (parts.logprobs.num_held, slots.num_open, set(cast(Any, parts.engine).aborted)) == (0, 0, {"a", "b"})

    def test_one_payer_leaves_some_for_another(self, parts: Services) -> None:
        parts.logprobs = logprob_shares(8)
        whole = CLIENT.set("hog")
        job = a_job(parts, Slots(), [plan("a", logprobs=2)], is_streamed=False)
        self.say(parts, "a", "a")
        CLIENT.reset(whole)
        other = a_job(parts, Slots(), [plan("b", logprobs=2)], is_streamed=False)
        self.say(parts, "b")
        cast(Any, parts.engine).streams["b"].push(Finished("b", "length"))
        assert len(asyncio.run(other.collect())[0].logprobs) == 1
        other.close()
        job.close()

    def test_what_begins_anew_counts_once(self, parts: Services, slots: Slots) -> None:
        links = _two_engines(parts)
        job = a_job(parts, slots, [plan("r", logprobs=2)], is_streamed=False)
        entry = ScoredToken(65, -1.0, ((65, -1.0), (66, -2.0)))
        lost = _who_has_one(parts)
        links[lost].says(Tokens("r", (65,), (entry,)))
        links[lost].kill()
        links[_who_has_one(parts)].says(Tokens("r", (65,), (entry,)))
        assert parts.logprobs.num_held == 3
        job.close()
        assert parts.logprobs.num_held == 0


@pytest.mark.parametrize(("death", "kind", "status"), [(EngineDied, EngineFailed, 500), (NeverSent, NotReady, 503)])
@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_only_what_was_sent_is_lost(
    parts: Services,
    slots: Slots,
    death: type[EngineDied],
    kind: type[Exception],
    status: int,
    is_early: bool,
    is_streamed: bool,
) -> None:
    engine = cast(Any, parts.engine)
    error = death("The engine is gone.")
    if is_early:
        engine.death = error
    job = a_job(parts, slots, [plan("r"), plan("other")], is_streamed=is_streamed)
    if not is_early:
        engine.streams["r"].die(error)
    with pytest.raises(kind, match="The engine is gone") as caught:
        asyncio.run(cast(Any, streamed(job) if is_streamed else job.collect()))
    assert status_of(caught.value) == status
    job.close()
    assert (slots.num_open, slots.has_adapter) == (0, False)


def test_what_is_wrong_with_us_reaches_the_reader_and_not_the_engine_s_client(
    parts: Services, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(parts, slots, [plan("r")])
    monkeypatch.setattr(StopStrings, "push", lambda *_, **__: 1 / 0)
    cast(Any, parts.engine).streams["r"].push(Tokens("r", (5,)))
    assert slots.num_open == 0
    with pytest.raises(ZeroDivisionError):
        asyncio.run(streamed(job))


def test_nothing_is_sent_to_an_engine_that_is_not_there() -> None:
    async def run() -> None:
        client = EngineClient(cast(Any, SimpleNamespace()))
        with pytest.raises(NeverSent):
            await anext(client.submit(Submit("r", (1,), Sampling(max_tokens=1), None)))

    asyncio.run(run())


class Link(EngineLink):
    """One of several engines, which says what it is told to say."""

    def __init__(self) -> None:
        super().__init__()
        self.state = "ready"

    async def start(self) -> None:
        """It is there."""

    async def drain(self, limit_seconds: float) -> None:
        """Nothing is to be let go."""

    async def close(self) -> None:
        """Likewise."""

    def kill(self) -> None:
        """It is lost, with all its requests."""
        self.state = "restarting"
        self._lose_all("It was killed.")

    def says(self, message: FromEngine) -> None:
        self._take(message)


def _two_engines(parts: Services) -> dict[str, Link]:
    links = [Link(), Link()]
    engines = Engines(links)
    cast(Any, parts).engine = engines
    return dict(zip(engines.replicas(), links, strict=True))


def _who_has_one(parts: Services) -> str:
    (name,) = [name for name, one in parts.engine.replicas().items() if one.num_open]
    return name


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_answer_of_which_nothing_was_told_begins_anew_elsewhere(
    parts: Services, slots: Slots, is_streamed: bool
) -> None:
    """All of it, and what the lost engine had computed is no part of it."""
    links = _two_engines(parts)
    job = a_job(parts, slots, [plan("r")], is_streamed=is_streamed)
    lost = _who_has_one(parts)
    for token_id in parts.tokenizer.encode("in th"):  # the beginning of what ends the answer
        links[lost].says(Tokens("r", (token_id,)))
    links[lost].kill()
    other = _who_has_one(parts)
    assert other != lost
    tokens = parts.tokenizer.encode("e and")
    for token_id in tokens:
        links[other].says(Tokens("r", (token_id,)))
    links[other].says(Finished("r", "length"))
    if is_streamed:
        assert asyncio.run(streamed(job)) == [(0, "e and", "length")]
    else:
        (piece,) = asyncio.run(job.collect())
        assert (piece.text, piece.token_ids, piece.text_offsets[0]) == ("e and", list(tokens), 0)
    assert job.num_completion_tokens == len(tokens)
    assert (slots.num_open, slots.has_adapter) == (0, False)
    assert parts.engine.replicas()[lost].num_sent_again == 1


def test_a_stream_of_which_something_was_told_ends(parts: Services, slots: Slots) -> None:
    links = _two_engines(parts)
    job = a_job(parts, slots, [plan("r")])
    lost = _who_has_one(parts)
    links[lost].says(Tokens("r", tuple(parts.tokenizer.encode("in"))))

    async def read() -> str:
        pieces = pieces_of(job)
        _, piece = await anext(pieces)
        links[lost].kill()
        with pytest.raises(EngineFailed, match="It was killed"):
            await anext(pieces)
        return piece.text

    assert asyncio.run(read()) == "in"


def test_an_answer_is_begun_anew_once(parts: Services, slots: Slots) -> None:
    links = _two_engines(parts)
    job = a_job(parts, slots, [plan("r")], is_streamed=False)
    for _ in range(2):
        name = _who_has_one(parts)
        links[name].says(Tokens("r", tuple(parts.tokenizer.encode("in"))))
        links[name].kill()
        links[name].state = "ready"
    with pytest.raises(EngineFailed, match="It was killed"):
        asyncio.run(job.collect())
