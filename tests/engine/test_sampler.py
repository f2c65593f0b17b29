"""Sampling on the host and on a device against definitions written out plainly, one row at a time.

The device's sampler runs on CPU tensors here.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from service.engine import device_sampler, sampler
from service.engine.messages import Sampling, TokenLogprob
from service.engine.penalties import TokenCounts
from service.engine.sampler import Choice, RowRequest, uniform
from service.engine.sampling_plan import LogprobRow, arrays_of, plan_of, read
from service.engine.staging import Staging

VOCAB = 600

Sample = Callable[[torch.Tensor, Sequence[RowRequest]], list[Choice]]


def answer_on_device(
    logits: torch.Tensor, rows: Sequence[int], requests: Sequence[RowRequest], given: Sequence[LogprobRow]
) -> tuple[list[Choice], list[TokenLogprob]]:
    plan = plan_of(rows, requests, given, logits.shape[1])
    tensors = Staging(logits.device).upload(arrays_of(plan))
    return read(device_sampler.launch(logits, plan, tensors), plan)


def sample_on_device(logits: torch.Tensor, requests: Sequence[RowRequest]) -> list[Choice]:
    return answer_on_device(logits, range(len(requests)), requests, [])[0]


@pytest.fixture(params=["host", "device"])
def sample(request: pytest.FixtureRequest) -> Sample:
    return sampler.sample if request.param == "host" else sample_on_device


def row_request(index: int = 0, *, barred: frozenset[int] = frozenset(), seed: int = 1, **fields: Any) -> RowRequest:
    return RowRequest(Sampling(max_tokens=100, **fields), seed=seed, index=index, barred=barred)


def random_logits(num_rows: int, *, seed: int = 0, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def tokens_of(choices: list[Choice]) -> list[int | None]:
    return [choice.token_id for choice in choices]


def kept_tokens(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """The reference: the distribution after temperature, min_p, top_k, top_p of one row, as token -> probability."""
    probs = (logits.double() / sampling.temperature).softmax(-1).tolist()
    ranked = sorted(enumerate(probs), key=lambda pair: -pair[1])
    ranked = [pair for pair in ranked if pair[1] >= sampling.min_p * ranked[0][1]]
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    total = sum(prob for _, prob in ranked)
    kept: list[tuple[int, float]] = []
    before = 0.0
    for token, prob in ranked:
        if before >= sampling.top_p * total and kept:
            break
        kept.append((token, prob))
        before += prob
    mass = sum(prob for _, prob in kept)
    return {token: prob / mass for token, prob in kept}


def drawn_tokens(sample: Sample, logits: torch.Tensor, num_draws: int, **fields: Any) -> Counter[int | None]:
    """Draws of one row, as tokens 0, 1, 2, ... of one request, in one batch."""
    requests = [row_request(index, **fields) for index in range(num_draws)]
    return Counter(tokens_of(sample(logits.repeat(num_draws, 1), requests)))


def test_temperature_zero_takes_the_most_likely_token(sample: Sample) -> None:
    logits = random_logits(5)
    expected = logits.argmax(-1).tolist()
    assert tokens_of(sample(logits, [row_request(temperature=0.0)] * 5)) == expected


FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "large_top_k": {"top_k": 300},
    "top_k_beyond_the_vocabulary": {"top_k": 9999, "temperature": 0.2},
    "top_p": {"top_p": 0.6},
    "flat_top_p": {"top_p": 0.97, "temperature": 5.0},
    "min_p": {"min_p": 0.2},
    "tiny_min_p": {"min_p": 1e-9, "top_p": 0.9},
    "all": {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    "tiny_top_p": {"top_p": 1e-6},
}


@pytest.mark.parametrize("fields", FILTERS.values(), ids=FILTERS.keys())
def test_draws_follow_the_filtered_distribution(sample: Sample, fields: dict[str, Any]) -> None:
    logits = random_logits(1, seed=3)[0]
    expected = kept_tokens(logits, Sampling(max_tokens=1, **fields))
    num_draws = 1000
    drawn = drawn_tokens(sample, logits, num_draws, **fields)
    assert set(drawn) <= set(expected)
    # Fixed seeds, so this is no matter of luck; six standard deviations of a binomial count.
    for token, prob in expected.items():
        tolerance = 6 * math.sqrt(num_draws * prob * (1 - prob)) + 1e-9
        assert abs(drawn[token] - num_draws * prob) <= max(tolerance, 6.0), token


def test_a_row_does_not_depend_on_its_neighbours(sample: Sample) -> None:
    logits = random_logits(6, seed=5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.7},
        {"top_k": 3, "logprobs": 2},
        {"min_p": 0.1, "repetition_penalty": 1.0},
        {"logit_bias": {3: 50.0}},
    ]
    requests = [row_request(index, seed=index, **kind) for index, kind in enumerate(kinds)]
    together = sample(logits.clone(), requests)
    alone = [sample(logits[i : i + 1].clone(), [request])[0] for i, request in enumerate(requests)]
    assert tokens_of(together) == tokens_of(alone)
    assert [choice.logprob is None for choice in together] == [choice.logprob is None for choice in alone]


def test_the_random_stream_depends_on_seed_and_index() -> None:
    numbers = {uniform(seed, index) for seed in range(50) for index in range(50)}
    assert len(numbers) == 2500
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / 2500 - 0.5) < 0.02
    assert uniform(7, 3) == uniform(7, 3)
    assert uniform(-1, 0) != uniform(1, 0)


def counts_of(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token in output:
        counts.add(token)
    return counts


def test_penalties_are_those_of_their_definition(sample: Sample) -> None:
    logits = random_logits(2, seed=8, vocab=40)
    prompt, output = [1, 2, 2, 3], [3, 4, 4, 4]
    sampling = Sampling(
        max_tokens=9, temperature=0.0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3
    )
    expected = logits[0].clone()
    for token in {*prompt, *output}:
        value = float(expected[token])
        value = value / 1.7 if value > 0 else value * 1.7
        expected[token] = value - 0.3 * output.count(token) - 0.4 * (token in output)
    neighbour = logits[1].clone()
    sample(logits, [RowRequest(sampling, 1, 0, counts=counts_of(prompt, output)), row_request(temperature=0.0)])
    torch.testing.assert_close(logits[0], expected)
    assert torch.equal(logits[1], neighbour)


def test_counts_grow_with_many_distinct_tokens() -> None:
    output = [*range(200), *range(100)]
    counts = counts_of([5, 5], output)
    assert dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True)) == Counter(output)


def test_logit_bias_is_added_before_the_choice(sample: Sample) -> None:
    logits = random_logits(3)
    requests = [
        row_request(temperature=0.0, logit_bias={17: 100.0}),
        row_request(temperature=1.0, logit_bias={18: 100.0}),
        row_request(temperature=0.0),
    ]
    untouched = int(logits[2].argmax())
    assert tokens_of(sample(logits, requests)) == [17, 18, untouched]
    close = torch.tensor([[0.0, 2.0, 2.5]])
    assert tokens_of(sample(close, [row_request(temperature=0.0, logit_bias={1: 1.0})])) == [1]


def test_barred_tokens_are_never_chosen(sample: Sample) -> None:
    logits = random_logits(2)
    best = int(logits[0].argmax())
    logits[1] = logits[0]
    chosen = tokens_of(
        sample(logits, [row_request(temperature=0.0, barred=frozenset({best})), row_request(temperature=0.0)])
    )
    assert chosen[0] != best
    assert chosen[1] == best


def test_logprobs_are_of_the_models_own_distribution(sample: Sample) -> None:
    logits = random_logits(2, seed=4)
    expected = logits.double().log_softmax(-1)
    request = row_request(temperature=0.5, top_k=4, logprobs=3, logit_bias={9: 100.0})
    other, chosen = sample(logits.clone(), [row_request(), request])
    assert other.logprob is None
    assert chosen.logprob is not None
    assert chosen.logprob.token_id == chosen.token_id == 9
    assert chosen.logprob.logprob == pytest.approx(float(expected[1, 9]), abs=1e-5)
    values, tokens = expected[1].topk(3)
    assert [token for token, _ in chosen.logprob.top] == tokens.tolist()
    assert [value for _, value in chosen.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_zero_gives_the_chosen_token_alone(sample: Sample) -> None:
    (choice,) = sample(random_logits(1), [row_request(temperature=0.0, logprobs=0)])
    assert choice.logprob is not None
    assert choice.logprob.top == ()


def test_prompt_logprobs_of_given_tokens() -> None:
    logits = random_logits(3, seed=6)
    expected = logits.double().log_softmax(-1)
    given = [LogprobRow(row, 2, 5 + row) for row in range(3)]
    for found in (sampler.token_logprobs(logits, [5, 6, 7], 2), answer_on_device(logits, [], [], given)[1]):
        assert [entry.token_id for entry in found] == [5, 6, 7]
        logprobs = [entry.logprob for entry in found]
        assert logprobs == pytest.approx([float(expected[i, 5 + i]) for i in range(3)], abs=1e-5)
        assert [len(entry.top) for entry in found] == [2, 2, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_has_no_token_and_spoils_no_other(
    sample: Sample, bad: float, temperature: float
) -> None:
    logits = random_logits(3)
    expected = int(logits[2].argmax())
    logits[0, :] = bad
    requests = [row_request(temperature=temperature, top_p=0.9), row_request(), row_request(temperature=0.0)]
    chosen = tokens_of(sample(logits, requests))
    assert chosen[0] is None
    assert chosen[1] is not None
    assert chosen[2] == expected


def test_a_tiny_temperature_is_as_good_as_zero(sample: Sample) -> None:
    logits = random_logits(1) * 1e4
    expected = int(logits[0].argmax())
    assert drawn_tokens(sample, logits[0], 20, temperature=1e-7) == {expected: 20}


def mixed_requests(rng: random.Random, num_rows: int) -> list[RowRequest]:
    """One request per row with everything that a request may ask for."""
    requests = []
    for row in range(num_rows):
        fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.0, 2.0])}
        for name, values in {
            "top_k": [3, 50, 5000],
            "top_p": [0.3, 0.9],
            "min_p": [0.01, 0.3],
            "logprobs": [0, 4],
            "logit_bias": [{rng.randrange(VOCAB): 3.0, rng.randrange(VOCAB): -100.0}],
            "frequency_penalty": [0.5],
            "repetition_penalty": [1.3],
        }.items():
            if rng.random() < 0.4:
                fields[name] = rng.choice(values)
        sampling = Sampling(max_tokens=100, **fields)
        counts = counts_of([rng.randrange(VOCAB) for _ in range(9)], [rng.randrange(VOCAB) for _ in range(9)])
        barred = frozenset(rng.sample(range(VOCAB), 3)) if rng.random() < 0.3 else frozenset()
        requests.append(RowRequest(sampling, rng.randrange(10**9), row, barred, counts if rng.random() < 0.4 else None))
    return requests


def test_host_and_device_choose_the_same_tokens() -> None:
    """Same numbers, same cuts: rounding alone could let a choice differ, at one draw in a hundred thousand."""
    rng = random.Random(5)
    for step in range(40):
        logits = random_logits(12, seed=step)
        requests = mixed_requests(rng, 12)
        on_host = sampler.sample(logits.clone(), requests)
        on_device = sample_on_device(logits.clone(), requests)
        assert tokens_of(on_device) == tokens_of(on_host), step
        for ours, theirs in zip(on_device, on_host, strict=True):
            assert (ours.logprob is None) == (theirs.logprob is None)
            if ours.logprob is not None and theirs.logprob is not None:
                assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-5)
                assert [token for token, _ in ours.logprob.top] == [token for token, _ in theirs.logprob.top]


def test_a_device_is_waited_for_once_and_asked_for_some_rows_only() -> None:
    """Rows in the middle of the logits get tokens, others prompt log probabilities, all from one answer."""
    logits = random_logits(7, seed=11)
    untouched = logits.clone()
    requests = [row_request(temperature=0.0, logprobs=1), row_request(3, logit_bias={4: 60.0})]
    given = [LogprobRow(0, 3, 17), LogprobRow(1, 0, 18)]
    choices, prompt = answer_on_device(logits, [2, 6], requests, given)
    assert tokens_of(choices) == [int(untouched[2].argmax()), 4]
    assert choices[0].logprob is not None
    assert choices[0].logprob.logprob == pytest.approx(float(untouched[2].log_softmax(-1).max()), abs=1e-5)
    assert [entry.token_id for entry in prompt] == [17, 18]
    assert [len(entry.top) for entry in prompt] == [3, 0]
    for row, entry in enumerate(prompt):
        assert entry.logprob == pytest.approx(float(untouched[row].log_softmax(-1)[17 + row]), abs=1e-5)


@pytest.mark.parametrize("vocab", [5, 128, 129, 1000])
def test_a_device_never_picks_a_token_of_weight_zero(vocab: int) -> None:
    weights = torch.zeros(3, vocab)
    weights[0, vocab // 2] = 1e-30
    weights[1, 0] = weights[1, vocab - 1] = 0.5
    weights[2, vocab - 2] = 3.0
    for number in (0.0, 0.4999, 0.5, 1.0 - 2.0**-24, 1.0):
        picked = device_sampler._pick(weights, torch.full((3,), number)).tolist()
        assert picked[0] == vocab // 2
        assert picked[1] == (0 if number < 0.5 else vocab - 1)
        assert picked[2] == vocab - 2


def test_a_nucleus_ends_with_the_token_that_fills_its_share() -> None:
    """What is kept reaches its share exactly; a draw that lands there belongs to the next token."""
    ranked = torch.tensor([[1.0, 0.5, 0.25, 0.25]])
    for target, reached, beyond in ((1.0, 0, 1), (1.5, 1, 2), (1.6, 2, 2), (0.0, 0, 0)):
        wanted = torch.tensor([[target]])
        assert device_sampler._find(ranked, wanted, is_inclusive=True).tolist() == [reached]
        assert device_sampler._find(ranked, wanted, is_inclusive=False).tolist() == [beyond]
