"""Mamba-2: the plain torch implementation against the recurrence in float64, and against itself in other steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kernels.batch_invariant.mode import install_batch_invariance
from kernels.mamba2 import reference
from kernels.mamba2.ops import mamba2_decode, mamba2_prefill
from tests.tolerances import OP

# num_groups, num_heads, state_size, head_dim: shared and single groups, and sizes that are no powers of two.
SIZES = [(1, 4, 16, 8), (2, 4, 8, 24), (3, 3, 20, 12)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NUM_LINES = 7


@dataclass
class Inputs:
    """Inputs of one layer; `states` holds NaN in lines of nobody."""

    xbc: torch.Tensor
    dt: torch.Tensor
    scalars: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    states: torch.Tensor

    def part(self, tokens: slice) -> tuple[torch.Tensor, ...]:
        return self.xbc[tokens], self.dt[tokens], *self.scalars


def make_inputs(sizes: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype, device: str) -> Inputs:
    num_groups, num_heads, state_size, head_dim = sizes
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # Columns of one wider product, as a model's are.
    columns = num_heads * head_dim + 2 * num_groups * state_size
    wide = random(num_tokens, columns + num_heads + 3).to(device, dtype)
    a_log, dt_bias, d = (random(num_heads).to(device) * scale for scale in (0.5, 1.0, 1.0))
    states = torch.full((NUM_LINES, num_heads, state_size, head_dim), torch.nan)
    states[1:4] = random(3, num_heads, state_size, head_dim)
    return Inputs(wide[:, :columns], wide[:, columns : columns + num_heads], (a_log, dt_bias, d), states.to(device))


def starts_of(lengths: list[int], device: str) -> tuple[torch.Tensor, list[int]]:
    starts = [0, *itertools.accumulate(lengths)]
    return ints(starts, device), starts


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Computed in float32, whatever the inputs' dtype."""
    absolute, relative = OP[torch.float32]
    torch.testing.assert_close(found, expected, atol=4 * absolute, rtol=4 * relative)


@pytest.fixture(params=[False, True], ids=["any_device", "batch_invariant"])
def _serving(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    if request.param and device != "cpu":
        pytest.skip("NOT RUN: batch invariance is a CPU's")
    install_batch_invariance(device, wanted=request.param)
    yield
    install_batch_invariance(device, wanted=False)


@pytest.mark.usefixtures("_serving")
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("host_knows", [True, False], ids=["starts-on-the-host", "starts-on-the-device"])
def test_prefill_equals_the_recurrence(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, host_knows: bool, device: str
) -> None:
    """New and continued sequences, single tokens, an empty one, padding, and more than one chunk of a prompt; padding
    may hold anything."""
    lengths, lines = [70, 1, 0, 3, 5, 1], [4, 2, 1, 3, -1, 5]
    continued = torch.tensor([False, True, True, True, True, False], device=device)
    inputs = make_inputs(sizes, sum(lengths), dtype, device)
    inputs.xbc[74:79] = inputs.dt[74:79] = torch.nan
    starts, host_starts = starts_of(lengths, device)
    expected_states, found_states = inputs.states.clone(), inputs.states.clone()
    args, where = inputs.part(slice(None)), (starts, ints(lines, device), continued)
    expected = reference.prefill(*args, expected_states, *where, None, where[1])
    before = [part.clone() for part in args]
    found = mamba2_prefill(*args, found_states, *where, query_starts=host_starts if host_knows else None)
    assert found.is_contiguous() and found.dtype == torch.float32
    is_real = torch.ones(sum(lengths), dtype=torch.bool)
    is_real[74:79] = False
    assert_close(found[is_real], expected[is_real])
    assert_close(found_states[[2, 3, 4, 5]], expected_states[[2, 3, 4, 5]])
    assert torch.equal(found_states[1], inputs.states[1]), "an empty sequence keeps its state"
    assert bool(found_states[[0, 6]].isnan().all()), "a line of nobody was written"
    assert all(part.equal(was) or bool(was.isnan().any()) for part, was in zip(args, before, strict=True))


@DTYPES
def test_prefill_reads_states_from_other_lines(dtype: torch.dtype, device: str) -> None:
    """Single tokens and chunks, of a line that two share; the bits of a step whose lines hold copies."""
    lengths, lines, sources = [70, 1, 0, 3, 5, 66], [4, 5, 6, 2, -1, 3], [1, 1, 1, 2, -1, 3]
    continued = torch.tensor([True] * 6, device=device)
    inputs = make_inputs(SIZES[0], sum(lengths), dtype, device)
    starts, host_starts = starts_of(lengths, device)
    found_states, expected_states = inputs.states.clone(), inputs.states.clone()
    expected_states[[4, 5]] = inputs.states[1]
    args, where = inputs.part(slice(None)), (starts, ints(lines, device), continued)
    expected = mamba2_prefill(*args, expected_states, *where, query_starts=host_starts)
    found = mamba2_prefill(
        *args, found_states, *where, source_state_indices=ints(sources, device), query_starts=host_starts
    )
    is_real = torch.ones(sum(lengths), dtype=torch.bool)
    is_real[74:79] = False
    assert torch.equal(found[is_real], expected[is_real])
    assert torch.equal(found_states[1:6], expected_states[1:6])
    assert torch.equal(found_states[1], inputs.states[1]), "a source was written"
    assert bool(found_states[[0, 6]].isnan().all()), "a line of nobody was written"


@pytest.mark.usefixtures("_serving")
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_equals_the_recurrence(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """Two tokens of each sequence, one from another line at first, beside padding of both kinds."""
    inputs, lines, sources = make_inputs(sizes, 5, dtype, device), [2, 0, 4, -1, 1], [2, 0, 3, -1, 1]
    inputs.xbc[[1, 3]] = torch.nan
    found_states, expected_states = inputs.states.clone(), inputs.states.clone()
    args = inputs.part(slice(None))
    for of_step in (sources, lines):
        read = ints(of_step, device)
        expected = reference.decode(*args, expected_states, ints(lines, device), read)
        found = mamba2_decode(*args, found_states, ints(lines, device), source_state_indices=read)
        assert found.is_contiguous() and found.dtype == torch.float32
        assert_close(found[[0, 2, 4]], expected[[0, 2, 4]])
    assert_close(found_states[1:5], expected_states[1:5])
    assert torch.equal(found_states[3], inputs.states[3]), "a source was written"
    assert bool(found_states[[0, 5, 6]].isnan().all()), "a line of nobody was written"


@pytest.mark.parametrize("cuts", [[64], [1, 2, 3], [64, 65], [5, 90]], ids=str)
def test_a_prompt_in_chunks_equals_the_whole(cuts: list[int], device: str) -> None:
    inputs = make_inputs(SIZES[1], 100, torch.float32, device)

    def run(edges: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        states, outs = inputs.states.clone(), []
        for start, end in itertools.pairwise(edges):
            starts, host_starts = starts_of([end - start], device)
            where = (starts, ints([5], device), torch.tensor([start > 0], device=device))
            outs.append(mamba2_prefill(*inputs.part(slice(start, end)), states, *where, query_starts=host_starts))
        return torch.cat(outs), states[5]

    for found, whole in zip(run([0, *cuts, 100]), run([0, 100]), strict=True):
        assert_close(found, whole)


def test_nothing_overflows_where_steps_are_long(device: str) -> None:
    """The decays of a chunk multiply to next to nothing, and their inverses would be infinite."""
    inputs = make_inputs(SIZES[0], 130, torch.float32, device)
    inputs.dt.fill_(40.0)
    starts, host_starts = starts_of([130], device)
    where = (starts, ints([1], device), torch.tensor([True], device=device))
    states = [inputs.states.clone() for _ in range(2)]
    expected = reference.prefill(*inputs.part(slice(None)), states[0], *where, None, where[1])
    found = mamba2_prefill(*inputs.part(slice(None)), states[1], *where, query_starts=host_starts)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-5)  # products of steps of 40
    torch.testing.assert_close(states[1][1], states[0][1], atol=2e-3, rtol=2e-5)
