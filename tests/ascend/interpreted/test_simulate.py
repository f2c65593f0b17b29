"""The launches of `simulate.py`, moved as to an NPU, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.ascend.gate.cases import Case
from tests.ascend.registry import CASES
from tests.ascend.simulate import chosen, run
from tests.support.npu.triton_interpreter import multiply_bfloat16

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter
LAUNCHES = list(chosen())
# One of each kind: tables of addresses, outputs behind them, neither.
TRIED = ("lora_shrink_few", "lora_expand_few", "conv_update", "swiglu_window_few")


@pytest.fixture(autouse=True, scope="module")
def _numerics() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        multiply_bfloat16(patch)
        yield


def test_every_kernel_has_a_launch() -> None:
    assert [case.name for case, _ in LAUNCHES] == list(dict.fromkeys(case.name for case in CASES))


@pytest.mark.parametrize(("case", "name"), [one for one in LAUNCHES if one[0].name in TRIED], ids=TRIED)
def test_a_moved_launch_is_right_and_a_wrong_one_is_not(case: Case, name: str) -> None:
    moved_away = []

    def away(tensor: torch.Tensor) -> torch.Tensor:
        moved_away.append(tensor.clone())
        return moved_away[-1]

    launch = case.launches[name]()
    run(case, launch, away)
    assert moved_away
    output = next(iter(launch.expected))
    wrong = replace(launch, expected={output: launch.expected[output].float().add(1.0).to(launch.expected[output])})
    with pytest.raises(AssertionError):
        run(case, wrong, away)
