"""The Ascend kernels of adapters of experts in triton-ascend's interpreter, through the public op, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kernels.ascend_relaunch import AscendLaunch
from kernels.expert_lora import ops, reference
from kernels.platform import detect, installed
from tests.ops.test_experts import make_adapted
from tests.support.npu.triton_interpreter import round_floats
from tests.support.ops.lora_cases import Case
from tests.support.tiers import examples
from tests.tolerances import OP

NUM_VECTOR_CORES = 3
# The interpreter is too slow for shrinking a failing step.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.fixture(autouse=True, scope="module")
def _pretend_npu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        round_floats(patch)
        npu = replace(detect("cpu"), num_cores=NUM_VECTOR_CORES)
        with installed(npu.with_fallback("expert_lora", "triton_ascend", None)):
            yield


@st.composite
def steps(draw: st.DrawFn) -> tuple[Case, int, int]:
    """A step, its experts, and those of a token; ranks are rows of all experts."""
    num_experts, num_slices = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    ranks = tuple(tuple(num_experts * draw(st.integers(0, 34)) for _ in lengths) for _ in range(num_slices))
    width, num_base = draw(st.sampled_from([8, 40, 777])), draw(st.integers(0, 2))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    case = Case(draw(st.sampled_from([16, 52, 600])), (width,) * num_slices, ranks, tuple(lengths), num_base, dtype)
    return case, num_experts, draw(st.integers(1, num_experts))


@settings(max_examples=examples(20), deadline=None, phases=PHASES)
@given(made=steps())
def test_each_pair_equals_float64(made: tuple[Case, int, int]) -> None:
    case, num_experts, num_chosen = made
    step, pairs, x = make_adapted(case, num_experts, "cpu", num_chosen)
    is_base = pairs.tokens >= sum(case.lengths)
    x[is_base] = torch.nan
    out = torch.randn(len(x), sum(case.widths), generator=torch.Generator().manual_seed(5)).to(case.dtype)
    expected, before = out.double(), out.clone()
    reference.expert_lora(x, expected, step.stack, step.maps, pairs)
    ops.expert_lora(x, out, step.stack, step.maps, pairs)
    absolute, relative = OP[case.dtype]
    torch.testing.assert_close(out.double(), expected, atol=absolute, rtol=relative)
    assert torch.equal(out[is_base], before[is_base])


def test_nothing_is_compiled_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a table of addresses made, which would be copied to the device in a capture."""
    asked: set[tuple[object, ...]] = set()

    def variant(launch: AscendLaunch) -> None:
        assert launch.grid == (NUM_VECTOR_CORES,)
        types = [(name, one.dtype) for name, one in launch.arguments.items() if isinstance(one, torch.Tensor)]
        constants = [(name, one) for name, one in launch.arguments.items() if name.isupper()]
        asked.add((launch.kernel, *types, *constants))

    monkeypatch.setattr(AscendLaunch, "run", variant)
    gate_up, down = (Case(64, (96, 96), ((14,), (21,)), (5,), 1), Case(96, (700,), ((28,),), (5,), 1))
    made = [make_adapted(case, 7, "cpu") for case in (gate_up, down)]
    ops.warm_up([step.stack for step, *_ in made], torch.float32, 7)
    warm, tables = set(asked), [set(step.stack.kept) for step, *_ in made]
    for step, pairs, x in made:
        ops.expert_lora(x, torch.zeros(len(x), step.stack.output_width), step.stack, step.maps, pairs)
    assert asked == warm and [set(step.stack.kept) for step, *_ in made] == tables
    assert len(warm) == 4
