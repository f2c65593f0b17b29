"""The rows of LoRA shrink + expand: our kernels against the floor, and on an H200 against the best peer.

    python -m bench.kernels.lora [--isolated] [--seed N] [--json FILE] [--plot FILE]

Each row is checked against the reference before it is timed. Floor: bytes that must move (rows of each active adapter
once, x once, output read and written once) at 4.3 TB/s, or arithmetic at 790 TFLOP/s, whichever is longer. Peers' times
were measured on an H200 in the same harness (vLLM 0.33.0, SGLang 0.5.23 with three backends, LoRAX's BGMV, cuBLAS where
one adapter fills the step; the best stands here), so ratios to them mean something on that GPU only.

Calls follow one another directly, so with dependent launch each begins while the one before it ends. `--isolated` lets
a call begin only when the one before is complete, as it is in a model after a kernel that knows nothing of this.

Then come 20 rows drawn at random, from a seed that is printed, beside cuBLAS grouped by adapter in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.kernels.timing import FLOOR_BYTES_PER_SECOND, FLOOR_FLOP_PER_SECOND, num_sets, time_graph
from kernels.lora import ops, reference
from kernels.lora.maps import LoraMaps, LoraStack, Segment
from service.engine.model.padding import TOKEN_SIZES

EMPTY_KERNEL_MICROSECONDS = 0.9
DECODE_BAR, PREFILL_BAR = 0.70, 0.75
DECODE_ROW_BAR, PREFILL_ROW_BAR = 1.0, 1.05
MAX_SEGMENTS = 64  # that the maps of every step have room for, as with an engine of up to 64 sequences


@dataclass(frozen=True)
class Row:
    """`num_tokens` tokens, evenly over `num_adapters` of `num_places` resident adapters of one rank."""

    name: str
    in_features: int
    widths: tuple[int, ...]
    rank: int
    num_tokens: int
    num_adapters: int
    peer_microseconds: float | None = None
    num_places: int = 0

    @property
    def is_prefill(self) -> bool:
        """Whether the row belongs to the prefill set."""
        return self.name.endswith(".pf")

    @property
    def num_bytes(self) -> int:
        """Bytes that must move, in bfloat16."""
        rows = self.num_adapters * self.rank * (len(self.widths) * self.in_features + sum(self.widths))
        return 2 * (rows + self.num_tokens * (self.in_features + 2 * sum(self.widths)))

    @property
    def floor_microseconds(self) -> float:
        """The time that no implementation goes below."""
        flop = 2 * self.num_tokens * self.rank * (len(self.widths) * self.in_features + sum(self.widths))
        return max(self.num_bytes / FLOOR_BYTES_PER_SECOND, flop / FLOOR_FLOP_PER_SECOND) * 1e6


QKV, OUTPUT, GATE_UP = (4096, 1024, 1024), (4096,), (14336, 14336)
ROWS = (
    Row("qkv.r16.M1.n1", 4096, QKV, 16, 1, 1, 9.7),
    Row("qkv.r16.M32.n1", 4096, QKV, 16, 32, 1, 11.9),
    Row("qkv.r16.M32.n32", 4096, QKV, 16, 32, 32, 19.5),
    Row("qkv.r16.M64.n8.s64", 4096, QKV, 16, 64, 8, 14.9, 64),
    Row("qkv.r16.M128.n8", 4096, QKV, 16, 128, 8, 13.0),
    Row("qkv.r16.M256.n32", 4096, QKV, 16, 256, 32, 20.4),
    Row("o.r64.M1.n1", 4096, OUTPUT, 64, 1, 1, 7.4),
    Row("o.r32.M32.n32", 4096, OUTPUT, 32, 32, 32, 14.1),
    Row("o.r128.M256.n8", 4096, OUTPUT, 128, 256, 8, 18.4),
    Row("gu.r16.M1.n1", 4096, GATE_UP, 16, 1, 1, 8.5),
    Row("gu.r16.M64.n64", 4096, GATE_UP, 16, 64, 64, 40.0),
    Row("gu.r16.M256.n8", 4096, GATE_UP, 16, 256, 8, 21.7),
    Row("o8k.r128.M64.n32", 8192, OUTPUT, 128, 64, 32, 35.0),
    Row("gu2k.r16.M32.n8", 2048, (11008, 11008), 16, 32, 8, 11.3),
    Row("o2k.r64.M64.n8", 2048, OUTPUT, 64, 64, 8, 11.6),
    Row("qkv.r16.M512.n1.pf", 4096, QKV, 16, 512, 1, 20.5),
    Row("qkv.r64.M8192.n8.pf", 4096, QKV, 64, 8192, 8, 236.9),
    Row("o.r16.M2048.n8.pf", 4096, OUTPUT, 16, 2048, 8, 27.1),
    Row("gu.r16.M512.n8.pf", 4096, GATE_UP, 16, 512, 8, 37.8),
    Row("gu.r64.M8192.n4.pf", 4096, GATE_UP, 64, 8192, 4, 429.5),
    Row("gu2k.r64.M8192.n8.pf", 2048, (11008, 11008), 64, 8192, 8, 323.9),
)


@dataclass(frozen=True)
class Result:
    """One measured row."""

    name: str
    microseconds: float
    floor_microseconds: float
    peer_microseconds: float | None

    @property
    def of_floor(self) -> float:
        """Time over the floor, which is at least an empty kernel's time."""
        return self.microseconds / max(self.floor_microseconds, EMPTY_KERNEL_MICROSECONDS)

    @property
    def of_peer(self) -> float | None:
        """Time over the best peer's."""
        return self.microseconds / self.peer_microseconds if self.peer_microseconds else None


def make_maps(row: Row, device: str = "cuda") -> LoraMaps:
    """The row's tokens in adapter order; active adapters are spread over the places."""
    num_places = max(row.num_places, row.num_adapters)
    bounds = [row.num_tokens * i // row.num_adapters for i in range(row.num_adapters + 1)]
    places = [i * num_places // row.num_adapters for i in range(row.num_adapters)]
    segments = tuple(
        Segment(bounds[i], bounds[i + 1], place, (place * -(-row.rank // 16) * 16,)) for i, place in enumerate(places)
    )
    padding = max(MAX_SEGMENTS, row.num_adapters) - len(segments)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return LoraMaps(
        segments=segments,
        num_tokens=row.num_tokens,
        segment_starts=ints(bounds + [row.num_tokens] * padding),
        places=ints(places + [-1] * padding),
        first_rows=ints([s.first_rows[0] for s in segments] + [-1] * padding).unsqueeze(0),
        token_segment=ints([i for i, s in enumerate(segments) for _ in range(s.end - s.start)]),
        num_segments=ints([len(segments)]),
        runs_once=row.num_tokens > TOKEN_SIZES[-1],
    )


def make_set(row: Row, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, LoraStack]:
    """Random x, out and rows of one rotated set."""
    num_places = max(row.num_places, row.num_adapters)
    num_rows = num_places * -(-row.rank // 16) * 16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    starts = tuple(sum(row.widths[:i]) for i in range(len(row.widths)))
    shape = (len(row.widths), num_places)
    stack = LoraStack(
        a=tuple(normal(num_rows, row.in_features) / row.in_features**0.5 for _ in row.widths),
        b=tuple(normal(num_rows, width) for width in row.widths),
        ranks=torch.full(shape, row.rank, dtype=torch.int32, device=device),
        scalings=torch.full(shape, 0.5, device=device),
        group=0,
        slice_starts=starts,
        host_ranks=[[row.rank] * num_places for _ in row.widths],
        host_scalings=[[0.5] * num_places for _ in row.widths],
    )
    return normal(row.num_tokens, row.in_features), normal(row.num_tokens, sum(row.widths)), stack


Linear = Callable[[torch.Tensor, torch.Tensor, LoraStack, LoraMaps], None]
Arguments = tuple[torch.Tensor, torch.Tensor, LoraStack, LoraMaps]


def check(row: Row, linear: Linear = ops.lora_linear) -> float:
    """Relative error of one call against float64, over all elements; raises when it is too large for bfloat16."""
    maps = make_maps(row)
    x, out, stack = make_set(row)
    expected = out.double()
    reference.lora_linear(x, expected, stack, maps)
    linear(x, out, stack, maps)
    error = float((out.double() - expected).norm() / expected.norm())
    if not error < 5e-3:
        raise RuntimeError(f"{row.name}: relative error {error:.2e} against float64")
    return error


def make_sets(row: Row) -> list[Arguments]:
    """As many sets of arguments as the harness rotates."""
    maps = make_maps(row)
    return [(*make_set(row), maps) for _ in range(num_sets(row.num_bytes))]


def _compile(row: Row) -> None:
    x, out, stack = make_set(row)
    ops.lora_linear(x, out, stack, make_maps(row))
    torch.cuda.synchronize()


def compile_ahead(rows: Sequence[Row]) -> None:
    """Fill the compiler's cache on disk for these rows with all processor cores."""
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
        pool.map(_compile, rows, chunksize=1)


def measure(row: Row, linear: Linear = ops.lora_linear) -> Result:
    """Check the row, then time it."""
    check(row, linear)
    microseconds = time_graph([functools.partial(linear, *arguments) for arguments in make_sets(row)])
    return Result(row.name, microseconds, row.floor_microseconds, row.peer_microseconds)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean; 0 of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


def summary(results: Sequence[Result]) -> str:
    """Both regimes against their bars."""
    lines = []
    for title, is_prefill, bar, row_bar in (
        ("decode", False, DECODE_BAR, DECODE_ROW_BAR),
        ("prefill", True, PREFILL_BAR, PREFILL_ROW_BAR),
    ):
        ratios = [
            (r.of_peer, r.name) for r in results if r.name.endswith(".pf") == is_prefill and r.of_peer is not None
        ]
        if not ratios:
            continue
        worst, name = max(ratios)
        mean = geometric_mean([ratio for ratio, _ in ratios])
        lines.append(
            f"{title}: geometric mean {mean:.2f} of the best peer (bar {bar}), slowest row {name} {worst:.2f} "
            f"(bar {row_bar})"
        )
    return "\n".join(lines)


def sweep() -> dict[int, list[tuple[int, float]]]:
    """Time over the floor against tokens, for 1, 8 and 64 adapters (qkv, rank 16)."""
    curves: dict[int, list[tuple[int, float]]] = {}
    for num_adapters in (1, 8, 64):
        for num_tokens in (1, 4, 16, 64, 256, 1024, 4096, 16384):
            if num_tokens >= num_adapters:
                row = Row(f"M{num_tokens}.n{num_adapters}", 4096, QKV, 16, num_tokens, num_adapters)
                curves.setdefault(num_adapters, []).append((num_tokens, measure(row).of_floor))
    return curves


def plot(curves: dict[int, list[tuple[int, float]]], file: Path) -> None:
    """Write the sweep as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for num_adapters, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{num_adapters} adapters")
    axes.set(xscale="log", yscale="log", xlabel="tokens in the step", ylabel="time / floor (floor at least 0.9 us)")
    axes.set_title(f"LoRA shrink + expand, qkv 4096, rank 16, {torch.cuda.get_device_name()}")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def measure_unseen(seed: int, linear: Linear) -> list[Result]:
    """Rows of no table, whose peer is cuBLAS, an adapter after the other, in the same run."""
    from bench.kernels.lora_unseen import HARD_ROWS, grouped_by_adapter, unseen_rows

    results = []
    print(f"rows drawn with --seed {seed}, and {len(HARD_ROWS)} of always, beside cuBLAS grouped by adapter")
    for row in (*unseen_rows(seed), *HARD_ROWS):
        peer = measure(row, grouped_by_adapter)
        results.append(replace(measure(row, linear), peer_microseconds=peer.microseconds))
        print(f"{row.name:28} {results[-1].microseconds:9.2f} us, cuBLAS {peer.microseconds:9.2f}")
    print(summary(results))
    return results


def main() -> None:
    """Print the table; write it as JSON and the sweep as a plot on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isolated", action="store_true", help="no overlap between one call and the next")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--seed", type=int, help="of 20 further rows, beside cuBLAS; default: a random one, printed")
    arguments = parser.parse_args()
    linear: Linear = ops.lora_linear
    if arguments.isolated:
        from kernels.lora import triton_cuda

        linear = functools.partial(triton_cuda.lora_linear, join_previous=False)
    compile_ahead(ROWS)
    print(f"{'row':24} {'floor us':>9} {'ours us':>9} {'of floor':>9} {'of peer':>8}")
    results = []
    for row in ROWS:
        result = measure(row, linear)
        results.append(result)
        peer = f"{result.of_peer:8.2f}" if result.of_peer else "       -"
        print(f"{row.name:24} {row.floor_microseconds:9.1f} {result.microseconds:9.2f} {result.of_floor:9.2f} {peer}")
    print(summary(results))
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    unseen = measure_unseen(seed, linear)
    curves = sweep() if arguments.plot else {}
    if arguments.plot:
        plot(curves, arguments.plot)
    if arguments.json:
        report: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "rows": [asdict(r) for r in results],
            "sweep": curves,
        }
        report |= {"seed": seed, "unseen": [asdict(r) for r in unseen]}
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
