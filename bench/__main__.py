"""`make bench`: prints a table and writes `bench/out/result.json`.

python -m bench [--dtype float32 bfloat16] [--rounds 7] [--threads 2] [--only speed|memory|startup]
                    [--peft-batch-sizes 4 8 16 32] [--out bench/out/result.json]
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import speed
from bench.steps import memory, startup
from bench.workload import FAMILIES, OUT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="of the model whose speed is measured")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds; a figure is their median")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["speed", "memory", "startup"])
    parser.add_argument(
        "--peft-batch-sizes",
        type=int,
        nargs="*",
        default=[4, 8, 16, 32],
        help="PEFT runs with the fastest of these; one alone is taken without a try, none leaves PEFT out",
    )
    parser.add_argument("--out", type=Path, default=OUT / "result.json", help="where the figures go, as JSON")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    speeds: dict[str, dict[str, object]] = {}
    memories: dict[str, dict[str, object]] = {}
    result: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {arguments.threads} threads",
        "torch": torch.__version__,
        "speed": speeds,
        "memory": memories,
    }

    def save(figures: dict[str, Any], name: str, new: dict[str, object]) -> None:
        figures[name] = new
        arguments.out.write_text(json.dumps(result, indent=1))

    with Progress() as progress:
        if arguments.only in (None, "startup"):
            save(result, "startup", startup.measure(progress))
        for dtype in arguments.dtype:
            if arguments.only in (None, "speed"):
                keep = functools.partial(save, speeds, dtype)
                chosen = (arguments.rounds, arguments.threads, arguments.peft_batch_sizes)
                speed.measure(dtype, *chosen, progress, keep, arguments.family)
            if arguments.only in (None, "memory"):
                save(memories, dtype, memory.measure(dtype, arguments.threads, progress))
    _print(result)


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['machine']}, torch {result['torch']}")
    for column in ("dtype", "figure", "median", "min - max", "bar"):
        table.add_column(column)
    if "startup" in result:
        seconds = result["startup"]
        spread = f"{seconds['min']:.2f} - {seconds['max']:.2f}"
        table.add_row("bundled", "seconds from start to ready", f"{seconds['median']:.2f}", spread, "<= 5")
    for dtype, figures in result["speed"].items():
        for ratio in figures["ratios"]:
            spread = f"{ratio['min']:.3f} - {ratio['max']:.3f}"
            table.add_row(dtype, ratio["name"], f"{ratio['median']:.3f}", spread, ratio["bar"])
        num_calls = figures["lora_op_calls_of_base_only_requests"]
        table.add_row(dtype, "LoRA ops run for base-only requests", f"{num_calls:g}", "", "0")
    for dtype, figures in result["memory"].items():
        table.add_row(dtype, "memory above floor / budgets", f"{figures['above_floor_over_budget']:.3f}", "", "<= 1.10")
        table.add_row(dtype, "growth, requests 200 to 1000", f"{figures['growth']:.3%}", "", "<= 2 %")
    Console().print(table)


if __name__ == "__main__":
    main()
