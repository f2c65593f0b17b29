"""The rows of causal convolution: our kernels against the best peer's time on an H200.

    python -m bench.kernels.conv [--json FILE]

Before a row is timed, every output and state of every set of its arguments is compared with the reference. Peers' times
were measured on an H200 in the same harness (vLLM 0.33.0, SGLang 0.5.23, fla-core 0.6.0, causal-conv1d 1.7.0; the best
of the four stands here); ratios to it mean something on that GPU only, while `of copy_` is measured in this run.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.kernels.timing import copy_microseconds, num_sets, time_graph
from kernels.causal_conv1d import ops, reference

UPDATE_ROWS = {  # (channels, width, sequences): best peer, microseconds
    (2048, 4, 256): 4.4,
    (2048, 4, 32): 2.7,
    (8192, 4, 256): 12.7,
    (8192, 4, 32): 3.4,
    (8192, 3, 256): 11.0,
}
PREFILL_ROWS = {  # (channels, width, tokens, sequences): best peer, microseconds
    (2048, 4, 16384, 8): 58.7,
    (2048, 4, 2048, 1): 7.2,
    (8192, 4, 16384, 8): 220.5,
    (8192, 4, 16384, 1): 176.1,
    (8192, 4, 2048, 1): 24.8,
}
UPDATE_BAR, PREFILL_BAR, COPY_BAR = 0.88, 0.82, 0.85
OTHER_UPDATE_ROWS = ((2048, 3, 256), (2048, 3, 32))  # LFM2's own form; no peer's time is known
OTHER_PREFILL_ROWS = ((2048, 3, 16384, 8), (2048, 3, 2048, 1))
WIDE_UPDATE_ROW, WIDE_PREFILL_ROW = (2048, 7, 256), (2048, 7, 16384, 8)
PREFIX_CACHE_ROWS = ((2048, 4, 16384, 8), (2048, 4, 16384, 1))
BLOCK_SIZE_TOKENS = 128


@dataclass(frozen=True)
class Result:
    """One measured row; `bytes_moved` counts x, gates, output, states read and written, weights, bias: each once."""

    name: str
    microseconds: float
    peer_microseconds: float | None
    bytes_moved: int

    @property
    def ratio(self) -> float:
        assert self.peer_microseconds is not None
        return self.microseconds / self.peer_microseconds


def update_arguments(dim: int, width: int, num_sequences: int, device: str = "cuda") -> dict[str, Any]:
    generator = torch.Generator(device=device).manual_seed(num_sequences)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    lines = torch.randperm(num_sequences, device=device, generator=generator).int() + 1
    return {
        "x": values(num_sequences, dim),
        "weight": values(width, dim),
        "bias": values(dim),
        "conv_states": values(num_sequences + 1, width - 1, dim),
        "state_indices": lines,
        "activation": "silu",
        "out": torch.empty(num_sequences, dim, device=device, dtype=torch.bfloat16),
    }


def prefill_arguments(
    dim: int, width: int, num_tokens: int, num_sequences: int, device: str = "cuda"
) -> dict[str, Any]:
    arguments = update_arguments(dim, width, num_sequences, device)
    x = torch.randn(num_tokens, dim, device=device).bfloat16()
    starts = torch.arange(num_sequences + 1, device=device, dtype=torch.int32) * (num_tokens // num_sequences)
    has_initial_state = torch.ones(num_sequences, device=device, dtype=torch.bool)
    return {
        **arguments,
        "x": x,
        "out": torch.empty_like(x),
        "query_start_loc": starts,
        "has_initial_state": has_initial_state,
    }


def gated(arguments: dict[str, Any]) -> dict[str, Any]:
    """LFM2's form: x between two gates, as thirds of one projection; no bias, no activation."""
    tokens, dim = arguments["x"].shape
    thirds = torch.randn(tokens, 3 * dim, device=arguments["x"].device).bfloat16()
    gate_in, gate_out, x = thirds.chunk(3, dim=1)
    return arguments | {"x": x, "gate_in": gate_in, "gate_out": gate_out, "bias": None, "activation": None}


def with_prefix_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """Each sequence begins with this chunk, and keeps the state after every block of it in the block's own line."""
    (num_tokens, dim), device = arguments["x"].shape, arguments["x"].device
    num_sequences = len(arguments["query_start_loc"]) - 1
    num_blocks = num_tokens // num_sequences // BLOCK_SIZE_TOKENS
    num_lines = num_sequences * num_blocks
    state_len = arguments["conv_states"].shape[1]

    def ints(value: int) -> torch.Tensor:
        return torch.full((num_sequences,), value, dtype=torch.int32, device=device)

    return arguments | {
        "conv_states": torch.randn(num_lines + 1, state_len, dim, device=device).bfloat16(),
        "state_indices": (torch.randperm(num_lines, device=device).int() + 1).view(num_sequences, num_blocks),
        "has_initial_state": torch.zeros(num_sequences, device=device, dtype=torch.bool),
        "initial_state_idx": ints(0),
        "block_idx_first_scheduled_token": ints(0),
        "block_idx_last_scheduled_token": ints(num_blocks - 1),
        "num_computed_tokens": ints(0),
        "block_size_tokens": BLOCK_SIZE_TOKENS,
    }


def bytes_moved(arguments: dict[str, Any]) -> int:
    x, states, weight = arguments["x"], arguments["conv_states"], arguments["weight"]
    kept = (states.shape[0] - 1) * states.shape[1] * states.shape[2] * states.element_size()
    num_passes = 2 + sum(gate in arguments for gate in ("gate_in", "gate_out"))
    num_weights = weight.numel() + (0 if arguments["bias"] is None else weight.shape[1])
    # The prefix-cache rows have no history to read.
    state_passes = 1 if "block_size_tokens" in arguments else 2
    return num_passes * x.numel() * x.element_size() + state_passes * kept + num_weights * weight.element_size()


def check(op_name: str, arguments: dict[str, Any]) -> None:
    """Compare all outputs and states with the reference, which runs on the CPU."""
    host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    host |= {"out": None, "conv_states": host["conv_states"].clone()}
    states = arguments["conv_states"].clone()
    arguments["out"].fill_(torch.nan)
    result = getattr(ops, op_name)(**{**arguments, "conv_states": states})
    truth = getattr(reference, op_name)(**host)
    # bfloat16's relative error, as in the tests.
    torch.testing.assert_close(result.cpu(), truth, atol=3e-2, rtol=3e-2)
    assert torch.equal(states.cpu(), host["conv_states"]), "the states differ"


Make = Callable[..., dict[str, Any]]


def measure(name: str, op_name: str, make: Callable[[], dict[str, Any]], peer_microseconds: float | None) -> Result:
    """Check and time one row over as many sets of arguments as the harness rotates; `make` makes one."""
    first = make()
    sets = [first] + [make() for _ in range(max(2, num_sets(bytes_moved(first))) - 1)]
    for arguments in sets:
        check(op_name, arguments)
    op = getattr(ops, op_name)
    microseconds = time_graph([functools.partial(op, **chosen) for chosen in sets])
    return Result(name, microseconds, peer_microseconds, bytes_moved(first))


def measure_update(row: tuple[int, int, int], form: str = "", change: Make = dict) -> Result:
    """One row of updates, its arguments put into another form by `change`."""
    name = f"conv.update{form}.d{row[0]}.w{row[1]}.b{row[2]}"
    peer = None if form else UPDATE_ROWS.get(row)
    return measure(name, "causal_conv1d_update", lambda: change(update_arguments(*row)), peer)


def measure_prefill(row: tuple[int, int, int, int], form: str = "", change: Make = dict) -> Result:
    """One row of prefills, its arguments put into another form by `change`."""
    name = f"conv.prefill{form}.d{row[0]}.w{row[1]}.t{row[2]}.s{row[3]}"
    peer = None if form else PREFILL_ROWS.get(row)
    return measure(name, "causal_conv1d_prefill", lambda: change(prefill_arguments(*row)), peer)


def report(title: str, results: list[Result], bar: float) -> None:
    print(f"| {title} | us | best peer us | ratio | TB/s |\n|---|---|---|---|---|")
    for result in results:
        rate = result.bytes_moved / result.microseconds / 1e6
        times = f"{result.microseconds:.2f} | {result.peer_microseconds} | {result.ratio:.3f} | {rate:.2f}"
        print(f"| {result.name} | {times} |")
    mean = math.exp(sum(math.log(result.ratio) for result in results) / len(results))
    print(
        f"geometric mean {mean:.3f} (bar {bar}), slowest row {max(result.ratio for result in results):.3f} (bar 1.0)\n"
    )


def report_others(results: list[Result], copy_bytes_per_microsecond: float) -> None:
    """Forms that no peer was measured with, against `copy_` of as many bytes."""
    print("| other forms | us | TB/s | of copy_'s rate |\n|---|---|---|---|")
    for result in results:
        rate = result.bytes_moved / result.microseconds
        share = rate / copy_bytes_per_microsecond
        print(f"| {result.name} | {result.microseconds:.2f} | {rate / 1e6:.2f} | {share:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    updates = [measure_update(row) for row in UPDATE_ROWS]
    prefills = [measure_prefill(row) for row in PREFILL_ROWS]
    others = [measure_update(row, ".lfm2", gated) for row in OTHER_UPDATE_ROWS]
    others += [measure_prefill(row, ".lfm2", gated) for row in OTHER_PREFILL_ROWS]
    others += [measure_prefill(row, ".blocks", with_prefix_cache) for row in PREFIX_CACHE_ROWS]
    others += [measure_update(WIDE_UPDATE_ROW), measure_prefill(WIDE_PREFILL_ROW)]
    report("update", updates, UPDATE_BAR)
    report("prefill", prefills, PREFILL_BAR)
    large = prefills[list(PREFILL_ROWS).index((8192, 4, 16384, 1))]
    copy = copy_microseconds(16384 * 8192 * 2)
    share = copy / large.microseconds
    print(f"copy_ of 16384 x 8192: {copy:.1f} us; prefill runs at {share:.1%} of its rate (bar {COPY_BAR:.0%})\n")
    report_others(others, 2 * 16384 * 8192 * 2 / copy)
    if options.json:
        rows = [{**asdict(result), "ratio": result.ratio} for result in updates + prefills]
        rows += [asdict(result) for result in others]
        options.json.write_text(json.dumps({"rows": rows, "copy_microseconds": copy}, indent=1))


if __name__ == "__main__":
    main()
