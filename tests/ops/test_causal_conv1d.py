"""The causal convolution ops on the CPU against the float64 truth, and against themselves in other chunkings."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.causal_conv1d import ops, reference
from tests.support.conv_cases import Call, float64_truth, prefill_call, update_call
from tests.tolerances import OP

SEEDS = st.integers(0, 2**31)
FP32 = (torch.float32,)


def check_call(op: Any, truth_op: Any, call: Call, *, in_place: bool) -> None:
    """Outputs within the table's tolerance; states, touched or not, exactly the inputs rounded to their dtype."""
    expected, expected_states = float64_truth(truth_op, call, in_place=in_place)
    x = call["x"].clone()
    call = {**call, "x": x, "out": x if in_place else None}
    result = op(**call)
    absolute, relative = OP[x.dtype]
    torch.testing.assert_close(result.double(), expected, atol=absolute * call["weight"].shape[0], rtol=relative)
    if expected_states is not None:
        assert torch.equal(call["conv_states"], expected_states)
    assert in_place == (result.data_ptr() == x.data_ptr() and x.numel() > 0) or x.numel() == 0


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, in_place=st.booleans())
def test_prefill_gives_the_float64_truth(seed: int, in_place: bool) -> None:
    check_call(ops.causal_conv1d_prefill, reference.causal_conv1d_prefill, prefill_call(seed), in_place=in_place)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, in_place=st.booleans())
def test_update_gives_the_float64_truth(seed: int, in_place: bool) -> None:
    check_call(ops.causal_conv1d_update, reference.causal_conv1d_update, update_call(seed), in_place=in_place)


def sequence(seed: int) -> tuple[random.Random, Call, int]:
    """One fp32 sequence with its fixed arguments: (random stream, arguments of a call, tokens)."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    width, dim, num_tokens = rng.randint(2, 8), rng.choice([1, 5, 16, 33]), rng.randint(1, 24)
    fixed: Call = {
        "weight": torch.randn(width, dim, generator=generator),
        "bias": torch.randn(dim, generator=generator) if rng.random() < 0.5 else None,
        "activation": rng.choice([None, "silu"]),
        "tokens": {name: torch.randn(num_tokens, dim, generator=generator) for name in ("x", "gate_in", "gate_out")},
    }
    if rng.random() < 0.5:
        fixed["tokens"] = {"x": fixed["tokens"]["x"]}
    return rng, fixed, num_tokens


def run_chunk(fixed: Call, states: torch.Tensor, start: int, end: int, module: Any = ops) -> torch.Tensor:
    arguments = {name: value for name, value in fixed.items() if name != "tokens"}
    return module.causal_conv1d_prefill(
        **{name: value[start:end] for name, value in fixed["tokens"].items()},
        **arguments,
        conv_states=states,
        query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
        state_indices=torch.tensor([1], dtype=torch.int32),
        has_initial_state=torch.tensor([start > 0]),
    )


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
def test_any_chunking_token_by_token_and_the_reference_give_the_same_bits(seed: int) -> None:
    rng, fixed, num_tokens = sequence(seed)
    width, dim = fixed["weight"].shape
    whole_states = torch.full((2, width - 1, dim), 7.0)
    chunk_states, token_states = whole_states.clone(), whole_states.clone()
    whole = run_chunk(fixed, whole_states, 0, num_tokens)
    assert torch.equal(run_chunk(fixed, whole_states.clone(), 0, num_tokens, reference), whole)

    cuts = sorted(rng.randint(0, num_tokens) for _ in range(rng.randint(1, 4)))
    bounds = list(zip([0, *cuts], [*cuts, num_tokens], strict=True))
    chunked = torch.cat([run_chunk(fixed, chunk_states, start, end) for start, end in bounds if end > start])
    assert torch.equal(chunked, whole)
    assert torch.equal(chunk_states, whole_states)

    token_states[1] = 0
    arguments = {name: value for name, value in fixed.items() if name != "tokens"}
    tokens = [
        ops.causal_conv1d_update(
            **{name: value[token : token + 1] for name, value in fixed["tokens"].items()},
            **arguments,
            conv_states=token_states,
            state_indices=torch.tensor([1], dtype=torch.int32),
        )
        for token in range(num_tokens)
    ]
    assert torch.equal(torch.cat(tokens), whole)
    assert torch.equal(token_states, whole_states)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_rejected_drafts_leave_no_trace(seed: int) -> None:
    """Speculative steps with random acceptances give the bits of the accepted tokens alone."""
    rng, fixed, num_tokens = sequence(seed)
    width, dim = fixed["weight"].shape
    draft = rng.randint(1, 4)
    whole_states = torch.zeros(2, width - 1, dim)
    whole = run_chunk(fixed, whole_states, 0, num_tokens)
    states = torch.zeros(2, width - 1 + draft, dim)
    outputs, done, accepted = [], 0, 1
    while done < num_tokens:
        keep = min(rng.randint(1, draft + 1), num_tokens - done)
        wrong = {name: torch.randn(draft + 1 - keep, dim) for name in fixed["tokens"]}
        tokens = {name: torch.cat([value[done : done + keep], wrong[name]]) for name, value in fixed["tokens"].items()}
        result = ops.causal_conv1d_update(
            **{name: value[None] for name, value in tokens.items()},
            **{name: value for name, value in fixed.items() if name != "tokens"},
            conv_states=states,
            state_indices=torch.tensor([1], dtype=torch.int32),
            num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32),
        )
        outputs.append(result[0, :keep])
        done, accepted = done + keep, keep
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(states[1, accepted - 1 : accepted + width - 2], whole_states[1])


def test_prefix_cache_keeps_the_state_of_every_boundary() -> None:
    """10 tokens, 3 of them computed before, in blocks of 4: boundaries after tokens 4 and 8, the end in block 2."""
    x, weight = torch.arange(1.0, 8.0)[:, None], torch.ones(3, 1)
    states = torch.zeros(9, 2, 1)
    states[5, :, 0] = torch.tensor([-2.0, -1.0])
    ops.causal_conv1d_prefill(
        x,
        weight,
        None,
        states,
        torch.tensor([0, 7], dtype=torch.int32),
        torch.tensor([[5, 6, 8, 0]], dtype=torch.int32),
        torch.tensor([True]),
        initial_state_idx=torch.tensor([0], dtype=torch.int32),
        block_idx_first_scheduled_token=torch.tensor([0], dtype=torch.int32),
        block_idx_last_scheduled_token=torch.tensor([2], dtype=torch.int32),
        num_computed_tokens=torch.tensor([3], dtype=torch.int32),
        block_size_tokens=4,
    )
    expected = torch.zeros(9, 2, 1)
    expected[5, :, 0] = torch.tensor([-1.0, 1.0])
    expected[6, :, 0] = torch.tensor([4.0, 5.0])
    expected[8, :, 0] = torch.tensor([6.0, 7.0])
    assert torch.equal(states, expected)


def test_state_indices_may_be_empty() -> None:
    """No sequences is no work; it does not mean that sequences own the lines of their numbers."""
    states = torch.ones(3, 2, 4)
    nothing = torch.empty(0, dtype=torch.int32)
    result = ops.causal_conv1d_update(torch.empty(0, 4), torch.ones(3, 4), None, states, nothing)
    assert result.shape == (0, 4)
    assert torch.equal(states, torch.ones(3, 2, 4))


def wrong(**changes: Any) -> Call:
    call: Call = {
        "x": torch.zeros(4, 6),
        "weight": torch.zeros(3, 6),
        "bias": None,
        "conv_states": torch.zeros(5, 2, 6),
        "state_indices": torch.tensor([1, 2, 3, 4], dtype=torch.int32),
    }
    return {**call, **changes}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (wrong(weight=torch.zeros(6, 3)), "weight"),
        (wrong(weight=torch.zeros(9, 6)), "width 2 to 8"),
        (wrong(weight=torch.zeros(6, 3).t()), "contiguous"),
        (wrong(bias=torch.zeros(3)), "bias"),
        (wrong(conv_states=torch.zeros(5, 1, 6)), "conv_states"),
        (wrong(conv_states=torch.zeros(5, 6, 2).transpose(1, 2)), "channels of conv_states"),
        (wrong(x=torch.zeros(6, 4).t()), "channels of x"),
        (wrong(x=torch.zeros(4, 6, dtype=torch.int32)), "int32"),
        (wrong(gate_in=torch.zeros(4, 5)), "gate_in"),
        (wrong(activation="relu"), "relu"),
        (wrong(state_indices=torch.tensor([1, 2])), "4 sequences"),
        (wrong(state_indices=None, x=torch.zeros(6, 6)), "line of its own"),
        (wrong(num_accepted_tokens=torch.tensor([1, 2])), "num_accepted_tokens"),
        (wrong(x=torch.zeros(4, 3, 6), num_accepted_tokens=torch.ones(4, dtype=torch.int32)), "draft"),
        (wrong(num_accepted_tokens=torch.ones(8, dtype=torch.int32)[::2]), "contiguous"),
        (wrong(num_accepted_tokens=torch.ones(4)), "int32"),
        (wrong(initial_state_idx=torch.zeros(4, dtype=torch.int32)), "both or neither"),
        (wrong(query_start_loc=torch.tensor([0, 1, 2, 3, 4])), "max_query_len"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.causal_conv1d_update(**call)


def test_half_a_prefix_cache_is_refused() -> None:
    starts = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="needs all of"):
        ops.causal_conv1d_prefill(**wrong(), query_start_loc=starts, num_computed_tokens=starts[1:])
