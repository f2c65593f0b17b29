"""Sampling: every implementation against the float64 reference, and the reference against definitions written out."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.platform import detect, installed
from kernels.sampling import any_device, maps, ops, parameters
from kernels.sampling.maps import SamplingMaps, index_of
from kernels.sampling.ops import Choice
from kernels.sampling.parameters import ScoredToken
from kernels.sampling.sampling_request import GivenRow, RowSampling, ask, mask_of, uniform
from service.engine.ipc.messages import Sampling
from tests.ascend.twin.stand_ins.waits import recorded_waits
from tests.support.engine.replay import Recording
from tests.support.ops.sampling_cases import (
    VOCAB,
    Mix,
    hashed_logits,
    maps_of,
    new_state,
    random_mix,
    row,
    sample,
    tokens_of,
)
from tests.tolerances import OP

# Triton's on a CPU in its interpreter.
IMPLEMENTATIONS = {
    "cpu": ("cpu", "any_device", "triton_cuda", "reference"),
    "cuda": ("any_device", "triton_cuda", "reference"),
}
GREEDY_AND_RANDOM = pytest.mark.parametrize("temperature", [0.0, 1.0])
ABSOLUTE = OP[torch.float32][0]


@pytest.fixture(params=["cpu", "any_device", "triton_cuda", "reference"])
def implementation(request: pytest.FixtureRequest, device: str) -> str:
    if request.param not in IMPLEMENTATIONS[torch.device(device).type]:
        pytest.skip(f"NOT RUN: {request.param} serves no {device}")
    if request.param == "triton_cuda":
        pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")
    return str(request.param)


# ---- all at once


def told_of(mix: Mix, implementation: str, device: str, **options: Any) -> tuple[list[Choice], list[ScoredToken]]:
    state = mix.state(implementation, device)
    logits = mix.logits.to(device)
    return sample(logits, mix.rows, mix.given, implementation=implementation, state=state, **options)


def assert_alike(found: Sequence[ScoredToken | None], expected: Sequence[ScoredToken | None]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert (ours.token_id, [token for token, _ in ours.top]) == (
            theirs.token_id,
            [token for token, _ in theirs.top],
        )
        assert ours.logprob == pytest.approx(theirs.logprob, abs=ABSOLUTE)
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=ABSOLUTE)


@pytest.mark.parametrize("seed", range(40))
def test_every_mix_gives_the_references_tokens(seed: int, implementation: str, device: str) -> None:
    """Same numbers, same cuts: rounding alone could let a choice differ, at one draw in a hundred thousand."""
    mix = random_mix(seed)
    choices, given = told_of(mix, "reference", "cpu")
    found_choices, found_given = told_of(mix, implementation, device)
    assert tokens_of(found_choices) == tokens_of(choices)
    assert_alike([choice.logprob for choice in found_choices], [choice.logprob for choice in choices])
    assert_alike(found_given, given)


NUM_FROZEN_STEPS = 42
FROZEN = "f6b7e23b5f31339e"


def test_a_seed_gives_the_same_tokens_as_ever(device: str) -> None:
    """Of 504 rows on a CPU. A request with a seed is promised its answer again, by the next version too."""
    if device != "cpu":
        pytest.skip("NOT RUN: the promise is a CPU's; accelerators add in other orders")
    tokens = []
    for seed in range(NUM_FROZEN_STEPS):
        mix = random_mix(seed)
        mix = replace(mix, rows=[replace(asked, mask=None) for asked in mix.rows], given=[])
        tokens.append(tokens_of(told_of(mix, "cpu", "cpu")[0]))
    assert sum(map(len, tokens)) == 504
    assert hashlib.sha256(repr(tokens).encode()).hexdigest()[:16] == FROZEN


# ---- the draw


def kept_tokens(logits: torch.Tensor, values: dict[str, float]) -> dict[int, float]:
    """Token -> probability, after temperature, min_p, top_k, top_p of one row."""
    probs = (logits.double() / values.get("temperature", 1.0)).softmax(-1).tolist()
    ranked = sorted(enumerate(probs), key=lambda pair: -pair[1])
    ranked = [pair for pair in ranked if pair[1] >= values.get("min_p", 0.0) * ranked[0][1]]
    if values.get("top_k", 0) > 0:
        ranked = ranked[: int(values["top_k"])]
    total = sum(prob for _, prob in ranked)
    kept: list[tuple[int, float]] = []
    before = 0.0
    for token, prob in ranked:
        if before >= values.get("top_p", 1.0) * total and kept:
            break
        kept.append((token, prob))
        before += prob
    mass = sum(prob for _, prob in kept)
    return {token: prob / mass for token, prob in kept}


FILTERS: dict[str, dict[str, float]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "large_top_k": {"top_k": 300},
    "top_k_beyond_the_vocabulary": {"top_k": 9999, "temperature": 0.2},
    "top_p": {"top_p": 0.6},
    "flat_top_p": {"top_p": 0.97, "temperature": 5.0},
    "no_top_p": {"top_p": 0.0},
    "min_p": {"min_p": 0.2},
    "tiny_min_p": {"min_p": 1e-9, "top_p": 0.9},
    "all": {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    "tiny_top_p": {"top_p": 1e-6},
    "one": {"top_k": 1, "top_p": 0.5},
}


@pytest.mark.parametrize("values", FILTERS.values(), ids=FILTERS.keys())
def test_draws_follow_the_filtered_distribution(values: dict[str, float], implementation: str, device: str) -> None:
    if implementation == "triton_cuda" and device == "cpu":
        pytest.skip("NOT RUN: a thousand rows take long in the interpreter, and the draw is any_device's")
    logits = hashed_logits(1, seed=3)[0]
    expected = kept_tokens(logits, values)
    num_draws = 1000
    rows = [row(i, **{"temperature": 1.0, **values}) for i in range(num_draws)]
    drawn = Counter(tokens_of(sample(logits.to(device).repeat(num_draws, 1), rows, implementation=implementation)[0]))
    assert set(drawn) <= set(expected)
    # Fixed seeds, so this is no matter of luck; six standard deviations of a binomial count.
    for token, prob in expected.items():
        tolerance = 6 * math.sqrt(num_draws * prob * (1 - prob)) + 1e-9
        assert abs(drawn[token] - num_draws * prob) <= max(tolerance, 6.0), token


def drawn_with(numbers: Sequence[float], logits: torch.Tensor, implementation: str, **values: float) -> list[int]:
    """Tokens of the one row of logits, drawn with these uniform numbers."""
    rows = [row(i, **{"temperature": 1.0, **values}) for i in range(len(numbers))]
    asked = ask(rows, num_logits=len(rows), vocab=logits.shape[1])
    maps = maps_of(asked, implementation, str(logits.device))
    maps.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
    module = importlib.import_module(f"kernels.sampling.{implementation}")
    found: list[int] = module.sample(logits.repeat(len(rows), 1), maps, None).token_ids.tolist()
    return found


@pytest.mark.parametrize("vocab", [5, 128, 129, 256, 1000])
def test_a_token_of_weight_zero_is_never_drawn(vocab: int, implementation: str, device: str) -> None:
    below_one = 1.0 - 2.0**-53 if implementation == "cpu" else 1.0  # what the largest number is rounded to
    for kept in ([vocab // 2], [0, vocab - 1], [vocab - 2], [1, 3]):
        logits = torch.full((1, vocab), -torch.inf, device=device)
        logits[0, kept] = 0.0
        first, last = kept[0], kept[-1]
        assert drawn_with([0.0, 0.49, 0.51, below_one], logits, implementation) == [first, first, last, last]


def test_equals_of_the_last_token_kept_stay(implementation: str, device: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, -5.0, 0.0]], device=device)
    numbers = [i / 64 for i in range(64)]
    for values in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": math.exp(-1.0) - 1e-6}):
        assert set(drawn_with(numbers, logits, implementation, **values)) == {0, 1, 2, 4}
    assert set(drawn_with(numbers, logits, implementation, top_k=1)) == {1}
    assert set(drawn_with(numbers, -logits[:, :3], implementation, min_p=1.0)) == {0, 2}
    (greedy,), _ = sample(torch.zeros(1, 9, device=device), [row(0)], implementation=implementation)
    assert greedy.token_id == 0


def test_a_nucleus_ends_with_the_token_that_fills_its_share(implementation: str, device: str) -> None:
    """What is kept reaches its share exactly; a draw that lands there belongs to the next token."""
    logits = torch.tensor([[4.0, 2.0, 1.0, 1.0]], device=device).log()
    for top_p, kept in ((0.49, {0}), (0.51, {0, 1}), (0.74, {0, 1}), (0.76, {0, 1, 2, 3})):
        assert set(drawn_with([i / 64 for i in range(64)], logits, implementation, top_p=top_p)) == kept
    assert drawn_with([0.4999, 0.5001, 0.7499, 0.7501], logits, implementation) == [0, 1, 1, 2]
    halves = torch.tensor([[0.0, -math.log(2.0), -math.log(2.0)]], device=device)
    assert halves.exp().tolist() == [[1.0, 0.5, 0.5]]
    assert set(drawn_with([i / 64 for i in range(64)], halves, implementation, top_p=0.5)) == {0}


def test_a_tiny_temperature_is_as_good_as_zero(implementation: str, device: str) -> None:
    logits = (hashed_logits(1, seed=9) * 1e4).to(device)
    best = int(logits.argmax())
    assert drawn_with([0.0, 0.5, 0.99], logits, implementation, temperature=1e-50) == [best] * 3


# ---- rows


def test_a_row_does_not_depend_on_its_neighbours(implementation: str, device: str) -> None:
    logits = hashed_logits(8, seed=5).to(device)  # the last two are nobody's
    rows = [
        row(0),
        row(1, temperature=1.0),
        row(2, temperature=1.0, top_p=0.7),
        row(3, temperature=1.0, top_k=3, wanted={"num_top": 2}),
        row(4, temperature=1.0, min_p=0.1),
        row(5, temperature=1.0, wanted={"bias": {3: 50.0}}),
    ]
    together, _ = sample(logits, rows, implementation=implementation)
    alone = [sample(logits, [asked], implementation=implementation)[0][0] for asked in rows]
    assert tokens_of(together) == tokens_of(alone)
    assert [choice.logprob is None for choice in together] == [choice.logprob is None for choice in alone]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_floats_are_sampled_as_the_numbers_that_they_are(
    dtype: torch.dtype, implementation: str, device: str
) -> None:
    for seed in range(8):
        mix = random_mix(seed)
        exact = mix.logits.to(device, dtype)
        options = {"rows": mix.rows, "given": mix.given, "implementation": implementation}
        short = sample(exact, state=mix.state(implementation, device), **options)
        assert short == sample(exact.float(), state=mix.state(implementation, device), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_greedy", [False, True], ids=["mixed", "greedy"])
def test_rows_of_logits_may_stand_apart(is_greedy: bool, dtype: torch.dtype, implementation: str, device: str) -> None:
    """As in a product with more columns, which stay as they are."""
    mix = random_mix(3)
    rows = [row(i) for i in range(len(mix.logits))] if is_greedy else mix.rows
    asked = ask(rows, [] if is_greedy else mix.given, num_logits=len(mix.logits), vocab=VOCAB)
    maps = maps_of(asked, implementation, device)
    module = importlib.import_module(f"kernels.sampling.{implementation}")
    logits = mix.logits.to(device, dtype)
    product = torch.full((len(logits), VOCAB + 16), math.nan, dtype=dtype, device=device)
    product[:, :VOCAB] = logits
    apart = module.sample(product[:, :VOCAB], maps, mix.state(implementation, device))
    together = module.sample(logits, maps, mix.state(implementation, device))
    assert torch.equal(apart.packed, together.packed)
    assert product[:, VOCAB:].isnan().all()


@pytest.mark.parametrize("num_tokens", [600, 601, 608])
def test_of_equal_largest_logits_the_first_is_chosen(num_tokens: int, implementation: str, device: str) -> None:
    logits = torch.zeros(6, num_tokens, device=device)
    for place, columns in enumerate([(0,), (599,), (17, 18), (18, 17, 400), (300, 599), (5, num_tokens - 1)]):
        logits[place, list(columns)] = 1.0
    choices, _ = sample(logits, [row(i) for i in range(6)], implementation=implementation)
    assert tokens_of(choices) == [0, 599, 17, 17, 300, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 4095, 4096, 4097, 13001])
def test_a_greedy_step_over_parts_of_a_row_is_exact(
    vocab: int, dtype: torch.dtype, implementation: str, device: str
) -> None:
    """Largest logits at the edges of parts, equals in several of them, signed zeros, and rows that have none, whatever
    stands beside; in steps of greedy rows alone."""
    logits = hashed_logits(10, seed=vocab, vocab=vocab).clamp(max=3.0)
    logits[1, -1] = 4.0
    logits[2, [vocab // 3, vocab // 2, -1]] = 4.0
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[4, -1] = -9.0
    logits[5, vocab // 2], logits[5, -1] = math.inf, math.nan
    logits[6, 0] = -math.nan
    logits[7] = -0.0
    logits[7, -1] = 0.0
    logits[8] = -math.inf
    logits[8, -1] = math.nan
    logits = logits.to(device, dtype)
    expected = [int(each.max(dim=0).indices) if each.max().isfinite() else None for each in logits.cpu()]
    assert expected[3] is expected[5] is expected[6] is expected[8] is None and expected[7] == 0
    choices, _ = sample(logits, [row(i) for i in range(10)], implementation=implementation)
    assert tokens_of(choices) == expected
    out_of_order = [9, 2, 4, 8]
    choices, _ = sample(logits, [row(i) for i in out_of_order], implementation=implementation)
    assert tokens_of(choices) == [expected[i] for i in out_of_order]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@GREEDY_AND_RANDOM
def test_a_row_without_finite_logits_has_no_token(
    bad: float, temperature: float, implementation: str, device: str
) -> None:
    """It spoils no other, has no log probability and counts nowhere."""
    logits = hashed_logits(4, seed=1).to(device)
    logits[0, :] = bad
    logits[1, 7] = bad
    state = new_state(implementation, device)
    state.reset(0, [1], [2])
    wanted = {"slot": 0, "num_top": 1}
    rows = [
        row(0, temperature=temperature, top_p=0.9, presence_penalty=0.1, wanted=wanted),
        row(1, temperature=temperature),
        row(2, temperature=temperature),
        row(3),
    ]
    choices, _ = sample(logits, rows, implementation=implementation, state=state)
    assert choices[0] == Choice(None)
    assert (choices[1].token_id is None) == (bad != -math.inf)
    assert choices[2].token_id is not None
    assert choices[3].token_id == int(logits[3].argmax())
    assert int(state.counts(0)[1].sum()) == 1


# ---- what changes the logits


def test_biases_are_added_and_barred_tokens_are_not_chosen(implementation: str, device: str) -> None:
    logits = hashed_logits(5, seed=2).to(device)
    logits[3] = logits[4]
    best = int(logits[4].argmax())
    rows = [
        row(0, wanted={"bias": {17: 100.0}}),
        row(1, temperature=1.0, wanted={"bias": {18: 100.0, 19: -3.0}}),
        row(2),
        row(3, wanted={"barred": {best}, "bias": {best: 5.0}}),
        row(4),
    ]
    choices, _ = sample(logits, rows, implementation=implementation)
    logits[3, best] = -torch.inf
    assert tokens_of(choices) == [17, 18, int(logits[2].argmax()), int(logits[3].argmax()), best]


@pytest.mark.parametrize("vocab", [5, 32, 33, 600])
@GREEDY_AND_RANDOM
def test_a_mask_allows_its_tokens_only(vocab: int, temperature: float, implementation: str, device: str) -> None:
    logits = hashed_logits(64, seed=6, vocab=vocab).to(device)
    for allowed in ([0], [vocab - 1], [*range(min(vocab, 32))], [*range(0, vocab, 3)]):
        rows = [row(i, temperature=temperature, wanted={"mask": mask_of(allowed, vocab)}) for i in range(0, 64, 2)]
        unmasked = [row(i, temperature=temperature) for i in range(1, 64, 2)]
        choices, _ = sample(logits, rows + unmasked, implementation=implementation)
        free, _ = sample(logits, unmasked, implementation=implementation)
        assert set(tokens_of(choices[:32])) <= set(allowed)
        assert tokens_of(choices[32:]) == tokens_of(free)
    (nothing,), _ = sample(logits[:1], [row(0, wanted={"mask": mask_of([], vocab)})], implementation=implementation)
    assert nothing.token_id is None


def test_penalties_are_those_of_their_definition(implementation: str, device: str) -> None:
    """Found out from outside: the bias that a penalised token needs to be the most likely one, to within 1e-3."""
    logits = torch.tensor([[2.0, 2.0, -1.0, -1.0, 2.0, 0.0]], device=device)
    prompt, output = [1, 2, 2], [1, 3, 3, 3]
    values = {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    penalised = [2.0, 2.0 / 1.7 - 0.7, -1.7, -1.7 - 1.3, 2.0, 0.0]
    state = new_state(implementation, device, vocab=6)
    for token, expected in enumerate(penalised[:4]):
        for nudge, chosen in ((1e-3, token), (-1e-3, 5)):
            state.reset(3, prompt, output)
            bias = {token: 50.0 - expected + nudge, 5: 50.0}
            (choice,), _ = sample(
                logits, [row(0, wanted={"slot": 3, "bias": bias}, **values)], implementation=implementation, state=state
            )
            assert choice.token_id == chosen, token


def test_counts_go_on_after_a_preemption(implementation: str, device: str) -> None:
    """Six steps of two sequences; one of them loses its slot on the way. Others' slots stay as they are."""
    logits = [hashed_logits(3, seed=seed, vocab=40).to(device) for seed in range(6)]
    values = {"frequency_penalty": 2.0, "repetition_penalty": 1.5}
    prompts = {0: [1, 2], 5: [3]}

    def tokens(preempted_at: int | None) -> list[list[int]]:
        state = new_state(implementation, device, vocab=40)
        found: dict[int, list[int]] = {0: [], 5: []}
        for slot, prompt in prompts.items():
            state.reset(slot, prompt, [])
        slot_of = {0: 0, 5: 5}
        for step, its_logits in enumerate(logits):
            if step == preempted_at:
                slot_of[5] = 2
                state.reset(5, [7, 8, 9], [10])  # somebody else's now
                state.reset(2, prompts[5], found[5])
            rows = [
                row(0, temperature=1.0, wanted={"index": step, "slot": slot_of[0]}, **values),
                row(1, wanted={"slot": 9}),
                row(2, wanted={"slot": slot_of[5]}, **values),
            ]
            choices, _ = sample(its_logits, rows, implementation=implementation, state=state)
            for key, choice in ((0, choices[0]), (5, choices[2])):
                assert choice.token_id is not None
                found[key].append(choice.token_id)
        for key, slot in slot_of.items():
            in_prompt, num_output = state.counts(slot)
            assert in_prompt.nonzero()[:, 0].tolist() == sorted(prompts[key])
            assert {t: int(n) for t, n in enumerate(num_output) if n} == Counter(found[key])
        return list(found.values())

    assert tokens(None) == tokens(3) == tokens(5)


def test_counts_of_long_sequences(implementation: str, device: str) -> None:
    state = new_state(implementation, device)
    output = [*range(200), *range(100), *[7] * 40000]
    state.reset(1, [5, 5, 300], output)
    state.add(torch.tensor([-1, 1, 1], device=device), torch.tensor([3, 7, -1], device=device))
    in_prompt, num_output = state.counts(1)
    assert in_prompt.nonzero()[:, 0].tolist() == [5, 300]
    assert {t: int(n) for t, n in enumerate(num_output) if n} == Counter([*output, 7])
    state.reset(1, [], [])
    assert not any(part.any() for part in state.counts(1))


# ---- log probabilities


@pytest.mark.parametrize("num_top", [0, 1, 20, 5000])
def test_logprobs_are_of_the_models_own_distribution(num_top: int, implementation: str, device: str) -> None:
    """Of chosen and of given tokens, before bias, temperature and cuts; rows in the middle, from one answer."""
    logits = hashed_logits(7, seed=11)
    expected = logits.double().log_softmax(-1)
    rows = [
        row(2, wanted={"num_top": 1}),
        row(4),
        row(6, temperature=0.5, top_k=4, wanted={"num_top": num_top, "bias": {9: 100.0}}),
    ]
    given = [GivenRow(0, 17, 3), GivenRow(1, 18, num_top)]
    choices, told = sample(logits.to(device), rows, given, implementation=implementation)
    assert [choice.logprob is None for choice in choices] == [False, True, False]
    assert choices[2].token_id == 9
    entries = [choices[0].logprob, choices[2].logprob, *told]
    for entry, logits_row, token, num in zip(
        entries, (2, 6, 0, 1), (int(logits[2].argmax()), 9, 17, 18), (1, num_top, 3, num_top), strict=True
    ):
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[logits_row, token]), abs=ABSOLUTE)
        values, tokens = expected[logits_row].topk(min(num, VOCAB))
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=ABSOLUTE)
        assert [token for token, _ in entry.top] == tokens.tolist()


def test_a_chunk_of_a_prompt_has_log_probabilities_alone(implementation: str, device: str) -> None:
    logits = hashed_logits(3, seed=12)
    choices, told = sample(logits.to(device), [], [GivenRow(2, 5, 0)], implementation=implementation)
    assert choices == []
    rank = int((logits[2] >= logits[2, 5]).sum())
    assert told == [ScoredToken(5, pytest.approx(float(logits[2].double().log_softmax(-1)[5]), abs=ABSOLUTE), (), rank)]


def test_tokens_by_id_have_log_probabilities_and_given_ones_ranks(implementation: str, device: str) -> None:
    logits = hashed_logits(5, seed=13)
    expected = logits.double().log_softmax(-1)
    rows = [
        row(1, wanted={"num_top": 0, "scored": (7, 300)}),
        row(2, wanted={"num_top": 2}),
        row(3, wanted={"num_top": 0, "scored": (9,)}),
    ]
    given = [GivenRow(0, 17, 1), GivenRow(4, int(logits[4].argmax()), 0)]
    choices, told = sample(logits.to(device), rows, given, implementation=implementation)
    tops = [dict(choice.logprob.top) for choice in choices if choice.logprob is not None]
    assert [list(top) for top in tops] == [[7, 300], logits[2].topk(2).indices.tolist(), [9]]
    for top, logits_row in zip(tops, (1, 2, 3), strict=True):
        for token, logprob in top.items():
            assert logprob == pytest.approx(float(expected[logits_row, token]), abs=ABSOLUTE)
    assert [entry.rank for entry in told] == [int((logits[0] >= logits[0, 17]).sum()), 1]


# ---- parameters and numbers


def test_the_random_stream_depends_on_seed_and_index() -> None:
    pairs = [(seed, index) for seed in range(50) for index in range(50)]
    numbers = uniform(*zip(*pairs, strict=True)).tolist()
    assert len(set(numbers)) == 2500
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / 2500 - 0.5) < 0.02
    assert uniform([7, -1, 2**64 + 7], [3, 0, 3]).tolist() == [0.8832292678334052, 0.64635420864685, 0.8832292678334052]
    assert uniform([-1], [0]) != uniform([1], [0])


def test_what_shapes_a_draw_is_neutral_where_nothing_is_drawn() -> None:
    """A greedy row with top_p costs no sort."""
    rows = [row(0, top_p=0.5, min_p=0.1, top_k=3), row(1, temperature=1.0, top_k=VOCAB), row(2, temperature=1e-9)]
    facts = ask(rows, num_logits=3, vocab=VOCAB).facts
    assert (facts.used, facts.num_ranked, facts.is_random) == ({"temperature"}, 0, True)
    assert not ask(rows[:1], num_logits=1, vocab=VOCAB).facts.is_random
    for values, num_ranked in (({"top_k": 7, "top_p": 0.1}, 7), ({"top_p": 0.1}, VOCAB), ({"top_k": 1100}, 2000)):
        facts = ask([row(0, temperature=1.0, **values)], num_logits=1, vocab=max(VOCAB, num_ranked)).facts
        assert facts.num_ranked == num_ranked


def test_a_request_gives_its_parameters_by_name() -> None:
    found = maps.row_of(Sampling(max_tokens=1, temperature=0.5, top_k=7, presence_penalty=0.25))
    expected = maps.neutral_row()
    for name, value in {"temperature": 0.5, "top_k": 7, "presence_penalty": 0.25}.items():
        expected[index_of(name)] = value
    assert found.tolist() == expected.tolist()
    assert maps.row_of(Sampling(max_tokens=1)).tolist() == maps.neutral_row().tolist()
    assert maps.uses_penalties(found) and not maps.uses_penalties(maps.neutral_row())


def test_a_new_parameter_is_one_line_and_one_in_each_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """epsilon, as others have it: no token with a probability below it. Its value comes from the request, is neutral in
    others, and reaches the implementation."""
    epsilon = parameters.Parameter("draw", "excludes tokens with less than this probability", name="epsilon")
    monkeypatch.setattr(parameters, "PARAMETERS", (*parameters.PARAMETERS, epsilon))
    cut = any_device.cut

    def cut_with_epsilon(weights: torch.Tensor, maps: SamplingMaps) -> torch.Tensor:
        if maps.uses("epsilon"):  # the line
            weights = torch.where(weights < maps.parameter("epsilon")[:, None] * weights.sum(-1, True), 0.0, weights)
        return cut(weights, maps)

    monkeypatch.setattr(any_device, "cut", cut_with_epsilon)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(400, 1)
    rows = [row(i, temperature=1.0, epsilon=0.2 if i % 2 else 0.0) for i in range(400)]
    choices, _ = sample(logits, rows, implementation="any_device")
    assert set(tokens_of(choices[1::2])) == {0, 1}
    assert set(tokens_of(choices[::2])) == {0, 1, 2, 3}


# ---- replay


@pytest.mark.parametrize("name", ["any_device", "triton_cuda"])
@pytest.mark.parametrize("seed", range(12))
def test_a_recorded_step_serves_others_of_equal_facts(seed: int, name: str, device: str) -> None:
    """Nothing is taken from values when a step is recorded: other numbers in the same tensors give what they give
    eagerly, bit for bit. An accelerator's step waits for nothing and has no float64."""
    if name == "triton_cuda":
        pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")
        if device != "cpu":
            pytest.skip("NOT RUN: launches are recorded in the interpreter; tests/parity/test_replay.py replays graphs")
    module = importlib.import_module(f"kernels.sampling.{name}")
    mixes = [random_mix(seed), random_mix(1000 + seed)]
    # The same code path: what the first asks for, with the values of the other.
    mixes[1] = replace(
        mixes[1], rows=[_with_values_of(*both) for both in zip(mixes[0].rows, mixes[1].rows, strict=True)]
    )
    mixes[1] = replace(mixes[1], given=[replace(entry, token_id=3, logits_row=1) for entry in mixes[0].given])
    asked = [ask(mix.rows, mix.given, num_logits=16, vocab=VOCAB) for mix in mixes]
    assert asked[0].facts == asked[1].facts
    maps = maps_of(asked[0], name)
    logits, state = mixes[0].logits.clone(), mixes[0].state(name)
    with recorded_waits() as waits:
        recording = Recording(lambda: module.sample(logits, maps, state))
    assert waits == []
    assert torch.float64 not in recording.dtypes
    for mix, its in ((mixes[1], asked[1]), (mixes[0], asked[0])):
        others = maps_of(its, name)
        expected = module.sample(mix.logits.clone(), others, mix.state(name))
        for field in fields(maps):
            if field.name != "facts":
                getattr(maps, field.name).copy_(getattr(others, field.name))
        logits.copy_(mix.logits)
        for slot, (prompt, output) in mix.held.items():
            state.reset(slot, prompt, output)
        recording.replay()
        assert torch.equal(recording.result.packed, expected.packed)
        assert torch.equal(recording.result.token_ids, expected.token_ids)


def _with_values_of(first: RowSampling, other: RowSampling) -> RowSampling:
    """Asks for the same as the first, with other numbers, where they do not choose the path."""
    values = first.parameters.copy()
    for name in ("temperature", "min_p", "repetition_penalty", "frequency_penalty"):
        values[index_of(name)] *= 1.125 if values[index_of(name)] != 1.0 else 1.0
    return replace(
        first,
        logits_row=other.logits_row,
        parameters=values,
        seed=other.seed,
        index=other.index,
        slot=other.slot,
        bias={VOCAB - 1 - token: -bias for token, bias in first.bias.items()},
        barred={VOCAB - 1 - token for token in first.barred},
        mask=None if first.mask is None else mask_of(range(0, VOCAB, 2), VOCAB),
    )


# ---- the wrapper


def call(logits: torch.Tensor, **changed: Any) -> object:
    asked = ask(**{"rows": [row(0), row(1)], "num_logits": 2, "vocab": 8, **changed})
    return ops.sample(logits, maps_of(asked, "cpu"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: call(torch.zeros(2, 8).double()), "float32"),
        (lambda: call(torch.zeros(8, 2).t()), "contiguous"),
        (lambda: call(torch.zeros(3, 8)), "facts say otherwise"),
        (lambda: call(torch.zeros(2, 8), rows=[], given=[]), "nothing is asked for"),
        (lambda: call(torch.zeros(2, 8), rows=[row(0, presence_penalty=1.0, wanted={"slot": 0})]), "state"),
        (lambda: call(torch.zeros(2, 8), rows=[row(0, presence_penalty=1.0)]), "has the slot"),
        (lambda: call(torch.zeros(2, 8), rows=[row(0, wanted={"mask": np.zeros(2, np.int32)})]), "masks are"),
    ],
)
def test_wrong_arguments_are_named(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        wrong()


class _MaximumOverNumbers(TorchDispatchMode):
    """A device whose maximum of a row with NaN is that of the others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.max.dim:
            args = (torch.where(args[0].isnan(), -torch.inf, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_with_nan_has_no_token_on_an_npu_whose_maximum_passes_over_it(dtype: torch.dtype) -> None:
    logits = hashed_logits(6, seed=3).to(dtype)
    logits[1, VOCAB // 2] = torch.nan
    logits[2, 3], logits[3, :] = torch.inf, -torch.inf
    logits[4, 5:] = -torch.inf
    expected = any_device.largest(logits)[1]
    assert (expected < 0).tolist() == [False, True, True, True, False, False]
    with installed(replace(detect("cpu"), device="npu"), "cpu"), _MaximumOverNumbers():
        assert any_device.largest(logits)[1].tolist() == expected.tolist()
