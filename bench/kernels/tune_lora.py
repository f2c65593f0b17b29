"""Find launch configurations of the LoRA kernels for the GPU at hand.

    python -m bench.kernels.tune_lora [--json FILE]

For each token bucket of the table: all shrink candidates with the present expand, then all expand candidates with the
best shrink, by the geometric mean over the bucket's rows. Candidates are compiled by parallel processes beforehand.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from bench.kernels.lora import ROWS, Arguments, Row, check, geometric_mean, make_maps, make_set, make_sets
from bench.kernels.timing import time_graph
from kernels.lora.cuda.configs import (
    ExpandConfig,
    LoraConfig,
    OneTokenExpand,
    OneTokenShrink,
    ShrinkConfig,
    config_for,
)
from kernels.lora.triton_cuda import lora_linear

NUM_REPLAYS = 10


def shrink_candidates(config: LoraConfig) -> list[ShrinkConfig] | list[OneTokenShrink]:
    """Variations of the bucket's shrink."""
    present = config.shrink
    if isinstance(present, OneTokenShrink):
        return [
            OneTokenShrink(num_splits, 4096 // num_splits, warps, programs)
            for num_splits, warps, programs in itertools.product((8, 16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 4))
        ]
    if config.max_tokens > 256:
        splits = sorted({max(1, present.num_splits // 2), present.num_splits, present.num_splits * 2})
        return [
            ShrinkConfig(num_splits, block_m, block_k, 64, 1, stages, block_m // 16, programs)
            for num_splits, block_m, block_k, stages, programs in itertools.product(
                splits, (64, 128), (64, 128), (3, 4), (2, 4)
            )
            if block_m * block_k <= 128 * 64
        ]
    splits = [4, 8, 16] if config.max_tokens <= 4 else [4, 8]
    return [
        ShrinkConfig(num_splits, 16, block_k, block_r, warps, stages, warps, 4)
        for num_splits, block_k, block_r, warps, stages in itertools.product(
            splits, (128, 256), (32, 64), (2, 4), (2, 4)
        )
        if block_k * stages <= 512
    ]


def expand_candidates(config: LoraConfig) -> list[ExpandConfig] | list[OneTokenExpand]:
    """Variations of the bucket's expand."""
    if isinstance(config.expand, OneTokenExpand):
        return [
            OneTokenExpand((block_n, 2 * block_n), warps, programs)
            for block_n, warps, programs in itertools.product((32, 64, 128, 256), (1, 2, 4), (2, 4))
        ]
    if config.max_tokens > 256:
        return [
            ExpandConfig(block_m, block_n, block_n, stages, warps, programs, registers)
            for block_m, block_n, stages, warps, programs, registers in itertools.product(
                (64, 128), (64, 128), (2, 3), (4, 8), (2, 3, 4), (128, None)
            )
            if warps * 1024 <= block_m * block_n <= warps * 2048
        ]
    return [
        ExpandConfig(block_m, block_n, block_n_tall, stages, 4, programs, registers)
        for block_m, block_n, block_n_tall, stages, programs, registers in itertools.product(
            (16,) if config.max_tokens <= 64 else (16, 32), (64, 128), (64, 128), (2, 3), (3, 4, 6), (128, 168)
        )
        if block_n_tall <= block_n
    ]


def _compile(job: tuple[Row, LoraConfig]) -> None:
    row, config = job
    try:
        x, out, stack = make_set(row)
        lora_linear(x, out, stack, make_maps(row), config=config)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"does not compile: {config}: {str(error)[:100]}")


def _without_grid(config: LoraConfig) -> LoraConfig:
    """Configurations that differ in their grids only are one compilation."""
    return replace(
        config,
        shrink=replace(config.shrink, programs_per_core=1),
        expand=replace(config.expand, programs_per_core=1),
    )


def compile_ahead(jobs: Iterable[tuple[Row, LoraConfig]]) -> None:
    """Fill the on-disk cache of the compiler with all cores."""
    jobs = {(row, _without_grid(config)): None for row, config in jobs}
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
        pool.map(_compile, list(jobs), chunksize=1)


def score(rows: list[Row], config: LoraConfig, sets: dict[str, list[Arguments]]) -> tuple[float, list[float]]:
    """Geometric mean of microseconds over the rows, and each; infinite where the result is wrong or does not fit."""
    linear = functools.partial(lora_linear, config=config)
    times = []
    for row in rows:
        try:
            check(row, linear)
            calls = [functools.partial(linear, *arguments) for arguments in sets[row.name]]
            times.append(time_graph(calls, NUM_REPLAYS))
        except Exception as error:
            print(f"{row.name} {config}: {str(error)[:100]}")
            return float("inf"), []
    return geometric_mean(times), times


def tune(config: LoraConfig, rows: list[Row]) -> tuple[LoraConfig, list[dict[str, object]]]:
    """The best configuration of a bucket and everything that was tried."""
    shrinks, expands = shrink_candidates(config), expand_candidates(config)
    # Rows that differ in these are compiled separately.
    distinct = list({(len(r.widths), r.in_features): r for r in rows}.values())
    compile_ahead((row, replace(config, shrink=s)) for s in shrinks for row in distinct)
    sets = {row.name: make_sets(row) for row in rows}
    tried: list[dict[str, object]] = []

    def best_of(candidates: list[LoraConfig]) -> LoraConfig:
        scored = []
        for candidate in candidates:
            mean, times = score(rows, candidate, sets)
            scored.append((mean, candidate))
            tried.append({"config": asdict(candidate), "geometric_mean": mean, "microseconds": times})
        mean, best = min(scored, key=lambda pair: pair[0])
        print(f"{config.max_tokens}: {mean:.2f} us {best}", flush=True)
        return best

    config = best_of([config, *(replace(config, shrink=s) for s in shrinks)])
    compile_ahead((row, replace(config, expand=e)) for e in expands for row in distinct)
    return best_of([config, *(replace(config, expand=e) for e in expands)]), tried


def main() -> None:
    """Tune every bucket that rows fall into and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--buckets", type=int, nargs="*", help="largest token counts of the buckets to tune")
    arguments = parser.parse_args()
    kind = torch.cuda.get_device_name()
    buckets: dict[LoraConfig, list[Row]] = {}
    for row in ROWS:
        buckets.setdefault(config_for(kind, row.num_tokens), []).append(row)
    report = {}
    for config, rows in buckets.items():
        if arguments.buckets and config.max_tokens not in arguments.buckets:
            continue
        best, tried = tune(config, rows)
        report[config.max_tokens] = {"rows": [row.name for row in rows], "best": asdict(best), "tried": tried}
        if arguments.json:
            arguments.json.write_text(json.dumps({"device": kind, "buckets": report}))
        for row, microseconds in zip(rows, score(rows, best, {r.name: make_sets(r) for r in rows})[1], strict=True):
            print(f"  {row.name:24} {microseconds:8.2f} floor {row.floor_microseconds:6.1f} {row.peer_microseconds}")


if __name__ == "__main__":
    main()
