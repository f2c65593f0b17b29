"""The implementations for devices without a kernel of their own, by the checks of the ops they serve. Run on a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.causal_conv1d import any_device as any_device_conv
from kernels.causal_conv1d import ops as causal_conv1d
from kernels.lora import any_device, ops
from kernels.platform import detect, implementation, installed
from tests.ops.lora import test_lora as lora
from tests.support.ops import conv_checks
from tests.support.ops.conv_cases import prefill_call, update_call
from tests.support.ops.lora_cases import Case, make_step
from tests.support.tiers import examples
from tests.tolerances import OP


@pytest.fixture(autouse=True)
def _any_device_serves() -> Iterator[None]:
    platform = detect("cpu")
    implementations = {**platform.implementations, "lora": "any_device"}
    with installed(replace(platform, implementations=MappingProxyType(implementations))):
        assert implementation("lora", torch.device("cpu")) is any_device
        yield


@settings(max_examples=examples(120), deadline=None)
@given(case=lora.cases(), overwrite=st.booleans())
def test_linear_equals_float64(case: Case, overwrite: bool) -> None:
    lora.check_linear(case, "cpu", overwrite=overwrite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", lora.POPULARITIES)
def test_popularity_at_decode_and_prefill_sizes(name: str, dtype: torch.dtype) -> None:
    lora.test_popularity_at_decode_and_prefill_sizes(name, dtype, "cpu")


@settings(max_examples=examples(40), deadline=None)
@given(case=lora.cases())
def test_shrink_then_expand_equals_float64(case: Case) -> None:
    step = make_step(case)
    expected = lora.expected_linear(step)
    out = step.out.clone()
    ops.lora_expand(ops.lora_shrink(step.x, step.stack, step.maps), out, step.stack, step.maps)
    lora.assert_right(out, expected, step, step.out)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 1000), overwrite=st.booleans())
def test_row_index_equals_tokens_in_order(seed: int, overwrite: bool) -> None:
    rng = random.Random(seed)
    case = Case(24, (16, 8), ((4, 0, 9), (16, 3, 1)), (rng.randrange(4), 2, rng.randrange(5)), num_base_tokens=2)
    step = make_step(case)
    order = torch.randperm(step.maps.num_tokens, generator=torch.Generator().manual_seed(seed))
    x, out = torch.empty_like(step.x), torch.empty_like(step.out)
    x[order], out[order] = step.x, step.out
    ops.lora_linear(x, out, step.stack, step.maps, row_index=order, overwrite=overwrite)
    lora.assert_right(out[order], lora.expected_linear(step, overwrite=overwrite), step, step.out)


@pytest.mark.parametrize(
    "check",
    [
        lora.test_hand_worked_step,
        lora.test_shrink_equals_the_reference,
        lora.test_adapter_outside_the_group_is_skipped,
        lora.test_slices_between_targets_are_untouched,
        lora.test_strided_input_and_output,
        lora.test_stale_plan_is_not_reused,
    ],
)
def test_as_every_implementation(check: object) -> None:
    check("cpu")  # type: ignore[operator]


@pytest.mark.parametrize("overwrite", [False, True])
def test_embedding_equals_float64(overwrite: bool) -> None:
    lora.test_embedding_equals_float64(overwrite, "cpu")


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_rows_of_nobody_reach_no_token(garbage: float) -> None:
    """What adapters have left behind, or never written, may be anything."""
    step = make_step(Case(32, (16,), ((3, 0, 8),), (2, 1, 2), num_base_tokens=1))
    expected = lora.expected_linear(step)
    taken = {
        row
        for segment in step.maps.segments
        for row in range(segment.first_rows[0], segment.first_rows[0] + step.stack.host_ranks[0][segment.place])
    }
    free = [row for row in range(len(step.stack.a[0])) if row not in taken]
    step.stack.a[0][free], step.stack.b[0][free] = garbage, garbage
    out = step.out.clone()
    ops.lora_linear(step.x, out, step.stack, step.maps)
    lora.assert_right(out, expected, step, step.out)


def test_an_adapter_that_overflows_spoils_its_own_tokens_only() -> None:
    step = make_step(Case(32, (16,), ((4, 4),), (2, 2), num_base_tokens=1))
    expected = lora.expected_linear(step)
    step.stack.a[0][step.maps.segments[0].first_rows[0]] = float("inf")
    out = step.out.clone()
    ops.lora_linear(step.x, out, step.stack, step.maps)
    assert not out[:2].isfinite().all()
    absolute, relative = OP[torch.float32]
    torch.testing.assert_close(out[2:].double(), expected[2:], atol=absolute, rtol=relative)


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 2**31), in_place=st.booleans())
def test_convolution_gives_the_float64_truth(seed: int, in_place: bool) -> None:
    with conv_checks.serving(any_device_conv):
        for name, call in ((conv_checks.PREFILL, prefill_call(seed)), (conv_checks.UPDATE, update_call(seed))):
            conv_checks.check_float64(name, call, in_place=in_place)


def test_convolution_reads_states_from_other_lines_and_other_blocks() -> None:
    with conv_checks.serving(any_device_conv):
        conv_checks.check_blocks()
        for seed in range(48):
            for name in (conv_checks.PREFILL, conv_checks.UPDATE):
                conv_checks.check_sources(name, seed)


@pytest.mark.parametrize("name", [conv_checks.PREFILL, conv_checks.UPDATE])
def test_convolution_waits_for_nothing(name: str) -> None:
    """Tensors without contents stand for a device's, in every form of a call: who asks for a value of theirs fails."""
    platform = detect("cpu").with_fallback("causal_conv1d", "any_device", "for the test")
    with installed(platform, "meta"):
        for seed in range(24):
            getattr(causal_conv1d, name)(**conv_checks.moved(conv_checks.CALLS[name](seed), "meta"))
