"""Sampling: what each thing that rows may ask for costs, as ratios inside one run.

    python -m bench.kernels.sampling [--device cuda] [--vocab 131072] [--rows 64]

All rows of a step ask for the same. `of max` is the time beside that of one `max` over the logits, which greedy steps
cannot do without; `of reference` and `of any_device` compare implementations. Each call takes a copy of the logits,
which is taken off; what comes back is copied to the host, as in a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from kernels.platform import detect, installed
from kernels.sampling import ops
from kernels.sampling.maps import SamplingMaps, index_of, neutral_row
from kernels.sampling.sampling_request import RowSampling, ask, mask_of

NUM_REPEATS = 9
NUM_TOKENS_HELD = 500
CASES: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "greedy": ({"temperature": 0.0}, {}),
    "random": ({}, {}),
    "min_p": ({"min_p": 0.05}, {}),
    "top_k 50": ({"top_k": 50}, {}),
    "top_k 50, top_p 0.9": ({"top_k": 50, "top_p": 0.9}, {}),
    "top_p 0.9": ({"top_p": 0.9}, {}),
    "penalties": ({"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3}, {}),
    "bias of 10": ({"temperature": 0.0}, {"bias": dict.fromkeys(range(10), 1.0)}),
    "mask": ({"temperature": 0.0}, {"mask": True}),
    "logprobs 5": ({"temperature": 0.0}, {"num_top": 5}),
}


def rows_of(values: dict[str, float], wanted: dict[str, Any], num_rows: int, vocab: int) -> list[RowSampling]:
    parameters = neutral_row()
    for name, value in values.items():
        parameters[index_of(name)] = value
    if "mask" in wanted:
        wanted = {"mask": mask_of(range(0, vocab, 2), vocab)}
    return [RowSampling(row, parameters, seed=row, slot=row, **wanted) for row in range(num_rows)]


def measure(implementation: str, rows: list[RowSampling], logits: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of a step's sampling from maps to host, and of making its maps; medians."""
    device, (num_rows, vocab) = logits.device, logits.shape
    platform = detect(str(device))
    names = MappingProxyType({**platform.implementations, "sampling": implementation})

    def prepare() -> SamplingMaps:
        return ask(rows, num_logits=num_rows, vocab=vocab).maps(device)

    maps = prepare()
    with installed(replace(platform, implementations=names)), torch.inference_mode():
        state = ops.new_state(num_rows, vocab, device)
        for slot in range(num_rows if maps.facts.num_penalised else 0):
            state.reset(slot, range(NUM_TOKENS_HELD // 2), range(NUM_TOKENS_HELD // 2, NUM_TOKENS_HELD))
        copying = median_milliseconds(lambda: logits.clone()[0, 0].cpu())
        total = median_milliseconds(lambda: ops.sample(logits.clone(), maps, state).packed.cpu())
    return total - copying, median_milliseconds(prepare)


def median_milliseconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    logits = 3.0 * torch.randn(options.rows, options.vocab, generator=torch.Generator().manual_seed(0))
    logits = logits.to(options.device)
    served = ("cpu", "any_device") if logits.device.type == "cpu" else ("any_device", "reference")
    largest = median_milliseconds(lambda: logits.max(dim=-1).indices.cpu())
    print(f"{options.rows} rows of {options.vocab} on {options.device}; max: {largest:.2f} ms\n")
    print(
        f"| all rows ask for | {served[0]}, of max | of {served[1]} | arrays on the host, of max |\n|---|---|---|---|"
    )
    for name, (values, wanted) in CASES.items():
        rows = rows_of(values, wanted, options.rows, options.vocab)
        (own, arrays), (other, _) = (measure(implementation, rows, logits) for implementation in served)
        print(f"| {name} | {own / largest:.2f} | {own / other:.2f} | {arrays / largest:.3f} |", flush=True)


if __name__ == "__main__":
    main()
