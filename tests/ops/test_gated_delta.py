"""The gated delta rule: every implementation against the recurrence in float64, and against itself in other steps.

On a CPU the kernel for NVIDIA GPUs runs in Triton's interpreter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kernels.gated_delta import reference
from kernels.gated_delta.ops import gated_delta_prefill, gated_delta_update, warm_up
from kernels.platform import contract, in_use, installed
from tests.support.triton_interpreter import round_bfloat16
from tests.tolerances import OP

# num_key_heads, num_value_heads, key_dim, value_dim: shared key heads, and sizes that are no powers of two.
SIZES = [(2, 2, 16, 16), (2, 4, 8, 24), (1, 3, 20, 12)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NUM_LINES = 7


@pytest.fixture(params=["any_device", "triton_cuda"])
def serving(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if device == "cpu":
        round_bfloat16(monkeypatch)
    platform = in_use(torch.device(device)).with_fallback("gated_delta", request.param, "for the test")
    with installed(platform, torch.device(device).type):
        yield request.param


@dataclass
class Inputs:
    """Of one layer; `states` holds NaN in lines of nobody."""

    qkv: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    states: torch.Tensor

    def part(self, tokens: slice) -> tuple[torch.Tensor, ...]:
        return self.qkv[tokens].contiguous(), self.b[tokens], self.a[tokens], self.a_log, self.dt_bias


def make_inputs(sizes: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype, device: str) -> Inputs:
    num_key_heads, num_value_heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    columns = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    # Gates are columns of a wider product.
    gates = random(num_tokens, 2 * num_value_heads + 3).to(device, dtype)
    states = torch.full((NUM_LINES, num_value_heads, key_dim, value_dim), torch.nan)
    states[1:4] = random(3, num_value_heads, key_dim, value_dim)
    return Inputs(
        random(num_tokens, columns).to(device, dtype),
        gates[:, :num_value_heads],
        gates[:, num_value_heads : 2 * num_value_heads],
        random(num_value_heads).to(device) * 0.5,
        random(num_value_heads).to(device),
        states.to(device),
    )


def starts_of(lengths: list[int], device: str) -> tuple[torch.Tensor, list[int]]:
    starts = [0, *itertools.accumulate(lengths)]
    return torch.tensor(starts, dtype=torch.int32, device=device), starts


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    absolute, relative = OP[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), atol=4 * absolute, rtol=4 * relative)


@pytest.mark.usefixtures("serving")
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill_equals_the_recurrence(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """New and continued sequences, single tokens, an empty one, padding, and more than one chunk of a prompt."""
    lengths, lines = [70, 1, 0, 3, 5, 1], [4, 2, 1, 3, -1, 5]
    continued = torch.tensor([False, True, True, True, True, False], device=device)
    inputs = make_inputs(sizes, sum(lengths), dtype, device)
    starts, host_starts = starts_of(lengths, device)
    expected_states, found_states = inputs.states.clone(), inputs.states.clone()
    args = (*inputs.part(slice(None)),)
    expected = reference.prefill(*args, expected_states, starts, ints(lines, device), continued, None)
    before = [part.clone() for part in args]
    found = gated_delta_prefill(*args, found_states, starts, ints(lines, device), continued, query_starts=host_starts)
    assert found.is_contiguous() and found.dtype == dtype
    is_real = torch.ones(sum(lengths), dtype=torch.bool)
    is_real[74:79] = False
    assert_close(found[is_real], expected[is_real])
    used = [1, 2, 3, 4, 5]
    torch.testing.assert_close(found_states[used], expected_states[used], atol=2e-5, rtol=2e-5)
    assert torch.equal(found_states[1], inputs.states[1]), "an empty sequence keeps its state"
    assert bool(found_states[[0, 6]].isnan().all()), "a line of nobody was written"
    assert all(torch.equal(part, was) for part, was in zip(args, before, strict=True))


@pytest.mark.usefixtures("serving")
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_update_equals_the_recurrence(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    inputs, lines = make_inputs(sizes, 5, dtype, device), [2, 0, 3, -1, 1]
    expected_states, found_states = inputs.states.clone(), inputs.states.clone()
    args = inputs.part(slice(None))
    expected = reference.update(*args, expected_states, ints(lines, device))
    found = gated_delta_update(*args, found_states, ints(lines, device))
    real = [0, 2, 4]
    assert_close(found[real], expected[real])
    torch.testing.assert_close(found_states[1:4], expected_states[1:4], atol=2e-5, rtol=2e-5)
    assert bool(found_states[[0, 4, 5, 6]].isnan().all()), "a line of nobody was written"


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("cuts", [[64], [1, 2, 3], [64, 65, 128], [5, 130]], ids=str)
def test_a_prompt_in_chunks_equals_the_whole(cuts: list[int], device: str) -> None:
    inputs = make_inputs(SIZES[1], 150, torch.float32, device)

    def run(pieces: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
        states, outs = inputs.states.clone(), []
        for i, piece in enumerate(pieces):
            starts, host_starts = starts_of([piece.stop - piece.start], device)
            outs.append(
                gated_delta_prefill(
                    *inputs.part(piece),
                    states,
                    starts,
                    ints([5], device),
                    torch.tensor([i > 0], device=device),
                    query_starts=host_starts,
                )
            )
        return torch.cat(outs), states[5]

    edges = [0, *cuts, 150]
    whole, state = run([slice(0, 150)])
    pieces, state_of_pieces = run([slice(a, b) for a, b in itertools.pairwise(edges)])
    torch.testing.assert_close(pieces, whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state_of_pieces, state, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("serving")
def test_nan_of_one_sequence_stays_its_own(device: str) -> None:
    inputs = make_inputs(SIZES[0], 20, torch.float32, device)
    lengths, lines = [8, 1, 11], ints([4, 2, 5], device)
    starts, host_starts = starts_of(lengths, device)
    continued = torch.tensor([False, True, False], device=device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        states = inputs.states.clone()
        return gated_delta_prefill(
            *inputs.part(slice(None)), states, starts, lines, continued, query_starts=host_starts
        ), states

    alone, states = run()
    inputs.qkv[:8] = torch.nan
    beside, states_beside = run()
    assert torch.equal(beside[8:], alone[8:])
    assert torch.equal(states_beside[[2, 5]], states[[2, 5]])


def test_nothing_is_compiled_after_warm_up(serving: str, device: str) -> None:
    sizes = SIZES[1]
    inputs = make_inputs(sizes, 9, torch.bfloat16, device)
    states = inputs.states.clone()
    num_compiled = warm_up(states, sizes[0], torch.bfloat16)
    assert torch.equal(states.nan_to_num(7.0), inputs.states.nan_to_num(7.0))
    if serving == "any_device":
        assert num_compiled == 0
    before = contract("gated_delta", torch.device(device)).compiled_count()
    starts, host_starts = starts_of([4, 5], device)
    continued = torch.tensor([True, False], device=device)
    for rows in (slice(0, 9), slice(0, 2)):
        gated_delta_update(*inputs.part(rows), states, ints([1, 2, 3, 4, 5, 6, 0, 0, 0], device)[rows])
    gated_delta_prefill(
        *inputs.part(slice(None)), states, starts, ints([1, 2], device), continued, query_starts=host_starts
    )
    assert contract("gated_delta", torch.device(device)).compiled_count() == before


def test_wrong_arguments_are_named(device: str) -> None:
    inputs = make_inputs(SIZES[0], 4, torch.float32, device)
    good, states, lines = inputs.part(slice(None)), inputs.states, ints([1, 2, 3, 4], device)
    with pytest.raises(AssertionError, match="whole heads"):
        gated_delta_update(good[0][:, :-1].contiguous(), *good[1:], states, lines)
    with pytest.raises(AssertionError, match="float32"):
        gated_delta_update(*good, states.bfloat16(), lines)
    with pytest.raises(AssertionError, match="num_value_heads"):
        gated_delta_update(good[0], good[1][:, :1], *good[2:], states, lines)
    with pytest.raises(AssertionError, match="state_indices"):
        gated_delta_update(*good, states, lines[:2])
