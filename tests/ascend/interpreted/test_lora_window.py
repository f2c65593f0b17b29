"""The window's Ascend kernels in triton-ascend's interpreter, through the public ops, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings

from kernels.lora import triton_ascend as lora
from kernels.lora.skip import idle_maps
from kernels.lora_window import ops
from kernels.platform import detect, installed
from tests.ops.lora.test_lora import expected_linear
from tests.ops.lora.test_lora_window import assert_close, expected_gated, steps, with_h
from tests.support.npu.triton_interpreter import round_floats
from tests.support.ops.lora_cases import Case, Step, make_step

NUM_VECTOR_CORES = 3
UNIFIED_BUFFER_BYTES = 192 * 1024
# The interpreter is too slow for shrinking a failing step.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.fixture(autouse=True, scope="module")
def _pretend_npu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        round_floats(patch)
        patch.setattr(lora, "chip_sizes", lambda _device: (NUM_VECTOR_CORES, UNIFIED_BUFFER_BYTES))
        with installed(detect("cpu").with_fallback("lora_window", "triton_ascend", None)):
            yield


def made(case: Case, pad_to: int) -> Step:
    """A launch refuses empty tensors, of which an engine has none: there is a place, and room for a segment."""
    if not case.lengths:
        case = dataclasses.replace(case, lengths=(0,), ranks=((3,),) * len(case.widths))
    return make_step(case, pad_to=max(pad_to, 1))


@settings(max_examples=20, deadline=None, phases=PHASES)
@given(step=steps())
def test_projection_equals_float64(step: tuple[Case, int]) -> None:
    one = made(*step)
    product = with_h(one)
    before, columns = product.clone(), one.out.shape[1]
    ops.lora_expand_window(product, one.stack, one.maps)
    assert_close(product[:, :columns], expected_linear(one))
    torch.testing.assert_close(product[:, columns:], before[:, columns:], rtol=0, atol=0, equal_nan=True)
    base = one.maps.token_segment < 0
    assert torch.equal(product[base, :columns], one.out[base]), "rows of base tokens changed"


@settings(max_examples=20, deadline=None, phases=PHASES)
@given(step=steps(num_slices=2))
def test_gate_equals_float64(step: tuple[Case, int]) -> None:
    one = made(*step)
    product = with_h(one)
    before = product.clone()
    assert_close(ops.swiglu_window(product, one.stack, one.maps), expected_gated(one))
    torch.testing.assert_close(product, before, rtol=0, atol=0, equal_nan=True)


def test_rows_of_others_do_no_harm() -> None:
    """NaN in the rows of an adapter that has no token in the step, and in the tokens of the base."""
    step = make_step(Case(64, (32, 32), ((16, 20, 16), (16, 20, 3)), (3, 0, 2), 2, interleaved=True))
    clean, clean_gate = expected_linear(step), expected_gated(step)
    step.x[-2:] = torch.nan
    product = with_h(step)
    assert_close(ops.swiglu_window(product, step.stack, step.maps), clean_gate)
    ops.lora_expand_window(product, step.stack, step.maps)
    assert_close(product[:, :64], clean)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 5])
def test_any_number_of_slices(num_slices: int) -> None:
    step = make_step(Case(64, (24,) * num_slices, ((16, 7, 33),) * num_slices, (3, 1, 2), 1, interleaved=True))
    product = with_h(step)
    ops.lora_expand_window(product, step.stack, step.maps)
    assert_close(product[:, : 24 * num_slices], expected_linear(step))


def test_nothing_is_compiled_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "chip_sizes", lambda _device: (40, UNIFIED_BUFFER_BYTES))
    asked: set[tuple[object, ...]] = set()

    def variant(launch: lora.LoraLaunch) -> None:
        constants = {name: value for name, value in launch.arguments.items() if name.isupper()}
        asked.add((launch.kernel, *sorted(constants.items())))

    monkeypatch.setattr(lora.LoraLaunch, "run", variant)
    stacks = [
        make_step(Case(64, widths, ((16,),) * len(widths), (1,), interleaved=True)).stack
        for widths in ((4096, 1024, 1024), (4096,), (96, 96))
    ]
    ops.warm_up(stacks, 700, torch.float32, gated=stacks[2:])
    warm, tables = set(asked), [set(stack.kept) for stack in stacks]
    for stack in stacks:
        for num_tokens in range(1, 65):
            maps = idle_maps(num_tokens, 8, stack)
            product = torch.zeros(num_tokens, stack.output_width + 16 * len(stack.b))
            ops.lora_expand_window(product, stack, maps)
            if stack is stacks[2]:
                ops.swiglu_window(product, stack, maps)
    assert asked == warm and [set(stack.kept) for stack in stacks] == tables
    assert len(warm) == 5, "one projection has another block of columns in steps of two tiles"
