"""Count the variants of the Triton LoRA kernels that warm-up asks for, and those that random steps ask for afterwards.

Run as a script, without TRITON_INTERPRET and without a GPU: Triton's own launch path decides what would be compiled for
an H100 or H200, and nothing is compiled or launched. Prints both counts.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels import platform
from kernels.lora import ops
from kernels.lora.maps import LoraStack
from tests.support.ops.lora_cases import Case, make_maps, make_step

MAX_TOKENS, MAX_SEGMENTS = 700, 70
NUM_PLACES, NUM_STEPS = 6, 60


class NoDriver:
    """Where a driver would say which GPU this is."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def make_stack(in_features: int, widths: tuple[int, ...], dtype: torch.dtype) -> LoraStack:
    """Rows of NUM_PLACES adapters of mixed ranks."""
    ranks = tuple((16, 5, 0, 200, 40, 16) for _ in widths)
    return make_step(Case(in_features, widths, ranks, (1,) * NUM_PLACES, dtype=dtype, interleaved=True)).stack


def random_lengths(rng: random.Random) -> list[int]:
    """Tokens of each adapter in a step of a random size and mix."""
    lengths = [rng.choice([0, 1, 1, rng.randint(1, 110)]) for _ in range(NUM_PLACES)]
    lengths[0] += not any(lengths)
    return lengths


def run_step(stack: LoraStack, embeds: bool, dtype: torch.dtype, rng: random.Random, lengths: list[int]) -> None:
    """One step through the public op."""
    num_tokens = min(MAX_TOKENS, sum(lengths) + rng.choice([0, 0, 3]) * (sum(lengths) > 2))
    places = rng.sample(range(NUM_PLACES), NUM_PLACES)
    maps = make_maps(lengths, places, [16 * p for p in places], num_tokens, pad_to=MAX_SEGMENTS)
    out = torch.zeros(num_tokens, sum(b.shape[1] for b in stack.b), dtype=dtype)
    if embeds:
        ops.lora_embedding(torch.zeros(num_tokens, dtype=torch.int64), out, stack, maps)
    else:
        ops.lora_linear(torch.zeros(num_tokens, stack.a[0].shape[1], dtype=dtype), out, stack, maps)


def main() -> None:
    """Warm up, then step."""
    asked: set[str] = set()

    def note(*, fn: Any, key: str, **_rest: Any) -> bool:
        asked.add(f"{fn.name} {key}")
        return True  # nothing is compiled

    knobs.runtime.jit_cache_hook = note
    driver.set_active(NoDriver())  # type: ignore[arg-type]
    platform.install(platform.detect("cpu").with_fallback("lora", "triton_cuda", None))
    dtype = torch.bfloat16
    stacks = [make_stack(in_features, widths, dtype) for in_features, widths in ((512, (256, 72)), (520, (1030,)))]
    embedding = make_stack(777, (96,), dtype)
    ops.warm_up(stacks, MAX_TOKENS, dtype, embeddings=[embedding], max_segments=MAX_SEGMENTS)
    num_warm, rng = len(asked), random.Random(0)
    # Both sides of every bound of the tables, then anything.
    steps = [[size] + [0] * (NUM_PLACES - 1) for size in (1, 2, 4, 5, 128, 129, 256, 257, 700)]
    steps += [random_lengths(rng) for _ in range(NUM_STEPS)]
    for lengths in steps:
        for stack in stacks:
            run_step(stack, False, dtype, rng, lengths)
        run_step(embedding, True, dtype, rng, lengths)
    print(num_warm, len(asked) - num_warm)


if __name__ == "__main__":
    main()
