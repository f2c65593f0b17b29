"""One forward pass for everybody: steps that hold eight adapters, the base, chunks and decode tokens, and neighbours
that do not matter."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kernels.lora import ops as lora_ops
from tests.support.engine.engine_parity import (
    BASE,
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
from tests.support.models.tiny_models import FAMILIES, VOCAB_SIZE
from tests.tolerances import LOGITS, logits_bounds


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    return make_world("lfm2", tmp_path_factory.mktemp("lfm2"), device)


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(length))


def test_steps_hold_eight_adapters_the_base_chunks_and_decode_tokens_together(world: World) -> None:
    names = [BASE, *world.adapters]
    requests = [Request(f"{i}", names[i % 9], random_prompt(12 + 9 * (i // 9), i), 25) for i in range(27)]
    engine = build_engine(config_of(world, token_budget=64, max_sequences=24, num_rows=160))
    # They join a few at a time, so that the later ones prefill while the earlier ones decode.
    answers = run_engine(engine, [r.submit(world) for r in requests], joins_per_step=3)
    engine.close()
    mixed = [
        record
        for record in engine.step_records
        if set(record.adapters) == set(world.digests.values())
        and record.num_base_tokens > 0
        and record.num_prefill_tokens > 0
        and record.num_decode_tokens > 0
    ]
    assert mixed
    # Chunks, not whole prompts: somebody's prompt was cut at the end of the budget.
    assert any(record.num_tokens == 64 for record in mixed)
    oracle = Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)


def test_a_run_without_adapters_calls_no_lora_op(world: World) -> None:
    engine = build_engine(config_of(world, token_budget=32, max_sequences=8))
    base_only = [dataclasses.replace(request, adapter=BASE) for request in make_requests(world, 6)]
    before = lora_ops.call_count()
    run_engine(engine, [request.submit(world) for request in base_only])
    assert lora_ops.call_count() == before
    run_engine(engine, [Request("one", "mlp", (9, 8, 7), 2).submit(world)])
    assert lora_ops.call_count() > before
    engine.close()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}], ids=["greedy", "random"])
def test_tokens_do_not_change_when_the_neighbours_do(world: World, sampling: dict[str, float]) -> None:
    """The same requests alone and among different crowds, in a cache too small for all."""
    chosen = [Request(f"chosen-{a}", a, random_prompt(17, 1), 15) for a in (BASE, "all", "embedding", "rs")]
    crowds = [make_requests(world, count, seed=seed) for count, seed in ((0, 0), (9, 1), (12, 2))]
    outputs = []
    for crowd in crowds:
        answers = answers_of(
            world,
            [*crowd[::2], *chosen, *crowd[1::2]],
            sampling=sampling,
            token_budget=40,
            max_sequences=16,
            num_blocks=60,
            num_rows=160,
        )
        outputs.append([answers[request.name].tokens for request in chosen])
    assert outputs[0] == outputs[1] == outputs[2]


def test_prompt_logprobs_of_a_mixed_batch_are_those_of_peft(world: World) -> None:
    requests = [dataclasses.replace(r, max_tokens=0) for r in make_requests(world, 18)]
    answers = answers_of(
        world,
        requests,
        sampling={"prompt_logprobs": 3},
        token_budget=32,
        max_sequences=8,
        num_rows=160,
        max_prompt_logits=10,
    )
    oracle = Oracle(world)
    for request in requests:
        entries = answers[request.name].prompt_logprobs
        assert len(entries) == len(request.prompt)
        assert entries[0] is None
        expected = oracle.logits(request.adapter, request.prompt).log_softmax(-1)
        for entry, row, token in zip(entries[1:], expected, request.prompt[1:], strict=False):
            assert entry is not None
            assert entry.token_id == token
            assert abs(entry.logprob - float(row[token])) <= 2 * LOGITS[torch.float32]


def test_dynamic_rope_takes_the_scaling_of_each_requests_own_limit(
    tmp_path_factory: pytest.TempPathFactory, device: str
) -> None:
    """A finished sequence is as long as its request's limit, and transformers scales by the length of what it is given:
    every token and log probability, from the first on, is that of the finished sequence."""
    world = make_world(
        "llama",
        tmp_path_factory.mktemp("dynamic"),
        device,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    )
    requests = [
        Request(f"{i}", adapter, random_prompt(30, i), max_tokens)
        for i, (adapter, max_tokens) in enumerate([(BASE, 10), ("all", 34), (BASE, 100), ("rs", 150), ("mlp", 34)])
    ]
    answers = answers_of(world, requests, sampling={"logprobs": 0}, token_budget=32, max_sequences=8, num_rows=160)
    for request in requests:
        answer = answers[request.name]
        oracle = Oracle(world)  # a new one each time: transformers keeps the scaling of the longest sequence so far
        assert_greedy(oracle, request, answer.tokens)
        logits = oracle.logits(request.adapter, [*request.prompt, *answer.tokens])[len(request.prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(request.max_tokens), answer.tokens]
        told = torch.tensor([entry.logprob for entry in answer.logprobs])
        torch.testing.assert_close(told, expected, atol=2 * LOGITS[torch.float32], rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_within_the_tolerances(
    family: str, tmp_path_factory: pytest.TempPathFactory, device: str
) -> None:
    """Greedy tokens may part at near ties, so the log probabilities along the engine's own answers are compared."""
    world = make_world(family, tmp_path_factory.mktemp(family), device, dtype=torch.bfloat16)
    requests = make_requests(world)
    engine = build_engine(config_of(world, num_blocks=48, num_rows=160, token_budget=24, max_sequences=12))
    answers = run_engine(engine, [request.submit(world, logprobs=5) for request in requests])
    engine.close()
    assert engine.stats().num_preemptions > 0
    oracle = Oracle(world)
    differences = []
    for request in requests:
        answer = answers[request.name]
        assert len(answer.tokens) == request.max_tokens
        expected = oracle.logits(request.adapter, [*request.prompt, *answer.tokens]).log_softmax(-1)
        for entry, row in zip(answer.logprobs, expected[len(request.prompt) - 1 :], strict=False):
            tokens = [entry.token_id, *(token for token, _ in entry.top)]
            values = torch.tensor([entry.logprob, *(value for _, value in entry.top)])
            differences.append(values - row[tokens])
    difference = torch.cat(differences)
    largest, rms = logits_bounds(family, torch.bfloat16)
    assert float(difference.abs().max()) <= 2 * largest
    assert float(difference.square().mean().sqrt()) <= 2 * rms
