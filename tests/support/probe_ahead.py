"""Compile ahead what a probe would launch, without a GPU, twice; print how many variants were compiled each time.

Run as a script, without TRITON_INTERPRET. TRITON_CACHE_DIR names an empty directory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from triton.runtime import driver

from kernels.platform import IMPLEMENTATIONS, detect
from kernels.probe import ahead
from kernels.probe.shapes import ProbeShapes
from tests.support.count_lora_variants import NoDriver

OPS = ("rms_norm", "swiglu", "rotary_kv", "sampling")


def main() -> None:
    driver.set_active(NoDriver())  # type: ignore[arg-type]
    ahead.can_compile_ahead = lambda _: True
    numbers: list[int] = []
    fill = ahead.fill_cache

    def counted(variants: list[ahead.Variant]) -> None:
        numbers.append(len(variants))
        fill(variants)

    ahead.fill_cache = counted
    platform = detect("cpu")
    platform = replace(platform, implementations={**platform.implementations, **dict.fromkeys(OPS[:3], "triton_cuda")})
    assert {op: IMPLEMENTATIONS["cuda"][op][0] for op in OPS[:3]}.items() <= platform.implementations.items()
    for _ in range(2):
        ahead.compile_ahead_of(platform, torch.device("cpu"), OPS, ProbeShapes(dtype="bfloat16"))
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
