"""Mixed batches under small budgets against transformers + PEFT, for every family, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from service.engine.step_records import StepRecord
from tests.support.engine.engine_parity import (
    BASE,
    Answer,
    Oracle,
    Request,
    World,
    answers_of,
    assert_greedy,
    build_engine,
    config_of,
    make_requests,
    make_world,
    run_engine,
)
from tests.support.models.tiny_models import FAMILIES
from tests.tolerances import LOGITS


@dataclass(frozen=True)
class Run:
    """One run of all requests through an engine with small budgets, and the oracle for it."""

    world: World
    requests: list[Request]
    answers: dict[str, Answer]
    records: list[StepRecord]
    num_preemptions: int
    num_evictions: int
    oracle: Oracle

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: answer.tokens for name, answer in self.answers.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> Run:
    world = make_world(request.param, tmp_path_factory.mktemp(request.param), device)
    requests = make_requests(world)
    # 48 blocks of 4 tokens hold about three of these requests at their end; twelve may run; a step takes 24 tokens.
    engine = build_engine(config_of(world, num_blocks=48, num_rows=160, token_budget=24, max_sequences=12))
    submits = [r.submit(world, logprobs=5) for r in requests]
    answers = run_engine(engine, submits, joins_per_step=2)
    engine.close()
    stats = engine.stats()
    assert stats.num_adapter_loads >= len(world.adapters)
    return Run(
        world,
        requests,
        answers,
        list(engine.step_records),
        stats.num_preemptions,
        stats.num_adapter_evictions,
        Oracle(world),
    )


def test_greedy_tokens_are_those_of_unmerged_peft(run: Run) -> None:
    assert len(run.requests) == 24
    for request in run.requests:
        assert_greedy(run.oracle, request, run.answers[request.name].tokens)


def test_greedy_tokens_are_those_of_merged_weights(run: Run) -> None:
    for request in run.requests:
        if request.adapter not in run.world.tied_targets:
            assert_greedy(run.oracle, request, run.answers[request.name].tokens, merged=request.adapter != BASE)


def test_log_probabilities_agree_with_peft(run: Run) -> None:
    assert_log_probabilities(run, run.answers)


def assert_log_probabilities(run: Run, answers: dict[str, Answer]) -> None:
    for request in run.requests:
        answer = answers[request.name]
        expected = run.oracle.logits(request.adapter, [*request.prompt, *answer.tokens]).log_softmax(-1)
        for entry, row in zip(answer.logprobs, expected[len(request.prompt) - 1 :], strict=False):
            tokens = [entry.token_id, *(token for token, _ in entry.top)]
            values = torch.tensor([entry.logprob, *(value for _, value in entry.top)])
            torch.testing.assert_close(values, row[tokens], rtol=0, atol=2 * LOGITS[torch.float32])


def test_each_adapter_changes_the_output_and_all_differ(run: Run) -> None:
    first_round = run.requests[:9]
    assert len({request.prompt for request in first_round}) == 1
    assert {request.adapter for request in first_round} == {BASE, *run.world.adapters}
    outputs = {tuple(run.answers[request.name].tokens[:8]) for request in first_round}
    assert len(outputs) == 9


def test_the_run_was_as_hard_as_it_claims(run: Run) -> None:
    assert run.num_preemptions > 0
    chunked = [r for r in run.records if r.num_prefill_tokens > 0 and r.num_decode_tokens > 0]
    assert chunked, "prefill chunks beside decode tokens"
    assert max(r.num_tokens for r in run.records) == 24
    assert len(run.records) > 24, "prompts of up to 60 tokens needed several steps"
    counts = [r.num_sequences for r in run.records]
    assert any(a < b for a, b in pairwise(counts)), "requests joined"
    assert any(a > b for a, b in pairwise(counts)), "requests left"
    assert any(len(r.adapters) >= 5 and r.num_base_tokens for r in run.records)


def test_large_budgets_and_all_at_once_give_the_same_tokens_as_peft(run: Run) -> None:
    """All 24 requests, all eight adapters and the base in one step."""
    engine = build_engine(config_of(run.world, token_budget=2048, max_sequences=32, num_rows=160))
    for request in run.requests[: len(run.world.adapters) + 1]:  # have them all on the device
        run_engine(engine, [Request(request.name, request.adapter, (1,), 1).submit(run.world)])
    answers = run_engine(engine, [request.submit(run.world, logprobs=5) for request in run.requests])
    engine.close()
    assert any(
        (record.num_sequences, len(record.adapters), record.num_base_tokens > 0) == (24, 8, True)
        for record in engine.step_records
    )
    assert {name: answer.tokens for name, answer in answers.items()} == run.tokens
    assert_log_probabilities(run, answers)


def test_rows_for_two_adapters_at_a_time_give_the_same_tokens(run: Run) -> None:
    sizes = {"num_rows": 48, "num_embedding_rows": 16}
    engine = build_engine(
        config_of(run.world, **sizes, token_budget=64, max_sequences=16, max_steps_waiting_for_rows=4)
    )
    answers = run_engine(engine, [r.submit(run.world) for r in run.requests])
    engine.close()
    assert {name: answer.tokens for name, answer in answers.items()} == run.tokens
    stats = engine.stats()
    assert stats.num_adapter_evictions > 0


def test_each_request_alone_gives_the_same_tokens(run: Run) -> None:
    engine = build_engine(config_of(run.world, token_budget=512, max_sequences=1, num_rows=160))
    for request in run.requests[:12]:
        answer = run_engine(engine, [request.submit(run.world)])[request.name]
        assert answer.tokens == run.answers[request.name].tokens
    engine.close()


def test_a_step_in_flight_changes_no_token(run: Run) -> None:
    """The same small budgets, so that sequences are preempted and adapters evicted, each way of the two."""
    overlaps = run.world.device == "cpu"  # the other way is the device's own
    sizes = {"num_blocks": 48, "num_rows": 160, "token_budget": 24, "max_sequences": 12}
    engine = build_engine(config_of(run.world, **sizes, overlap=overlaps))
    answers = run_engine(engine, [r.submit(run.world, logprobs=5) for r in run.requests], joins_per_step=2)
    engine.close()
    assert engine.stats().num_preemptions > 0
    assert {name: answer.tokens for name, answer in answers.items()} == run.tokens
    assert_log_probabilities(run, answers)


def test_decode_equals_prefill(run: Run) -> None:
    """The log probabilities of an answer, decoded token by token, are those of the same text as a prompt."""
    tails = [
        Request(request.name, request.adapter, (*request.prompt, *run.answers[request.name].tokens), 0)
        for request in run.requests[:12]
    ]
    answers = answers_of(
        run.world, tails, sampling={"prompt_logprobs": 0}, token_budget=64, max_sequences=8, num_rows=160
    )
    for request in run.requests[:12]:
        whole = answers[request.name].prompt_logprobs
        assert whole[0] is None
        prefilled = [entry.logprob for entry in whole[len(request.prompt) :] if entry is not None]
        decoded = [entry.logprob for entry in run.answers[request.name].logprobs]
        torch.testing.assert_close(
            torch.tensor(prefilled), torch.tensor(decoded), rtol=0, atol=2 * LOGITS[torch.float32]
        )
