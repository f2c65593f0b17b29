"""Count the variants of Triton's kernels that engines' warm-ups ask for, and those that requests ask for afterwards.

    python tests/support/ops/count_model_variants.py DIRECTORY DTYPE FAMILY [FAMILY ...]

Run as a script, without TRITON_INTERPRET and without a GPU: Triton's own launch path decides what would be compiled for
an H100 or H200, and nothing is compiled or launched, so that all tokens are 0. Prints a JSON line for each family: how
many variants the warm-up asked for, and those that requests asked for later.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from triton import knobs
from triton.runtime import driver

from kernels.platform import IMPLEMENTATIONS, Platform, detect, installed
from kernels.probe.op_reports import OpReport
from service.engine.startup import build
from tests.support.engine.engine_parity import (
    SAMPLINGS,
    World,
    build_engine,
    config_of,
    make_requests,
    make_world,
    run_engine,
)
from tests.support.ops.count_lora_variants import NoDriver

NUM_REQUESTS = 9


def run(world: World, asked: dict[str, None]) -> None:
    """The warm-up, then requests of every sampling over all adapters, in steps of one token and of many."""
    asked.clear()
    engine = build_engine(config_of(world, token_budget=64, max_sequences=8, eager=True))
    engine.check_integrity = lambda: None  # type: ignore[method-assign] # kernels that do not run write no tables
    engine.compile_kernels()
    num_warm, requests = len(asked), make_requests(world, NUM_REQUESTS)
    samplings = [SAMPLINGS[number % len(SAMPLINGS)] for number in range(NUM_REQUESTS)]
    run_engine(engine, [one.submit(world, **how) for one, how in zip(requests, samplings, strict=True)])
    run_engine(engine, [requests[0].submit(world)])  # alone
    engine.close()
    print(json.dumps({"family": world.family, "warm": num_warm, "later": list(asked)[num_warm:]}), flush=True)


def main() -> None:
    directory, dtype, families = Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3:]
    worlds = [make_world(family, directory / family, "cpu", dtype=dtype) for family in families]
    asked: dict[str, None] = {}

    def note(*, fn: Any, key: str, **_rest: Any) -> bool:
        asked[f"{fn.name} {key}"] = None
        return True  # nothing is compiled

    knobs.runtime.jit_cache_hook = note
    driver.set_active(NoDriver())  # type: ignore[arg-type]
    Platform.row_dtype = lambda _, model_dtype: model_dtype  # type: ignore[method-assign]
    names = {op: names[0] for op, names in IMPLEMENTATIONS["cuda"].items()}
    described = {"kind": "NVIDIA H100 80GB HBM3", "num_cores": 132, "row_alignment": 16, "native_bfloat16": True}
    platform = replace(detect("cpu"), implementations=MappingProxyType(names), fallbacks=(), **described)
    reports = tuple(OpReport(op=op, wished=name, used=name) for op, name in names.items())
    build.choose_implementations = lambda *_: (platform, reports)  # type: ignore[assignment]
    # What kernels leave unwritten is read as tokens and lengths.
    for name in ("empty", "empty_like", "empty_strided"):
        made = getattr(torch, name)
        setattr(torch, name, lambda *sizes, made=made, **options: made(*sizes, **options).zero_())
    with installed(platform):
        for world in worlds:
            run(world, asked)


if __name__ == "__main__":
    main()
