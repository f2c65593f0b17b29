"""What is launched again equals what Triton itself launches; nothing but one stream look-up for each op is asked."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from triton.runtime.driver import driver

from kernels.lora import triton_ascend
from kernels.lora.ascend import kernels
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.skip import launch_idle
from kernels.lora_window import triton_ascend as window
from kernels.lora_window import triton_ascend_kernels as window_kernels
from kernels.rotary_kv import triton_ascend as rotary
from kernels.triton_launch import Workspace
from tests.ascend.cases.lora_cases import NUM_VECTOR_CORES, ON_CHIP_BYTES, Step, make_data
from tests.support.npu.fake_launches import STREAM, Launches, made_up_launches

KERNELS = [kernel for name, kernel in vars(kernels).items() if name.startswith("lora_")]
KERNELS += [window_kernels.lora_expand_window_few, window_kernels.swiglu_window_few, rotary.rotary_kv_kernel]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    monkeypatch.setattr(triton_ascend, "chip_sizes", lambda _device: (NUM_VECTOR_CORES, ON_CHIP_BYTES))
    monkeypatch.setattr("kernels.ascend_runtime.launch_device_type", lambda: "cpu")
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


@pytest.mark.parametrize("is_gated", [False, True], ids=["expand", "gate"])
def test_a_repeated_launch_with_a_window_is_what_triton_would_launch(launches: Launches, is_gated: bool) -> None:
    step = Step([3], [[16], [8]], 16, [256, 256])
    first, second = make_data(step), make_data(step, seed=1)
    products = [torch.zeros(3, 512 + 64, dtype=torch.bfloat16) for _ in range(2)]
    outs = [torch.zeros(3, 256, dtype=torch.bfloat16) for _ in range(2)]

    def run(i: int) -> list[tuple[Any, ...]]:
        launches.made.clear()
        launches.asked.clear()
        maps = (first, second)[i].maps
        if is_gated:
            window.swiglu_window(products[i], first.stack, maps, out=outs[i])
        else:
            window.lora_expand_window(products[i], first.stack, maps)
        return list(launches.made)

    for _ in range(2):
        run(0)
    repeated = run(1)
    assert launches.asked == {"stream": 1} and len(repeated) == 1
    for key in [key for key in first.stack.kept if "launch" in str(key[0])]:
        del first.stack.kept[key]
    assert run(1) == repeated
    assert launches.asked["target"] == 1, "this time by Triton"


def call(random: Random, stacks: dict[str, LoraStack], steps: dict[tuple[int, int], LoraMaps]) -> Callable[[], None]:
    """A random call of one of the ops, of few sizes, so that many are asked for again; each has tensors of its own, and
    shares a step's maps with some others."""
    op, group = random.choice(["linear", "expand", "gate"]), random.choice([0, 1])
    sizes = num_tokens, num_spare = random.choice([1, 3, 40]), random.choice([0, 5])
    stack, dtype = stacks[f"{op} {group}"], random.choice([torch.bfloat16, torch.float32])
    if sizes not in steps or random.random() < 0.3:
        maps = make_data(Step([num_tokens], [[16]], 16, [16], num_spare=num_spare)).maps
        steps[sizes] = replace(maps, first_rows=torch.cat((maps.first_rows, maps.first_rows + 16)))
    maps = steps[sizes]
    width = sum(b.shape[1] for b in stack.b)
    product = torch.zeros(num_tokens, width + random.choice([64, 96]), dtype=torch.bfloat16)[:, : width + 64]
    x = torch.zeros(num_tokens, random.choice([512, 1024]), dtype=torch.bfloat16)[:, :512]
    out = torch.zeros(num_tokens, random.choice([width, 2 * width]), dtype=dtype)[:, :width]
    overwrite = random.choice([False, True])
    gated = torch.zeros(num_tokens, 256, dtype=dtype)
    calls: dict[str, Callable[[], None]] = {
        "linear": lambda: triton_ascend.lora_linear(x, out, stack, maps, overwrite=overwrite),
        "expand": lambda: window.lora_expand_window(product, stack, maps),
        "gate": lambda: window.swiglu_window(product, stack, maps, out=gated),
    }
    return calls[op]


@pytest.mark.parametrize("seed", range(4))
def test_random_launches_are_what_triton_would_launch(launches: Launches, seed: int) -> None:
    """In any order: of two groups, which share a step's maps, with various strides, types, paddings and modes."""
    random, stacks, num_repeated = Random(seed), {}, 0
    steps: dict[tuple[int, int], LoraMaps] = {}
    for group in (0, 1):
        for op, in_features, widths in (
            ("linear", 512, [256, 128]),
            ("expand", 16, [256, 256]),
            ("gate", 16, [256] * 2),
        ):
            stack = make_data(Step([1], [[16]] * 2, in_features, widths)).stack
            stacks[f"{op} {group}"] = replace(stack, group=group)
    largest = make_data(Step([40], [[16]] * 2, 512, [256, 128]))
    triton_ascend.lora_linear(largest.x, largest.out, largest.stack, largest.maps)  # the workspace grows no more
    for _ in range(150):
        made = call(random, stacks, steps)
        found = []
        for forgets in (False, True):
            kept = [dict(stack.kept) for stack in stacks.values()]
            for stack in stacks.values():
                for key in [key for key in stack.kept if forgets and "launch" in str(key[0])]:
                    del stack.kept[key]
            launches.made.clear()
            launches.asked.clear()
            made()
            found.append(list(launches.made))
            num_repeated += not launches.asked["target"]
            for stack, before in zip(stacks.values(), kept, strict=True):
                stack.kept.update(before)
        assert found[0] == found[1]
    assert num_repeated > 40


def test_a_workspace_that_is_outgrown_stays() -> None:
    """Captured steps, and launches that are kept, still write there."""
    workspace, device = Workspace(), torch.device("cpu")
    whole = workspace.take(device, 100)._base
    assert whole is not None
    outgrown, address = weakref.ref(whole), whole.data_ptr()
    del whole
    assert workspace.take(device, 1000).data_ptr() != address
    gc.collect()
    assert outgrown() is not None


def test_large_steps_are_not_kept(launches: Launches) -> None:
    data = make_data(Step([triton_ascend.KEPT_TOKENS + 1], [[16]], 128, [128]))
    for _ in range(2):
        launches.asked.clear()
        triton_ascend.lora_linear(data.x, data.out, data.stack, data.maps)
        assert launches.asked["target"] == 2


def test_a_launch_depends_on_nothing_that_a_later_step_changes(launches: Launches) -> None:
    """So a captured one serves all steps of its size: other adapters in the same tensors, told by the host or not, and
    other ranks and scalings give the same launch, by Triton and again."""
    step = Step([3, 5], [[16, 8]], 512, [256])
    data, other = make_data(step), make_data(Step([8], [[32]], 512, [256], num_spare=3), seed=1)

    def run() -> list[tuple[object, ...]]:
        launches.made.clear()
        triton_ascend.lora_linear(data.x, data.out, data.stack, data.maps)
        return list(launches.made)

    by_triton, again = run(), run()
    assert len(by_triton) == len(again) == 2
    for name in ("segment_starts", "places", "first_rows", "token_segment", "num_segments"):
        getattr(data.maps, name).copy_(getattr(other.maps, name))
    data.stack.ranks.zero_()
    data.stack.scalings.zero_()
    data = replace(data, maps=replace(data.maps, segments=other.maps.segments))
    assert run() == again


def test_each_op_goes_to_the_stream_of_the_moment(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the steps first, then that of a capture."""
    data = make_data(Step([3], [[16]], 512, [256]))
    streams = iter((1, 1, 2, 3))  # Triton asks for each of its two launches
    monkeypatch.setattr(driver.active, "get_current_stream", lambda _device: next(streams))
    for _ in range(3):
        triton_ascend.lora_linear(data.x, data.out, data.stack, data.maps)
    assert [arguments[3] for arguments in launches.made] == [1, 1, 2, 2, 3, 3]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("widths", [[256], [1024, 256, 256], [3072, 3072], [4096]])
def test_no_step_makes_what_a_warm_up_has_left_out(widths: list[int]) -> None:
    """A table that is copied to the device for the first time in a capture would be filled by replays alone."""
    stack = make_data(Step([1], [[16]] * len(widths), 512, widths)).stack
    stack.kept.clear()
    triton_ascend.warm_up(stack, 300, torch.bfloat16, 4, is_embedding=False)
    tables = {key for key in stack.kept if key[0] != triton_ascend.LINEAR}
    for num_tokens in range(1, 301):
        launch_idle(triton_ascend.lora_linear, stack, [num_tokens], torch.bfloat16, 4, is_embedding=False)
    assert {key for key in stack.kept if key[0] != triton_ascend.LINEAR} == tables


CACHES = ("k_cache", "v_cache")


def rotation(seed: int, *, num_tokens: int = 3, is_normed: bool = True, heads: int = 4) -> dict[str, Any]:
    """Arguments of the rotation; each call's tensors lie elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"qkv": (num_tokens, heads + 4, 64), "cos": (num_tokens, 1, 64), "sin": (num_tokens, 1, 64),
              "k_cache": (3, 16, 2, 64), "v_cache": (3, 16, 2, 64), "head_weight": (heads + 2, 64)}  # fmt: skip
    tensors: dict[str, Any] = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if not is_normed:
        tensors["head_weight"] = None
    return tensors | {"slot_mapping": torch.arange(16, 16 + num_tokens), "eps": 1e-6}


@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
def test_a_repeated_rotation_is_what_triton_would_launch(launches: Launches, is_normed: bool) -> None:
    first, second = rotation(0, is_normed=is_normed), rotation(1, is_normed=is_normed)
    for _ in range(2):
        rotary.rotary_kv(**first)
    launches.made.clear()
    launches.asked.clear()
    q = rotary.rotary_kv(**second)
    assert launches.asked == {"stream": 1}
    (repeated,) = launches.made
    assert repeated[3] == STREAM
    launches.made.clear()
    tensors = [second[name] for name in ("qkv", "cos", "sin", "head_weight", "slot_mapping")]
    rotary.plan(*tensors, q, second["k_cache"], second["v_cache"], second["eps"]).run()
    assert launches.asked["target"] == 1, "this time by Triton"
    assert launches.made == [repeated]


def test_other_rotations_are_launches_of_their_own(launches: Launches) -> None:
    """Each of these calls differs from the first in one thing that a launch depends on."""
    rotary.rotary_kv(**rotation(0))
    wide = torch.zeros(3, 9, 64)[:, :8]
    calls = {
        "tokens": rotation(0, num_tokens=4),
        "heads": rotation(0, heads=6),
        "no norm": rotation(0, is_normed=False),
        "eps": rotation(0) | {"eps": 1e-5},
        "stride": rotation(0) | {"qkv": wide},
        "type": {name: value.half() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                 for name, value in rotation(0).items()},
        "type of the weights": rotation(0) | {"head_weight": torch.zeros(6, 64, dtype=torch.float16)},
        "blocks": rotation(0) | {name: torch.zeros(3, 32, 2, 64) for name in CACHES},
        "caches head by head": rotation(0) | {name: torch.zeros(3, 2, 16, 64).transpose(1, 2) for name in CACHES},
        "share": rotation(0) | {"cos": torch.zeros(3, 1, 32), "sin": torch.zeros(3, 1, 32)},
        "large": rotation(0, num_tokens=rotary.KEPT_TOKENS + 1) ,
    }  # fmt: skip
    for name, call in calls.items():
        launches.asked.clear()
        rotary.rotary_kv(**call)
        assert launches.asked["target"] == 1, f"{name}: was launched by Triton"
    launches.asked.clear()
    rotary.rotary_kv(**calls["large"])
    assert launches.asked["target"] == 1, "what large steps launch is not kept"
