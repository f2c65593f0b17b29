"""The Ascend decode step of the gated delta rule in triton-ascend's interpreter, through the public op."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from kernels.gated_delta import reference, triton_ascend
from kernels.gated_delta.ops import gated_delta_decode, warm_up
from kernels.platform import in_use, installed
from kernels.probe.shapes import ProbeShapes
from tests.ops.test_gated_delta import assert_close, make_decoding, make_inputs
from tests.support.triton_interpreter import round_bfloat16
from tests.tolerances import OP

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(2, 2, 16, 16), (2, 4, 48, 80), (1, 3, 32, 96), (1, 1, 128, 256)]


@pytest.fixture(autouse=True)
def _pretend_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few cores, so that a program has several items."""
    round_bfloat16(monkeypatch)
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
