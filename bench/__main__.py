"""`make bench`: prints a table and writes `bench/out/result.json`.

python -m bench [--dtype float32 bfloat16] [--rounds 7] [--threads 2] [--only speed|memory] [--no-peft]
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import UTC, datetime

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import memory, speed
from bench.workload import OUT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds; a figure is their median")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["speed", "memory"])
    parser.add_argument("--no-peft", action="store_true", help="leave PEFT out (most of the time is PEFT's)")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    result: dict[str, object] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {arguments.threads} threads",
        "torch": torch.__version__,
        "speed": [],
        "memory": [],
    }
    with Progress() as progress:
        for dtype in arguments.dtype:
            if arguments.only != "memory":
                figures = speed.measure(
                    dtype, arguments.rounds, arguments.threads, progress, with_peft=not arguments.no_peft
                )
                result["speed"].append(figures)  # type: ignore[attr-defined]
            if arguments.only != "speed":
                result["memory"].append(memory.measure(dtype, arguments.threads, progress))  # type: ignore[attr-defined]
    (OUT / "result.json").write_text(json.dumps(result, indent=1))
    _print(result)


def _print(result: dict) -> None:
    table = Table(title=f"{result['machine']}, torch {result['torch']}")
    for column in ("dtype", "figure", "median", "min - max", "bar"):
        table.add_column(column)
    for figures in result["speed"]:
        for ratio in figures["ratios"]:
            spread = f"{ratio['min']:.3f} - {ratio['max']:.3f}"
            table.add_row(figures["dtype"], ratio["name"], f"{ratio['median']:.3f}", spread, ratio["bar"])
    for figures in result["memory"]:
        dtype = figures["dtype"]
        table.add_row(dtype, "memory above floor / budgets", f"{figures['above_floor_over_budget']:.3f}", "", "<= 1.10")
        table.add_row(dtype, "growth, requests 200 to 1000", f"{figures['growth']:.3%}", "", "<= 2 %")
    Console().print(table)


if __name__ == "__main__":
    main()
