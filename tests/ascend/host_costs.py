"""What one decode step asks of the host on an Ascend NPU: torch operators, Triton launches, and Python microseconds.

    .venv-ascend/bin/python -m tests.ascend.host_costs [--tokens 1 8 64] [--out bench/out/ascend_host.json]

Needs no NPU: runs in the environment of `scripts/test-ascend.sh`. Three parts, none of which a device would change:

- the Python of LoRA and of the rotation, microseconds of this process for each launch, over the layers of an 8B model
  (36, q/k/v packed, gate/up packed), with triton-ascend's driver made up (`tests/support/npu/fake_launches.py`); with
  the shrink in the base products (`kernels.lora_window`), as decode steps have it, and without;
- Triton launches of a layer in that step;
- torch operators of a layer of Qwen3, without Triton's launches: counted in the twin (`tests/ascend/twin`) as the
  difference between a model of three layers and one of two; views and fresh memory, which the device never sees, apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NUM_LAYERS = 36
PROJECTIONS_8B = {"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate/up": (4096, (12288, 12288)),
                  "down": (12288, (4096,))}  # fmt: skip
BARS = {"microseconds_per_launch": 8.0, "launches_per_layer": 6, "torch_operators_per_layer": 10}
COUNT_ARGUMENT = "--count-operators"
# Operators that launch nothing: they give another view of the same memory, or fresh memory as it is.
VIEWS = frozenset({"view", "_unsafe_view", "reshape", "slice", "select", "transpose", "t", "permute", "unsqueeze",
                   "squeeze", "expand", "split", "split_with_sizes", "chunk", "unbind", "as_strided", "alias", "detach",
                   "unfold", "new_empty", "empty", "narrow"})  # fmt: skip


def measure_launches(num_tokens: int, *, has_window: bool) -> dict[str, float]:
    """Launches of a layer, and the least Python microseconds for one of them, checks included.

    has_window  the shrink is part of the base products, which are not among the launches
    """
    from kernels import ascend_runtime, platform
    from kernels.lora import ops, triton_ascend
    from kernels.lora.ascend import kernels as triton_ascend_kernels
    from kernels.lora_window import ops as window_ops
    from kernels.lora_window import triton_ascend_kernels as window_kernels
    from kernels.rotary_kv import triton_ascend as rotary
    from kernels.rotary_kv.ops import rotary_kv
    from tests.ascend.cases.lora_cases import NUM_VECTOR_CORES, ON_CHIP_BYTES, Step, make_data
    from tests.support.npu.fake_launches import made_up_launches

    kernels = [kernel for name, kernel in vars(triton_ascend_kernels).items() if name.startswith("lora_")]
    kernels += [rotary.rotary_kv_kernel, window_kernels.lora_expand_window_few, window_kernels.swiglu_window_few]
    npu = replace(platform.detect("cpu"), device="npu", num_cores=NUM_VECTOR_CORES)
    for op in ("lora", "lora_window", "rotary_kv"):
        npu = npu.with_fallback(op, "triton_ascend", None)
    with (
        platform.installed(npu, "cpu"),
        mock.patch.object(triton_ascend, "chip_sizes", return_value=(NUM_VECTOR_CORES, ON_CHIP_BYTES)),
        mock.patch.object(ascend_runtime, "launch_device_type", return_value="cpu"),
        made_up_launches(*kernels) as launches,
    ):
        steps = [Step([1] * num_tokens, [[16] * num_tokens] * len(widths), inputs, widths)
                 for inputs, widths in PROJECTIONS_8B.values()]  # fmt: skip
        projections = [make_data(step) for step in steps]
        products = [torch.zeros(num_tokens, sum(data.step.widths) + 16 * len(data.step.widths), dtype=data.out.dtype)
                    for data in projections]  # fmt: skip
        rotation = _rotation(num_tokens)

        def run_step() -> None:
            for _ in range(NUM_LAYERS):
                for data, product in zip(projections, products, strict=True):
                    if not has_window:
                        ops.lora_linear(data.x, data.out, data.stack, data.maps)
                    elif len(data.step.widths) == 2:
                        window_ops.swiglu_window(product, data.stack, data.maps)
                    else:
                        window_ops.lora_expand_window(product, data.stack, data.maps)
                rotary_kv(**rotation)

        run_step()
        launches.made.clear()
        run_step()
        num_launches = len(launches.made)
        launches.is_recording = False
        seconds = []
        for _ in range(20):
            start = time.process_time()
            run_step()
            seconds.append(time.process_time() - start)
    return {
        "launches_per_layer": num_launches / NUM_LAYERS,
        "microseconds_per_launch": round(min(seconds) / num_launches * 1e6, 2),
        "microseconds_per_step": round(min(seconds) * 1e6),
    }


def _rotation(num_tokens: int) -> dict[str, Any]:
    """Arguments of `rotary_kv`: 32 heads and 8 of keys and values, normed."""
    num_heads, kv_heads, head_dim = 32, 8, 128

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    return {
        "qkv": zeros(num_tokens, num_heads + 2 * kv_heads, head_dim),
        "cos": zeros(num_tokens, 1, head_dim),
        "sin": zeros(num_tokens, 1, head_dim),
        "k_cache": zeros(2, kv_heads, 128, head_dim).transpose(1, 2),
        "v_cache": zeros(2, kv_heads, 128, head_dim).transpose(1, 2),
        "slot_mapping": torch.arange(num_tokens),
        "head_weight": zeros(num_heads + kv_heads, head_dim),
        "eps": 1e-6,
    }


class _Counted(TorchDispatchMode):
    """Counts operators, those within an operator not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_operators() -> dict[str, Any]:
    """Operators of a layer by name, of a decode step of eight adapted tokens. In a process that interprets Triton."""
    of_depth = {depth: _operators_of_a_step(depth) for depth in (2, 3)}
    of_layer = dict(of_depth[3] - of_depth[2])
    return {
        "torch_operators_per_layer": sum(count for name, count in of_layer.items() if name not in VIEWS),
        "views_per_layer": sum(count for name, count in of_layer.items() if name in VIEWS),
        "operators": of_layer,
    }


def _operators_of_a_step(num_layers: int) -> Counter[str]:
    from tests.ascend.twin.stand_ins.install import import_torch_npu, npu_path, prepare_interpreter

    import_torch_npu()
    prepare_interpreter()
    from kernels.ascend_relaunch import AscendLaunch
    from kernels.lora import triton_ascend
    from tests.ascend.twin.test_service import SIZES, config
    from tests.support.engine.engine_parity import Request, build_engine, make_world

    with tempfile.TemporaryDirectory() as directory, npu_path():
        sizes = {**SIZES["qwen3"], "num_hidden_layers": num_layers}
        world = make_world("qwen3", Path(directory), "cpu", dtype=torch.bfloat16, **sizes)
        engine = build_engine(config(world, num_blocks=20, token_budget=64))
        try:
            for i in range(8):
                engine.submit(Request(f"r{i}", "all", (5 + i, 9, 8, 7), 12).submit(world))
            for _ in range(4):
                engine.step()
            launches = (triton_ascend.LoraLaunch, AscendLaunch)
            no_launches = [mock.patch.object(launch, "run", return_value=None) for launch in launches]
            with no_launches[0], no_launches[1], _Counted() as counted:
                engine.step()
        finally:
            engine.close()
    return counted.counts


def main() -> None:
    """Print the figures beside their bars and write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.ascend.host_costs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--out", type=Path, default=Path("bench/out/ascend_host.json"))
    parser.add_argument(COUNT_ARGUMENT, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.count_operators:
        print(json.dumps(count_operators()))
        return
    result: dict[str, Any] = {}
    for tokens in arguments.tokens:
        result[f"{tokens} tokens"] = measure_launches(tokens, has_window=True)
        result[f"{tokens}, no window"] = measure_launches(tokens, has_window=False)
    result["a layer of Qwen3"] = _counted_elsewhere()
    for name, figures in result.items():
        for what, value in figures.items():
            bar = f" (bar {BARS[what]})" if what in BARS else ""
            print(f"{name:18} {what:28} {value}{bar}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1))


def _counted_elsewhere() -> dict[str, Any]:
    """`count_operators` of a process that interprets Triton and finds torch_npu beside the environment."""
    torch_npu = Path(sys.prefix) / "torch_npu"
    others = {"TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": f"{Path.cwd()}:{torch_npu}"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.ascend.host_costs", COUNT_ARGUMENT]
    done = subprocess.run(command, env={**os.environ, **others}, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
