"""Warm up with kernels compiled ahead, without a GPU, twice; print what was compiled and launched by this process. And
ask for those of quantised weights, by form; none may be called as one of Triton's types.

Run as a script, without TRITON_INTERPRET: which of the two Triton is, is settled when it is imported. TRITON_CACHE_DIR
names an empty directory.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from kernels import platform
from kernels.compile_ahead import asked_for, warm_up_ahead
from kernels.linear import triton_cuda as linear_cuda
from kernels.linear.ops import pack_quantised
from kernels.linear.quantised import Quantised, quantise
from kernels.lora import ops, triton_cuda
from tests.support.ops.count_lora_variants import NoDriver, make_stack


def quantised_weights() -> dict[str, Quantised]:
    """A weight of each form of codes, by form."""
    weight = torch.randn(64, 128)
    int4 = Quantised(torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 1), None, None, 128, None)
    int8, fp8, nf4 = quantise(weight, "int8"), quantise(weight, "fp8"), quantise(weight, "nf4")
    return {"fp8": fp8, "i8": int8, "i4": int4, "table": nf4}


def asked_for_quantised() -> dict[str, str]:
    """ "asked for", or why not, by form, and of a form that has a type's name."""
    told = {}
    for form, weight in quantised_weights().items():
        packed = pack_quantised(weight, None, torch.bfloat16)
        forms = {form: packed, "a type's": replace(packed, tiled=replace(packed.tiled, form="int8"))}
        for name, one in forms.items():
            try:
                asked_for(lambda one=one: linear_cuda.warm_up([one], 16, 0))  # type: ignore[misc]
                told[name] = "asked for"
            except AssertionError as error:
                told[name] = str(error)
    return told


def main() -> None:
    driver.set_active(NoDriver())  # type: ignore[arg-type]
    own = dict.fromkeys(("lora", "linear"), "triton_cuda")
    detected = platform.detect("cpu")
    platform.install(replace(detected, implementations={**detected.implementations, **own}, num_cores=4))
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
    second = {"asked": len(asked_for(warm_up)), "compiled here": here[False], "read": here[True]}
    print(json.dumps([first, second, asked_for_quantised()]))


if __name__ == "__main__":
    main()
