"""The causal convolution for Ascend NPUs, its Triton source run by Triton's interpreter on a CPU.

What the Ascend compiler makes of it is checked by the gate under tests/ascend, on few calls; here are many.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from kernels.causal_conv1d import reference
from tests.support.conv_cases import Call, float64_truth, prefill_call, update_call
from tests.tolerances import OP

pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("NOT RUN: Triton's interpreter is off", allow_module_level=True)

from kernels.causal_conv1d import triton_ascend

# The interpreter cuts float32 to bfloat16 instead of rounding.
DTYPES = (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def _three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small chip, so that a program has several items."""
    monkeypatch.setattr(triton_ascend, "in_use", lambda _device: SimpleNamespace(num_cores=3))


def check_call(name: str, call: Call, *, in_place: bool) -> None:
    expected, expected_states = float64_truth(getattr(reference, name), call, in_place=in_place)
    call = {**call, "x": call["x"].clone()}
    out = call["x"] if in_place else torch.full_like(call["x"], torch.nan)
    result = getattr(triton_ascend, name)(**call, out=out)
    absolute, relative = OP[result.dtype]
    bound = absolute * call["weight"].shape[0]
    torch.testing.assert_close(result.double(), expected, atol=bound, rtol=relative)
    if expected_states is not None:
        assert torch.equal(call["conv_states"], expected_states)


@pytest.mark.parametrize("seed", range(24))
def test_prefill_gives_the_float64_truth(seed: int) -> None:
    check_call("causal_conv1d_prefill", prefill_call(seed, dtypes=DTYPES), in_place=seed % 3 == 0)


@pytest.mark.parametrize("seed", range(24))
def test_update_gives_the_float64_truth(seed: int) -> None:
    check_call("causal_conv1d_update", update_call(seed, dtypes=DTYPES), in_place=seed % 3 == 0)
