"""Warm up with kernels compiled ahead, without a GPU, twice; print what was compiled and launched by this process.

Run as a script, without TRITON_INTERPRET: which of the two Triton is, is settled when it is imported. TRITON_CACHE_DIR
names an empty directory.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from kernels import platform
from kernels.compile_ahead import asked_for, warm_up_ahead
from kernels.lora import ops, triton_cuda
from tests.support.ops.count_lora_variants import NoDriver, make_stack


def main() -> None:
    driver.set_active(NoDriver())  # type: ignore[arg-type]
    platform.install(platform.detect("cpu").with_fallback("lora", "triton_cuda", None))
    here: Counter[bool] = Counter()
    launches: list[Any] = []

    def listen(*, cache_hit: bool, **_rest: Any) -> None:
        here[cache_hit] += 1

    knobs.compilation.listener = listen
    CompiledKernel.run = property(lambda _: lambda *arguments: launches.append(arguments))  # type: ignore[method-assign, assignment]
    CompiledKernel.launch_metadata = lambda *_: None  # type: ignore[method-assign, assignment]
    CompiledKernel.function = None  # type: ignore[assignment]
    stack = make_stack(64, (48, 32), torch.bfloat16)

    def warm_up() -> None:
        ops.warm_up([stack], 4, torch.bfloat16, max_segments=8)

    num_asked = len(asked_for(warm_up))
    warm_up_ahead(warm_up, "cuda")
    first = {"asked": num_asked, "compiled here": here[False], "read": here[True], "launched": len(launches) > 0}
    first["variants"] = triton_cuda.compiled_count()
    warm_up_ahead(warm_up, "cuda")
    print(json.dumps([first, {"asked": len(asked_for(warm_up)), "compiled here": here[False], "read": here[True]}]))


if __name__ == "__main__":
    main()
