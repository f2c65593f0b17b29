"""Compile ahead what a probe would launch, without a GPU, twice; print how many variants were compiled each time.

Run as a script, without TRITON_INTERPRET. TRITON_CACHE_DIR names an empty directory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from triton.runtime import driver

from kernels.platform import IMPLEMENTATIONS, detect
from kernels.probe import precompile
from kernels.shapes import ProbeShapes
from tests.support.ops.count_lora_variants import NoDriver

OPS = ("rms_norm", "swiglu", "rotary_kv", "sampling")


def main() -> None:
    driver.set_active(NoDriver())  # type: ignore[arg-type]
    precompile.can_compile_ahead = lambda _: True
    numbers: list[int] = []
    fill = precompile.fill_cache

    def counted(variants: list[precompile.Variant]) -> None:
        numbers.append(len(variants))
        fill(variants)

    precompile.fill_cache = counted
    platform = detect("cpu")
    platform = replace(platform, implementations={**platform.implementations, **dict.fromkeys(OPS[:3], "triton_cuda")})
    assert {op: IMPLEMENTATIONS["cuda"][op][0] for op in OPS[:3]}.items() <= platform.implementations.items()
    for _ in range(2):
        precompile.compile_ahead_of(platform, torch.device("cpu"), OPS, ProbeShapes(dtype="bfloat16"))
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
