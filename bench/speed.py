"""Output tokens/s of the server and of PEFT, and what adapters cost, as ratios of interleaved runs.

One round runs, one after another: a server with LoRA off, the same server with LoRA on and only base requests, that
server with all eight adapters, and PEFT; and then the same back to the first. Ratios are taken inside a round, of the
mean of each side's runs, so that a machine whose speed drifts does not move them.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.rounds import forth_and_back
from bench.server import complete, start, upload
from bench.workload import NUM_ADAPTERS, adapter_name, make_model, requests
from tests.support.http.server_process import Server

KV_BYTES = 768 << 20
ROW_BYTES = 256 << 20


class PeftProcess:
    """`bench.steps.peft_baseline`, idle until asked."""

    def __init__(self, root: Path, dtype: str, num_threads: int) -> None:
        command = [sys.executable, "-m", "bench.steps.peft_baseline", str(root), dtype, str(num_threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, batch_size: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"run {batch_size}\n")
        self.process.stdin.flush()
        return float(self._line())

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


@dataclass
class Ratio:
    """One figure: the ratio of each round."""

    name: str
    bar: str
    values: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        ordered = sorted(self.values)
        return {
            "name": self.name,
            "bar": self.bar,
            "median": statistics.median(ordered),
            "min": ordered[0],
            "max": ordered[-1],
            "rounds": len(ordered),
        }


def measure(
    dtype: str,
    num_rounds: int,
    num_threads: int,
    peft_batch_sizes: Sequence[int],
    progress: Progress,
    save: Callable[[dict[str, object]], None],
    family: str = "qwen3",
) -> None:
    """Run the rounds; `save` gets the figures so far after each. Without batch sizes PEFT is left out."""
    root = make_model(dtype, family)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        sizes: dict[str, Any] = {"dtype": dtype, "num_threads": num_threads, "kv_bytes": KV_BYTES}
        plain = start(root / "base", Path(scratch) / "off", adapter_row_bytes=0, **sizes)
        stack.callback(plain.stop)
        lora = start(root / "base", Path(scratch) / "on", adapter_row_bytes=ROW_BYTES, **sizes)
        stack.callback(lora.stop)
        for index in range(NUM_ADAPTERS):
            upload(lora, adapter_name(index), root / adapter_name(index))
        work = requests()
        sides: dict[str, Callable[[], float]] = {
            "lora_off": lambda: complete(plain, work, with_adapters=False),
            "lora_on_base_only": lambda: complete(lora, work, with_adapters=False),
            "eight_adapters": lambda: complete(lora, work, with_adapters=True),
        }
        facts: dict[str, object] = {
            "dtype": dtype,
            "num_output_tokens": sum(request.num_output_tokens for request in work),
            "lora_op_calls_of_base_only_requests": _warm_up(sides, lora),
        }
        if peft_batch_sizes:
            peft = PeftProcess(root, dtype, num_threads)
            stack.callback(peft.stop)
            chosen = _choose(peft, dtype, peft_batch_sizes, progress)
            facts["peft_seconds_by_batch_size"] = chosen
            best = min(chosen, key=chosen.__getitem__)
            sides["peft"] = lambda: peft.run(best)
        _rounds(sides, num_rounds, facts, progress, save)


def _warm_up(sides: dict[str, Callable[[], float]], lora: Server) -> float:
    """Run each side of the server once; LoRA ops that ran for base-only requests (there must be none)."""
    before = lora.metric("lora_op_calls_total")
    sides["lora_off"]()
    sides["lora_on_base_only"]()
    after = lora.metric("lora_op_calls_total")
    sides["eight_adapters"]()
    return after - before


def _choose(peft: PeftProcess, dtype: str, batch_sizes: Sequence[int], progress: Progress) -> dict[int, float]:
    """Seconds by batch size, one run of each; a single size is not run, but taken."""
    if len(batch_sizes) == 1:
        return {batch_sizes[0]: 0.0}
    task = progress.add_task(f"{dtype}: PEFT's best batch size", total=len(batch_sizes))
    seconds = {}
    for batch_size in batch_sizes:
        seconds[batch_size] = peft.run(batch_size)
        progress.advance(task)
    return seconds


def _rounds(
    sides: dict[str, Callable[[], float]],
    num_rounds: int,
    facts: dict[str, object],
    progress: Progress,
    save: Callable[[dict[str, object]], None],
) -> None:
    """All sides forth and back, `num_rounds` times; the last side runs once in the middle, the others twice, so that
    the mean time of all their runs is the same. `seconds` get the mean of each side's runs in a round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    task = progress.add_task(f"{facts['dtype']}: rounds", total=num_rounds)
    for _ in range(num_rounds):
        runs: dict[str, list[float]] = {name: [] for name in sides}
        for name in forth_and_back(sides):
            runs[name].append(sides[name]())
        for name, taken in runs.items():
            seconds[name].append(statistics.mean(taken))
        progress.advance(task)
        save(facts | {"seconds": seconds, "ratios": [ratio.summary() for ratio in _ratios(seconds)]})


def _ratios(seconds: dict[str, list[float]]) -> list[Ratio]:
    def ratio(name: str, bar: str, top: str, bottom: str) -> Ratio:
        pairs = zip(seconds[top], seconds[bottom], strict=True)
        return Ratio(name, bar, [above / below for above, below in pairs])

    ratios = [
        ratio("time with 8 adapters / base only", "<= 1.20", "eight_adapters", "lora_on_base_only"),
        ratio("time with LoRA on, none used / LoRA off", "<= 1.02", "lora_on_base_only", "lora_off"),
    ]
    if "peft" in seconds:
        ratios.insert(0, ratio("output tokens/s / PEFT's", ">= 3.00", "peft", "eight_adapters"))
    return ratios
