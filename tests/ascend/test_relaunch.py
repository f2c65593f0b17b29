"""What is launched again equals what Triton itself launches; nothing but one stream look-up for each op is asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.lora import triton_ascend, triton_ascend_kernels
from tests.ascend.lora_cases import NUM_VECTOR_CORES, ON_CHIP_BYTES, Step, make_data
from tests.support.made_up_launches import STREAM, Launches, made_up_launches

KERNELS = [kernel for name, kernel in vars(triton_ascend_kernels).items() if name.startswith("lora_")]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    monkeypatch.setattr(triton_ascend, "_chip", lambda _device: (NUM_VECTOR_CORES, ON_CHIP_BYTES))
    monkeypatch.setattr("kernels.ascend_runtime._launch_device_type", lambda: "cpu")
    with made_up_launches(*KERNELS) as made:
        yield made


@pytest.mark.parametrize("num_tokens", [1, 40, 200])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_repeated_launch_is_what_triton_would_launch(launches: Launches, num_tokens: int, overwrite: bool) -> None:
    step = Step([num_tokens], [[16], [8]], 512, [256, 128])
    first, second = make_data(step), make_data(step, seed=1)
    stack = first.stack
    for _ in range(2):
        triton_ascend.lora_linear(first.x, first.out, stack, first.maps, overwrite=overwrite)
    launches.made.clear()
    launches.asked.clear()
    triton_ascend.lora_linear(second.x, second.out, stack, second.maps, overwrite=overwrite)
    assert launches.asked == {"stream": 1}
    repeated = list(launches.made)
    launches.made.clear()
    for key in [key for key in stack.kept if key[0] == triton_ascend.LINEAR]:
        del stack.kept[key]
    triton_ascend.lora_linear(second.x, second.out, stack, second.maps, overwrite=overwrite)
    assert launches.asked["device"] > 1, "this time by Triton"
    assert len(repeated) == 2
    assert repeated == launches.made
    assert all(arguments[3] == STREAM for arguments in repeated)


def test_other_sizes_and_types_are_launches_of_their_own(launches: Launches) -> None:
    """Each of these calls differs from the first in one thing that a launch depends on."""
    data = make_data(Step([3], [[16]], 512, [256]))
    triton_ascend.lora_linear(data.x, data.out, data.stack, data.maps)
    wider = torch.empty(3, 1024, dtype=data.x.dtype)
    longer = make_data(Step([4], [[16]], 512, [256]))
    calls = {
        "stride of x": (wider[:, :512], data.out, data.maps),
        "stride of out": (data.x, wider[:, :256], data.maps),
        "type of out": (data.x, data.out.float(), data.maps),
        "tokens": (longer.x, longer.out, longer.maps),
        "padding": (data.x, data.out, make_data(Step([3], [[16]], 512, [256], num_spare=5)).maps),
    }
    for name, (x, out, maps) in calls.items():
        launches.asked.clear()
        triton_ascend.lora_linear(x, out, data.stack, maps)
        assert launches.asked["target"] == 2, f"{name}: both were launched by Triton"


def test_large_steps_are_not_kept(launches: Launches) -> None:
    data = make_data(Step([triton_ascend.KEPT_TOKENS + 1], [[16]], 128, [128]))
    for _ in range(2):
        launches.asked.clear()
        triton_ascend.lora_linear(data.x, data.out, data.stack, data.maps)
        assert launches.asked["target"] == 2
