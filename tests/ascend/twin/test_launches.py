"""Which of the kernels for Ascend a step launches, and that none of them is compiled in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch

from kernels.lora.triton_ascend import LoraLaunch
from tests.ascend.twin.stand_ins.install import npu_path
from tests.ascend.twin.test_service import SIZES, config
from tests.support.engine.engine_parity import Request, build_engine, make_world
from tests.support.models.tiny_models import LINEAR_MODULES

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
SPECS = {
    "rows": {"rank": 5, "target_modules": LINEAR_MODULES["qwen3"]},
    "dora": {"rank": 3, "target_modules": LINEAR_MODULES["qwen3"], "use_dora": True},
}


def variant(launch: LoraLaunch) -> tuple[object, ...]:
    """Launches that are equal in this share a compiled kernel: its types of tensors, and its constants, which kernels
    write in capitals."""
    named = sorted(launch.arguments.items())
    types = tuple(value.dtype for _, value in named if isinstance(value, torch.Tensor))
    return launch.kernel, types, tuple((name, value) for name, value in named if name.isupper())


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[tuple[object, ...]]]:
    """Variants of the LoRA kernels that the block launches, in order."""
    made: list[tuple[object, ...]] = []
    run = LoraLaunch.run

    def noted(launch: LoraLaunch) -> object:
        made.append(variant(launch))
        return run(launch)

    with mock.patch.object(LoraLaunch, "run", noted):
        yield made


def test_decode_steps_need_no_shrink_and_no_step_compiles(tmp_path: Path) -> None:
    """Magnitudes come between the expand of gate and up and the gate, which are two kernels then."""
    sizes = {**SIZES["qwen3"], "num_hidden_layers": 1}
    world = make_world("qwen3", tmp_path, "cpu", specs=SPECS, **sizes)
    with npu_path(float32_attention=True):
        settings = config(world, num_blocks=9, token_budget=64)
        engine = build_engine(msgspec.structs.replace(settings, side_bytes=1 << 20))
        try:
            with recorded_launches() as warmed:
                engine.compile_kernels()
            kernels: dict[tuple[str, bool], set[object]] = {}
            for adapter in SPECS:
                for i in range(2):
                    engine.submit(Request(f"{adapter} {i}", adapter, (9, 8, 7), 3).submit(world))
                while engine.num_requests:
                    with recorded_launches() as launched:
                        engine.step()
                    assert set(launched) <= set(warmed), "compiled in a step"
                    is_decode = engine.step_records[-1].num_prefill_tokens == 0
                    kernels[adapter, is_decode] = {kernel for kernel, *_ in launched}
        finally:
            engine.close()
    prompts, embedding = {"lora_shrink_few", "lora_expand_few"}, {"lora_expand_few"}
    assert kernels["rows", False] == kernels["dora", False] == prompts
    assert kernels["rows", True] == {"lora_expand_window_few", "swiglu_window_few"} | embedding
    assert kernels["dora", True] == {"lora_expand_window_few"} | embedding
