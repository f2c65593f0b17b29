"""The Ascend convolution in triton-ascend's interpreter, through the public ops; see
tests/support/ops/conv_checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.causal_conv1d import triton_ascend
from tests.support.ops import conv_checks
from tests.support.ops.conv_checks import CALLS, PREFILL, SCALES, UPDATE, one_sequence, serving

# The interpreter cuts float32 to bfloat16 instead of rounding; the gate runs bfloat16 as compiled.
DTYPES = (torch.float32, torch.float16)
both_ops = pytest.mark.parametrize("name", [PREFILL, UPDATE])


@pytest.fixture(autouse=True)
def _pretend_npu() -> Iterator[None]:
    with serving(triton_ascend):
        yield


@both_ops
@pytest.mark.parametrize("seed", range(24))
def test_gives_the_float64_truth(name: str, seed: int) -> None:
    conv_checks.check_float64(name, CALLS[name](seed, dtypes=DTYPES), in_place=seed // 12 % 2 == 0)


@both_ops
def test_many_sequences_and_blocks_of_channels_with_a_tail(name: str) -> None:
    conv_checks.check_float64(name, CALLS[name](0, num_sequences=130, dim=3, dtypes=DTYPES), in_place=False)
    conv_checks.check_float64(name, CALLS[name](1, dim=2060, dtypes=DTYPES), in_place=False)


@both_ops
@pytest.mark.parametrize("scale", SCALES)
def test_the_range_of_bfloat16_is_kept(name: str, scale: float) -> None:
    for seed in range(6):
        conv_checks.check_range(name, seed, scale)


@both_ops
def test_the_order_of_sequences_does_not_matter(name: str) -> None:
    for seed in range(8):
        conv_checks.check_order(name, seed)


def test_a_prefix_cache_reads_old_states_from_any_block() -> None:
    conv_checks.check_blocks()


@both_ops
def test_states_are_read_from_other_lines(name: str) -> None:
    for seed in range(24):
        conv_checks.check_sources(name, seed)


@both_ops
def test_garbage_in_padding_rows_stays_there(name: str) -> None:
    conv_checks.check_garbage_in_padding(name)


def test_state_indices_may_be_empty() -> None:
    conv_checks.check_empty()


@pytest.mark.parametrize("seed", range(6))
def test_any_chunking_and_rejected_drafts_give_the_same_bits(seed: int) -> None:
    conv_checks.check_chunkings(*one_sequence(seed, dim=5))
    conv_checks.check_paged_chunkings(*one_sequence(seed, dim=5))
    conv_checks.check_drafts(*one_sequence(seed, dim=5))
