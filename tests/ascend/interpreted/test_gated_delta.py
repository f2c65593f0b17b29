"""The Ascend kernels of the gated delta rule in triton-ascend's interpreter, through the public ops."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from kernels.gated_delta import reference, triton_ascend
from kernels.gated_delta.ops import gated_delta_decode, gated_delta_prefill, warm_up
from kernels.platform import in_use, installed
from kernels.shapes import ProbeShapes
from tests.ops.test_gated_delta import Inputs, assert_close, ints, make_decoding, make_inputs, starts_of
from tests.support.npu.triton_interpreter import round_floats
from tests.tolerances import OP

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(2, 2, 16, 16), (2, 4, 48, 80), (1, 3, 32, 96), (1, 1, 128, 256)]


@pytest.fixture(autouse=True)
def _pretend_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few cores, so that a program has several items."""
    round_floats(monkeypatch)
    platform = dataclasses.replace(in_use(torch.device("cpu")), num_cores=3)
    with installed(platform.with_fallback("gated_delta", "triton_ascend", "for the test"), "cpu"):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_equals_the_recurrence(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Two tokens of each sequence, beside padding of both kinds."""
    inputs, lines, real = make_inputs(sizes, 5, dtype, "cpu"), [2, 0, 3, -1, 1], [0, 2, 4]
    decoding = make_decoding(inputs)
    (expected_rows, expected_states), (rows, states) = both = [
        (decoding.conv_states.clone(), inputs.states.clone()) for _ in range(2)
    ]
    for _ in range(2):
        expected = decoding.step(inputs, *both[0], lines, reference.decode)
        found = decoding.step(inputs, *both[1], lines, gated_delta_decode)
        assert found.is_contiguous() and found.dtype == dtype
        assert_close(found[real], expected[real])
    torch.testing.assert_close(states[1:4], expected_states[1:4], atol=4 * OP[dtype][0], rtol=4 * OP[dtype][1])
    assert torch.equal(rows[1:4], expected_rows[1:4])
    for state in (rows, states):
        assert bool(state[[0, 4, 5, 6]].isnan().all()), "a line of nobody was written"


def prefill(
    inputs: Inputs, states: torch.Tensor, lengths: list[int], lines: list[int], continued: list[bool]
) -> torch.Tensor:
    """Through the op, whose arguments stay as they are."""
    starts, host_starts = starts_of(lengths, "cpu")
    args = inputs.part(slice(0, sum(lengths)))
    before = [part.clone() for part in args]
    where = (starts, ints(lines, "cpu"), torch.tensor(continued))
    out = gated_delta_prefill(*args, states, *where, query_starts=host_starts)
    assert all(torch.equal(part.nan_to_num(7.0), was.nan_to_num(7.0)) for part, was in zip(args, before, strict=True))
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill_equals_the_recurrence(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """New and continued sequences, single tokens, an empty one, and padding."""
    lengths, lines = [70, 1, 0, 3, 5, 1], [4, 2, 1, 3, -1, 5]
    continued = [False, True, True, True, True, False]
    inputs = make_inputs(sizes, sum(lengths), dtype, "cpu")
    inputs.qkv[74:79], inputs.b[74:79] = torch.nan, torch.nan
    expected_states, states = inputs.states.clone(), inputs.states.clone()
    where = (starts_of(lengths, "cpu")[0], ints(lines, "cpu"), torch.tensor(continued), None)
    expected = reference.prefill(*inputs.part(slice(None)), expected_states, *where)
    found = prefill(inputs, states, lengths, lines, continued)
    assert found.is_contiguous() and found.dtype == dtype
    is_real = torch.ones(sum(lengths), dtype=torch.bool)
    is_real[74:79] = False
    assert_close(found[is_real], expected[is_real])
    torch.testing.assert_close(states[2:6], expected_states[2:6], atol=2e-5, rtol=2e-5)
    assert torch.equal(states[1], inputs.states[1]), "an empty sequence keeps its state"
    assert bool(states[[0, 6]].isnan().all()), "a line of nobody was written"


@pytest.mark.parametrize("cuts", [[64], [65], [5, 130]], ids=len)
def test_a_prompt_in_chunks_equals_the_whole(cuts: list[int]) -> None:
    """Chunks that are walked, and chunks that the cube computes, against one that it does."""
    inputs, edges = make_inputs(SIZES[0], 140, torch.float32, "cpu"), [0, *cuts, 140]
    whole, states = prefill(inputs, whole_states := inputs.states.clone(), [140], [5], [False]), inputs.states.clone()
    pieces = []
    for first, end in itertools.pairwise(edges):
        part = dataclasses.replace(inputs, qkv=inputs.qkv[first:end], b=inputs.b[first:end], a=inputs.a[first:end])
        pieces.append(prefill(part, states, [end - first], [5], [first > 0]))
    torch.testing.assert_close(torch.cat(pieces), whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states[5], whole_states[5], atol=2e-5, rtol=2e-5)


def test_long_prompts_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new sequence and a continued one; and walked token by token where nobody on the host tells their lengths."""
    inputs, lengths, lines = make_inputs(SIZES[0], 270, torch.float32, "cpu"), [130, 140], [5, 2]
    whole = prefill(inputs, whole_states := inputs.states.clone(), lengths, lines, [False, True])
    monkeypatch.setattr("kernels.gated_delta.triton_ascend_chunks.PIECE_TOKENS", 64)
    states = inputs.states.clone()
    pieces = prefill(inputs, states, lengths, lines, [False, True])
    torch.testing.assert_close(pieces, whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states[lines], whole_states[lines], atol=2e-5, rtol=2e-5)
    where = (starts_of(lengths, "cpu")[0], ints(lines, "cpu"), torch.tensor([False, True]))
    walked = gated_delta_prefill(*inputs.part(slice(None)), states := inputs.states.clone(), *where)
    torch.testing.assert_close(walked, whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states[lines], whole_states[lines], atol=2e-5, rtol=2e-5)


def test_nan_of_one_sequence_stays_its_own_in_prefill() -> None:
    """Before it and behind it in the step, and with a line that held NaN before."""
    inputs, lengths, lines = make_inputs(SIZES[1], 146, torch.float32, "cpu"), [66, 1, 70, 9], [4, 2, 5, 6]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        states = inputs.states.clone()
        return prefill(inputs, states, lengths, lines, [False, True, False, False]), states

    alone, states = run()
    inputs.qkv[67:137], inputs.b[67:137] = torch.nan, torch.nan
    beside, states_beside = run()
    assert not bool(alone.isnan().any())
    for tokens in (slice(0, 67), slice(137, 146)):
        assert torch.equal(beside[tokens], alone[tokens])
    assert torch.equal(states_beside[[4, 2, 6]], states[[4, 2, 6]])


def test_nan_of_one_sequence_stays_its_own() -> None:
    inputs, lines = make_inputs(SIZES[1], 3, torch.float32, "cpu"), [2, 3, 1]
    decoding = make_decoding(inputs)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        rows, states = decoding.conv_states.clone(), inputs.states.clone()
        return decoding.step(inputs, rows, states, lines, gated_delta_decode)[[0, 2]], states[[1, 2]]

    alone = run()
    decoding.qkv[1], decoding.z[1], inputs.b[1] = torch.nan, torch.nan, torch.nan
    assert all(torch.equal(now, before) for now, before in zip(run(), alone, strict=True))


def test_warming_up_touches_no_state() -> None:
    inputs = make_inputs(SIZES[0], 1, torch.float32, "cpu")
    rows, states = make_decoding(inputs).conv_states, inputs.states
    before = rows.clone(), states.clone()
    warm_up(states, rows)
    for now, was in zip((rows, states), before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), was.nan_to_num(7.0))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 16), (16, 24), (272, 16), (16, 512)])
def test_heads_that_the_kernel_does_not_take_are_refused(key_dim: int, value_dim: int) -> None:
    sentence = triton_ascend.refuses(ProbeShapes(delta=(2, 2, key_dim, value_dim)))
    assert sentence is not None and f"keys of {key_dim} and values of {value_dim}" in sentence
    assert triton_ascend.refuses(ProbeShapes(delta=(2, 2, 128, 256))) is None
    assert triton_ascend.refuses(ProbeShapes(delta=None)) is None
