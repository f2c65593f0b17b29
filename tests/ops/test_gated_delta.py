"""The gated delta rule: every implementation against the recurrence in float64, and against itself in other steps.

On a CPU the kernel for NVIDIA GPUs runs in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels.causal_conv1d.ops import causal_conv1d_prefill
from kernels.gated_delta import reference
from kernels.gated_delta.ops import gated_delta_decode, gated_delta_prefill, gated_norm, warm_up
from kernels.platform import IMPLEMENTATIONS, contract, detect, in_use, installed
from tests.ops.lora.test_lora_triton import run_compiling
from tests.support.npu.fake_npu import made_up_npu
from tests.support.npu.triton_interpreter import multiply_bfloat16, round_floats
from tests.tolerances import DELTA_STATE_RMS, OP

# num_key_heads, num_value_heads, key_dim, value_dim: shared key heads, and sizes that are no powers of two.
SIZES = [(2, 2, 16, 16), (2, 4, 8, 24), (1, 3, 20, 12)]
# And four value heads of a key head, each of more than one tile of the decode kernel, the last not whole.
DECODE_SIZES = [*SIZES, (1, 4, 12, 72)]
DECODE_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NUM_LINES = 7
EPS = 1e-6


@pytest.fixture(params=["any_device", "triton_cuda"])
def serving(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if device == "cpu":
        round_floats(monkeypatch)
        multiply_bfloat16(monkeypatch)
    platform = in_use(torch.device(device)).with_fallback("gated_delta", request.param, "for the test")
    with installed(platform, torch.device(device).type):
        yield request.param


@pytest.fixture(params=["any_device", "triton_cuda", "triton_ascend"])
def serving_blocks(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """As `serving`, for heads of whole blocks of 16, which are all that the kernels for NPUs take."""
    if request.param == "triton_ascend" and device != "cpu":
        pytest.skip("NOT RUN: the kernels for NPUs are interpreted on a CPU")
    if device == "cpu":
        round_floats(monkeypatch)
        multiply_bfloat16(monkeypatch)
    platform = in_use(torch.device(device)).with_fallback("gated_delta", request.param, "for the test")
    with installed(platform, torch.device(device).type):
        yield request.param


@dataclass
class Inputs:
    """Inputs of one layer; `states` holds NaN in lines of nobody."""

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


@dataclass
class Decoding:
    """What a decode step reads beside `Inputs`: inputs are columns of one wider product, as a model's are."""

    qkv: torch.Tensor
    z: torch.Tensor
    taps: torch.Tensor
    conv_states: torch.Tensor
    norm_weight: torch.Tensor

    def step(
        self, inputs: Inputs, conv_states: torch.Tensor, states: torch.Tensor, lines: list[int], function: Any
    ) -> torch.Tensor:
        """The tokens of as many sequences as there are lines; function is an implementation's, or the op."""
        here = slice(len(lines))
        args = (
            *(self.qkv[here], self.z[here], inputs.b[here], inputs.a[here], self.taps, conv_states),
            *(inputs.a_log, inputs.dt_bias, self.norm_weight, states, ints(lines, self.qkv.device.type)),
        )
        out: torch.Tensor = function(*args, eps=EPS)
        return out


def make_decoding(inputs: Inputs, width: int = 4) -> Decoding:
    """Lines that hold a state of the rule hold one of the convolution too; the others are NaN."""
    num_tokens, channels = inputs.qkv.shape
    num_lines, num_heads, _, value_dim = inputs.states.shape
    generator, device, dtype = torch.Generator().manual_seed(11), inputs.qkv.device, inputs.qkv.dtype
    value_size = num_heads * value_dim
    wide = torch.randn(num_tokens, channels + value_size + 5, generator=generator).to(device, dtype)
    conv_states = torch.full((num_lines, width - 1, channels), torch.nan)
    conv_states[1:4] = torch.randn(3, width - 1, channels, generator=generator)
    return Decoding(
        wide[:, :channels],
        wide[:, channels : channels + value_size],
        (torch.randn(width, channels, generator=generator) * 0.5).to(device, dtype),
        conv_states.to(device, dtype),
        (1 + 0.1 * torch.randn(value_dim, generator=generator)).to(device),
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
    walked = [1, 2, 3, 5]
    torch.testing.assert_close(found_states[walked], expected_states[walked], atol=2e-5, rtol=2e-5)
    # A long prompt is computed by products, whose operands a GPU rounds to the type of the inputs.
    absolute, relative = (2e-5, 2e-5) if device == "cpu" else OP[dtype]
    torch.testing.assert_close(found_states[4], expected_states[4], atol=absolute, rtol=relative)
    assert torch.equal(found_states[1], inputs.states[1]), "an empty sequence keeps its state"
    assert bool(found_states[[0, 6]].isnan().all()), "a line of nobody was written"
    assert all(torch.equal(part, was) for part, was in zip(args, before, strict=True))


@pytest.mark.usefixtures("serving_blocks")
@DTYPES
def test_prefill_reads_states_from_other_lines(dtype: torch.dtype, device: str) -> None:
    """Walked and in chunks, of a line that two share; the bits of a step whose lines hold copies of what is read."""
    lengths, lines, sources = [70, 1, 0, 3, 5, 66, 9], [4, 5, 6, 2, -1, 7, 8], [1, 1, 1, 2, -1, 3, 9]
    continued = torch.tensor([True, True, True, True, True, True, False], device=device)
    inputs = make_inputs(SIZES[0], sum(lengths), dtype, device)
    inputs.states = torch.cat([inputs.states, inputs.states[4:7]])
    starts, host_starts = starts_of(lengths, device)
    found_states, expected_states = inputs.states.clone(), inputs.states.clone()
    for line, source in ((4, 1), (5, 1), (7, 3)):
        expected_states[line] = inputs.states[source]
    where = (starts, ints(lines, device), continued)
    args = inputs.part(slice(None))
    expected = gated_delta_prefill(*args, expected_states, *where, query_starts=host_starts)
    of_sources = {"source_state_indices": ints(sources, device), "query_starts": host_starts}
    found = gated_delta_prefill(*args, found_states, *where, **of_sources)
    is_real = torch.ones(sum(lengths), dtype=torch.bool)
    is_real[74:79] = False
    assert torch.equal(found[is_real], expected[is_real])
    assert torch.equal(found_states[[1, 2, 3, 4, 5, 7, 8]], expected_states[[1, 2, 3, 4, 5, 7, 8]])
    assert torch.equal(found_states[[1, 3]], inputs.states[[1, 3]]), "a source was written"
    assert bool(found_states[[0, 6, 9]].isnan().all()), "a line of nobody was written"


@pytest.mark.usefixtures("serving_blocks")
@DTYPES
def test_decode_reads_states_from_other_lines(dtype: torch.dtype, device: str) -> None:
    """Both states of a sequence, beside sequences in place and padding."""
    inputs, lines, sources = make_inputs(SIZES[0], 5, dtype, device), [4, 0, 5, -1, 2], [1, 0, 1, -1, 2]
    decoding = make_decoding(inputs)
    both = [(decoding.conv_states.clone(), inputs.states.clone()) for _ in range(2)]
    for state in both[0]:
        state[[4, 5]] = state[1].clone()
    expected = decoding.step(inputs, *both[0], lines, gated_delta_decode)
    read_elsewhere = functools.partial(gated_delta_decode, source_state_indices=ints(sources, device))
    found = decoding.step(inputs, *both[1], lines, read_elsewhere)
    assert torch.equal(found[[0, 2, 4]], expected[[0, 2, 4]])
    for own, right, before in zip(both[1], both[0], (decoding.conv_states, inputs.states), strict=True):
        assert torch.equal(own[[1, 2, 3, 4, 5]], right[[1, 2, 3, 4, 5]])
        assert torch.equal(own[[1, 3]], before[[1, 3]]), "a source was written"
        assert bool(own[[0, 6]].isnan().all()), "a line of nobody was written"


@DTYPES
def test_what_the_host_knows_of_the_starts_changes_nothing(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides on the size of tiles; a captured step is replayed with other sequences than it was captured for.
    Not a bit on a GPU; NumPy, which multiplies in the interpreter, sums in an order that hangs on the tile."""
    from kernels.gated_delta import (
        triton_cuda,
    )  # the tests of the Ascend kernels import this file, without CUDA's Triton

    if device == "cpu":
        round_floats(monkeypatch)
        multiply_bfloat16(monkeypatch)
    lengths = [70, 17, 64]
    inputs = make_inputs((1, 2, 128, 128), sum(lengths), dtype, device)
    starts, _ = starts_of(lengths, device)
    continued = torch.tensor([True, False, True], device=device)
    found = []
    for host_starts in ((0, 1), tuple(range(0, 20_000, 70)), None):
        states = inputs.states.clone()
        args = (*inputs.part(slice(None)), states, starts, ints([1, 2, 3], device), continued)
        found.append((triton_cuda.prefill(*args, host_starts), states[1:4]))
    for out, states in found[1:]:
        for own, right in ((out, found[0][0]), (states, found[0][1])):
            assert torch.equal(own, right) if device != "cpu" else own.allclose(right, rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("serving")
@DECODE_DTYPES
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("sizes", DECODE_SIZES, ids=str)
def test_decode_equals_the_recurrence(
    sizes: tuple[int, int, int, int], width: int, dtype: torch.dtype, device: str
) -> None:
    """Two tokens of each sequence, beside padding of both kinds."""
    inputs, lines = make_inputs(sizes, 5, dtype, device), [2, 0, 3, -1, 1]
    decoding = make_decoding(inputs, width)
    both = [(decoding.conv_states.clone(), inputs.states.clone()) for _ in range(2)]
    real = [0, 2, 4]
    for _ in range(2):
        expected = decoding.step(inputs, *both[0], lines, reference.decode)
        found = decoding.step(inputs, *both[1], lines, gated_delta_decode)
        assert found.is_contiguous() and found.dtype == dtype
        assert_close(found[real], expected[real])
    (expected_rows, expected_states), (rows, states) = both
    torch.testing.assert_close(states[1:4], expected_states[1:4], atol=4 * OP[dtype][0], rtol=4 * OP[dtype][1])
    assert torch.equal(rows[1:4], expected_rows[1:4]), "rows are shifted, and nothing is computed"
    for state in (rows, states):
        assert bool(state[[0, 4, 5, 6]].isnan().all()), "a line of nobody was written"


@pytest.mark.usefixtures("serving")
def test_decode_continues_what_a_prefill_left(device: str) -> None:
    """Convolution, rule and norm, token by token, against all tokens at once."""
    inputs = make_inputs(SIZES[1], 23, torch.float32, device)
    decoding = make_decoding(inputs)
    starts, host_starts = starts_of([23], device)
    line, new = ints([5], device), torch.tensor([False], device=device)
    rows, states = decoding.conv_states.clone(), inputs.states.clone()
    convolved = causal_conv1d_prefill(
        decoding.qkv, decoding.taps, None, rows, starts, line, new, activation="silu", query_starts=host_starts
    )
    whole = gated_norm(
        gated_delta_prefill(
            *(convolved, inputs.b, inputs.a, inputs.a_log, inputs.dt_bias, states, starts, line, new),
            query_starts=host_starts,
        ),
        *(decoding.z, decoding.norm_weight, EPS),
    )
    step_rows, step_states = decoding.conv_states.clone(), inputs.states.clone()
    step_rows[5], step_states[5] = 0.0, 0.0
    tokens = []
    for t in range(23):
        here = slice(t, t + 1)
        one = dataclasses.replace(decoding, qkv=decoding.qkv[here], z=decoding.z[here])
        of_token = dataclasses.replace(inputs, b=inputs.b[here], a=inputs.a[here])
        tokens.append(one.step(of_token, step_rows, step_states, [5], gated_delta_decode))
    torch.testing.assert_close(torch.cat(tokens), whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(step_states[5], states[5], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(step_rows[5], rows[5], atol=0, rtol=0)


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("cuts", [[64], [1, 2, 3], [64, 65], [5, 90]], ids=str)
def test_a_prompt_in_chunks_equals_the_whole(cuts: list[int], device: str) -> None:
    inputs = make_inputs(SIZES[1], 100, torch.float32, device)

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

    edges = [0, *cuts, 100]
    whole, state = run([slice(0, 100)])
    pieces, state_of_pieces = run([slice(a, b) for a, b in itertools.pairwise(edges)])
    torch.testing.assert_close(pieces, whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state_of_pieces, state, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("lengths", [[8, 1, 11], [1, 70, 66]], ids=["walked", "in-chunks"])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_nan_of_one_sequence_stays_its_own(broken: int, lengths: list[int], device: str) -> None:
    """Whatever stands before it and behind it, tails of chunks among them."""
    inputs = make_inputs(SIZES[0], sum(lengths), torch.float32, device)
    lines, continued = [4, 2, 5], torch.tensor([False, True, False], device=device)
    starts, host_starts = starts_of(lengths, device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        states = inputs.states.clone()
        where = (starts, ints(lines, device), continued)
        return gated_delta_prefill(*inputs.part(slice(None)), states, *where, query_starts=host_starts), states

    alone, states = run()
    here = slice(host_starts[broken], host_starts[broken + 1])
    inputs.qkv[here], inputs.b[here], inputs.a[here] = torch.nan, torch.nan, torch.nan
    beside, states_beside = run()
    is_other = torch.ones(sum(lengths), dtype=torch.bool)
    is_other[here] = False
    assert not bool(alone.isnan().any())
    assert torch.equal(beside[is_other], alone[is_other])
    others = [line for n, line in enumerate(lines) if n != broken]
    assert torch.equal(states_beside[others], states[others])


@pytest.mark.usefixtures("serving")
def test_nan_of_one_sequence_stays_its_own_in_decode(device: str) -> None:
    inputs, lines = make_inputs(SIZES[1], 3, torch.float32, device), [2, 3, 1]
    decoding = make_decoding(inputs)

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, states = decoding.conv_states.clone(), inputs.states.clone()
        return decoding.step(inputs, rows, states, lines, gated_delta_decode), rows, states

    alone = run()
    decoding.qkv[1], decoding.z[1], inputs.b[1] = torch.nan, torch.nan, torch.nan
    beside = run()
    assert torch.equal(beside[0][[0, 2]], alone[0][[0, 2]])
    assert all(torch.equal(now[[1, 2]], before[[1, 2]]) for now, before in zip(beside[1:], alone[1:], strict=True))


@pytest.mark.usefixtures("serving_blocks")
def test_correlated_keys_are_solved(device: str) -> None:
    """Keys alike and strong writes, where an inverse by powers would lose all digits."""
    inputs = make_inputs(SIZES[0], 128, torch.float32, device)
    inputs.qkv[:, 32:64] = inputs.qkv[:1, 32:64] + 0.01 * inputs.qkv[:, 32:64]
    inputs.b.fill_(6.0)
    inputs.a_log.fill_(-8.0)
    starts, host_starts = starts_of([128], device)
    args, line, new = inputs.part(slice(None)), ints([4], device), torch.tensor([False], device=device)
    expected_states, states = inputs.states.clone(), inputs.states.clone()
    expected = reference.prefill(*args, expected_states, starts, line, new, None)
    found = gated_delta_prefill(*args, states, starts, line, new, query_starts=host_starts)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(states[4], expected_states[4], atol=2e-4, rtol=2e-4)


@pytest.mark.usefixtures("serving")
def test_factors_are_rounded_where_errors_add_up(device: str) -> None:
    """Keys alike and slow decay: were digits of factors cut off, all errors would have one sign."""
    inputs = make_inputs((1, 2, 64, 64), 256, torch.bfloat16, device)
    inputs.qkv[:, 64:128] = inputs.qkv[:1, 64:128] + 0.1 * inputs.qkv[:, 64:128]
    inputs.a_log.fill_(-6.0)
    starts, host_starts = starts_of([256], device)
    args, line, new = inputs.part(slice(None)), ints([4], device), torch.tensor([False], device=device)
    expected, found = inputs.states.clone(), inputs.states.clone()
    reference.prefill(*args, expected, starts, line, new, None)
    gated_delta_prefill(*args, found, starts, line, new, query_starts=host_starts)
    error = (found[4] - expected[4]).square().mean().sqrt() / expected[4].square().mean().sqrt()
    assert float(error) <= DELTA_STATE_RMS


def test_nothing_is_compiled_after_warm_up(serving: str, device: str) -> None:
    inputs = make_inputs(SIZES[1], 40, torch.bfloat16, device)
    decoding = make_decoding(inputs)
    rows, states = decoding.conv_states.clone(), inputs.states.clone()
    num_compiled = warm_up(states, rows)
    for state, was in ((rows, decoding.conv_states), (states, inputs.states)):
        assert torch.equal(state.nan_to_num(7.0), was.nan_to_num(7.0))
    if serving == "any_device":
        assert num_compiled == 0
    before = contract("gated_delta", torch.device(device)).compiled_count()
    starts, host_starts = starts_of([4, 36], device)
    continued = torch.tensor([True, False], device=device)
    for lines in ([1, 2, 3, 4, 5, 6, 0, 0, 0], [1, 2]):
        decoding.step(inputs, rows, states, lines, gated_delta_decode)
    gated_delta_prefill(
        *inputs.part(slice(None)), states, starts, ints([1, 2], device), continued, query_starts=host_starts
    )
    assert contract("gated_delta", torch.device(device)).compiled_count() == before


def test_wrong_arguments_are_named(device: str) -> None:
    inputs = make_inputs(SIZES[0], 4, torch.float32, device)
    good, states, lines = inputs.part(slice(None)), inputs.states, ints([4], device)
    starts, new = ints([0, 4], device), torch.tensor([False], device=device)
    with pytest.raises(AssertionError, match="whole heads"):
        gated_delta_prefill(good[0][:, :-1].contiguous(), *good[1:], states, starts, lines, new)
    with pytest.raises(AssertionError, match="float32"):
        gated_delta_prefill(*good, states.bfloat16(), starts, lines, new)
    with pytest.raises(AssertionError, match="num_value_heads"):
        gated_delta_prefill(good[0], good[1][:, :1], *good[2:], states, starts, lines, new)
    decoding = make_decoding(inputs)
    with pytest.raises(AssertionError, match="conv_states"):
        decoding.step(inputs, decoding.conv_states[:, 1:], states, [1, 2, 3, 4], gated_delta_decode)
    with pytest.raises(AssertionError, match="one dtype"):
        decoding.step(inputs, decoding.conv_states.bfloat16(), states, [1, 2, 3, 4], gated_delta_decode)


def test_compiles_for_hopper_without_a_gpu(device: str) -> None:
    """Down to machine code within a core's shared memory, and no thread keeps registers in memory. A core's 65,536
    registers hold two programs of the decode kernel at a time: with two tiles of the state each, that was measured
    faster on an H200 than four programs with smaller tiles."""
    if device != "cpu":
        pytest.skip("NOT RUN: on a GPU the other tests compile for that GPU")
    told = [line.split() for line in run_compiling("compile_delta.py").splitlines()]
    found = [(name, *(int(number) for number in numbers)) for name, *numbers in told]
    assert len(told) == 6
    for name, shared_bytes, registers, spilled_bytes, num_threads in found:
        assert shared_bytes <= 227 * 1024 and not spilled_bytes, name
        assert name != "gated_delta_decode_kernel" or 2 * num_threads * registers <= 65_536


@pytest.mark.parametrize("lengths", [[1, 1, 1], [70, 1, 0, 5]], ids=str)
def test_an_npu_without_triton_is_served_by_torch_that_waits_for_nothing(lengths: list[int]) -> None:
    """Tensors without contents stand for the NPU's: whoever asks for a value of theirs fails."""
    with made_up_npu({"name": "Ascend910B3"}, "none"):
        platform = detect("npu:0")
    assert IMPLEMENTATIONS["npu"]["gated_delta"][0] == "triton_ascend"
    assert platform.implementations["gated_delta"] == "any_device"
    inputs = make_inputs(SIZES[1], sum(lengths), torch.bfloat16, "cpu")
    decoding = make_decoding(inputs)
    starts, host_starts = starts_of(lengths, "cpu")
    lines, continued = ints(list(range(1, len(lengths) + 1)), "cpu"), torch.ones(len(lengths), dtype=torch.bool)

    def away(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to("meta") for tensor in tensors]

    with installed(platform, "meta"):
        args = away(*inputs.part(slice(None)), inputs.states, starts, lines, continued)
        out = gated_delta_prefill(*args, query_starts=host_starts)
        assert out.shape == (sum(lengths), 4, 24)
        with pytest.raises(NotImplementedError):
            gated_delta_prefill(*args)  # nobody on the host tells the lengths
        if len(lengths) == sum(lengths):
            tokens = (decoding.qkv, decoding.z, inputs.b, inputs.a, decoding.taps, decoding.conv_states)
            weights = (inputs.a_log, inputs.dt_bias, decoding.norm_weight, inputs.states, lines)
            assert gated_delta_decode(*away(*tokens, *weights), eps=EPS).shape == (len(lengths), 96)
