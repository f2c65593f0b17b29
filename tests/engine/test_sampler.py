"""Sampling against definitions written out plainly, one row at a time."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from service.engine.messages import Sampling
from service.engine.penalties import TokenCounts
from service.engine.sampler import Choice, RowRequest, sample, token_logprobs, uniform

VOCAB = 600


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


def drawn_tokens(logits: torch.Tensor, num_draws: int, **fields: Any) -> Counter[int | None]:
    """Draws of one row, as tokens 0, 1, 2, ... of one request, in one batch."""
    requests = [row_request(index, **fields) for index in range(num_draws)]
    return Counter(tokens_of(sample(logits.repeat(num_draws, 1), requests)))


def test_temperature_zero_takes_the_most_likely_token() -> None:
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
def test_draws_follow_the_filtered_distribution(fields: dict[str, Any]) -> None:
    logits = random_logits(1, seed=3)[0]
    expected = kept_tokens(logits, Sampling(max_tokens=1, **fields))
    num_draws = 1000
    drawn = drawn_tokens(logits, num_draws, **fields)
    assert set(drawn) <= set(expected)
    # Fixed seeds, so this is no matter of luck; six standard deviations of a binomial count.
    for token, prob in expected.items():
        tolerance = 6 * math.sqrt(num_draws * prob * (1 - prob)) + 1e-9
        assert abs(drawn[token] - num_draws * prob) <= max(tolerance, 6.0), token


def test_a_row_does_not_depend_on_its_neighbours() -> None:
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


def test_penalties_are_those_of_their_definition() -> None:
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


def test_logit_bias_is_added_before_the_choice() -> None:
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


def test_barred_tokens_are_never_chosen() -> None:
    logits = random_logits(2)
    best = int(logits[0].argmax())
    logits[1] = logits[0]
    chosen = tokens_of(
        sample(logits, [row_request(temperature=0.0, barred=frozenset({best})), row_request(temperature=0.0)])
    )
    assert chosen[0] != best
    assert chosen[1] == best


def test_logprobs_are_of_the_models_own_distribution() -> None:
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


def test_logprobs_zero_gives_the_chosen_token_alone() -> None:
    (choice,) = sample(random_logits(1), [row_request(temperature=0.0, logprobs=0)])
    assert choice.logprob is not None
    assert choice.logprob.top == ()


def test_prompt_logprobs_of_given_tokens() -> None:
    logits = random_logits(3, seed=6)
    expected = logits.double().log_softmax(-1)
    found = token_logprobs(logits, [5, 6, 7], 2)
    assert [entry.token_id for entry in found] == [5, 6, 7]
    assert [entry.logprob for entry in found] == pytest.approx([float(expected[i, 5 + i]) for i in range(3)], abs=1e-5)
    assert [len(entry.top) for entry in found] == [2, 2, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_has_no_token_and_spoils_no_other(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    expected = int(logits[2].argmax())
    logits[0, :] = bad
    requests = [row_request(temperature=temperature, top_p=0.9), row_request(), row_request(temperature=0.0)]
    chosen = tokens_of(sample(logits, requests))
    assert chosen[0] is None
    assert chosen[1] is not None
    assert chosen[2] == expected


def test_a_tiny_temperature_is_as_good_as_zero() -> None:
    logits = random_logits(1) * 1e4
    expected = int(logits[0].argmax())
    assert drawn_tokens(logits[0], 20, temperature=1e-7) == {expected: 20}
