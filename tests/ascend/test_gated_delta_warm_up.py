"""What the gated delta rule's warm-up compiles for an NPU serves every step after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.gated_delta import triton_ascend, triton_ascend_vector
from kernels.gated_delta.ops import gated_delta_prefill, warm_up
from kernels.gated_delta.triton_ascend_chunks import KERNELS
from kernels.platform import contract, in_use, installed
from tests.ascend.cases.gated_delta_prefill_cases import Step, make_data
from tests.support.npu.fake_launches import Launches, made_up_launches

SIZES = (2, 4, 128, 128)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    monkeypatch.setattr("kernels.ascend_runtime.launch_device_type", lambda: "cpu")
    platform = replace(in_use(torch.device("cpu")), num_cores=40)
    serving = platform.with_fallback("gated_delta", "triton_ascend", "for the test")
    with (
        installed(serving, "cpu"),
        made_up_launches(triton_ascend.gated_delta_decode, triton_ascend.gated_delta_walk, *KERNELS) as made,
    ):
        yield made


@pytest.mark.parametrize("lengths", [(1,), (16, 1), (64,), (65,), (1, 0, 2100, 16, 128)], ids=str)
def test_prompts_of_any_length_compile_nothing_after_the_warm_up(launches: Launches, lengths: tuple[int, ...]) -> None:
    """Numbers that are 1 or a multiple of 16, of which Triton makes variants unless told not to, among them."""
    step = Step(lengths, tuple(range(1, len(lengths) + 1)), (True,) * len(lengths), SIZES)
    data = make_data(replace(step, lengths=(1,) * len(lengths)))
    num_tokens = sum(lengths)
    qkv, gates = data.qkv[:1].repeat(num_tokens, 1), data.b[:1].repeat(num_tokens, 1)
    conv_states = torch.zeros(len(data.states), 3, qkv.shape[1], dtype=qkv.dtype)
    num_compiled = warm_up(data.states, conv_states)
    assert num_compiled == len(KERNELS) + 3, "one of each, and the doubling at two widths"
    launches.made.clear()
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    where = (torch.tensor(starts, dtype=torch.int32), data.lines, data.continued)
    weights = (data.a_log, data.dt_bias)
    gated_delta_prefill(qkv, gates, gates, *weights, data.states, *where, query_starts=starts)
    assert launches.made
    assert triton_ascend.compiled_count() == num_compiled


@pytest.mark.usefixtures("launches")
def test_where_prompts_are_walked_beside_decode_no_kernel_is_compiled_or_counted_twice() -> None:
    """As where a kernel for chunks has failed its probe."""
    data = make_data(Step((1,), (1,), (True,), SIZES))
    conv_states = torch.zeros(len(data.states), 3, data.qkv.shape[1], dtype=data.qkv.dtype)
    device = torch.device("cpu")
    regimes = {"prefill": "triton_ascend_vector"}
    with installed(in_use(device).with_fallback("gated_delta", "triton_ascend", "for the test", regimes), "cpu"):
        assert triton_ascend_vector.CONTRACT.warm_up_and_count(data.states, conv_states) == 2, "decode and the walk"
        assert contract("gated_delta", device).compiled_count() == 2
