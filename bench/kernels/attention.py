"""Paged attention on a GPU: our kernel against the floor, and against torch's own attention over dense keys and values.

    python -m bench.kernels.attention [--tune | --mixed] [--json FILE]

bfloat16, 32 query heads over 8 key/value heads, blocks of 16 tokens scattered over the cache. Floor: keys and values of
the context once, queries and outputs once, at 4.3 TB/s, or arithmetic at 790 TFLOP/s, whichever is longer. `sdpa` is
scaled_dot_product_attention on the same numbers without pages: what it would take if nothing had to be looked up. Each
row's output is compared with it. `--tune` tries other tiles for each row and prints the fastest; `--mixed` times small
steps of chunks and decode tokens with the tile of each kind of step.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels.lora import geometric_mean
from bench.kernels.timing import FLOOR_BYTES_PER_SECOND, FLOOR_FLOP_PER_SECOND, num_sets, time_graph
from kernels.attention_maps import AttentionMaps
from kernels.paged_attention import triton_cuda
from kernels.paged_attention.triton_cuda_configs import (
    TABLES,
    Heads,
    LaunchPlan,
    TileConfig,
    TileKind,
    plan_for,
    tile_for,
)
from kernels.platform import in_use

NUM_HEADS, KV_HEADS, BLOCK_SIZE = 32, 8, 16


@dataclass(frozen=True)
class Row:
    """`num_sequences` alike, each with `num_tokens` tokens in the step and `context` in the cache after it."""

    num_sequences: int
    num_tokens: int
    context: int
    head_dim: int

    @property
    def name(self) -> str:
        kind = "decode" if self.num_tokens == 1 else f"chunk{self.num_tokens}"
        return f"{kind}.d{self.head_dim}.s{self.num_sequences}.c{self.context}"

    @property
    def num_bytes(self) -> int:
        """Bytes that must move."""
        per_token = self.context * KV_HEADS + self.num_tokens * NUM_HEADS
        return 2 * 2 * self.num_sequences * per_token * self.head_dim

    @property
    def floor_microseconds(self) -> float:
        """The time that no implementation goes below."""
        pairs = self.num_tokens * (self.context - self.num_tokens) + self.num_tokens * (self.num_tokens + 1) // 2
        flop = 4 * self.num_sequences * NUM_HEADS * self.head_dim * pairs
        return max(self.num_bytes / FLOOR_BYTES_PER_SECOND, flop / FLOOR_FLOP_PER_SECOND) * 1e6


SHAPES = (
    *((num, 1, context) for num, context in ((1, 4096), (8, 2048), (64, 1024), (64, 4096), (256, 1024))),
    *((1, 2048, 2048), (8, 256, 2048), (32, 64, 1024), (1, 2048, 16384)),
)
ROWS = tuple(Row(*shape, head_dim) for head_dim in (64, 128) for shape in SHAPES)


@dataclass
class Arguments:
    """One rotated set: dense keys and values, and the same in scattered blocks."""

    q: torch.Tensor  # [tokens, heads, head_dim]
    k: torch.Tensor  # [sequences, kv_heads, context, head_dim]
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    maps: AttentionMaps


def make_arguments(row: Row) -> Arguments:
    """Random arguments of a row, on the GPU."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    num, context, blocks = row.num_sequences, row.context, row.context // BLOCK_SIZE
    table = (torch.randperm(num * blocks, device="cuda") + 1).view(num, blocks)

    def in_blocks(values: torch.Tensor) -> torch.Tensor:
        cache = values.new_zeros(num * blocks + 1, BLOCK_SIZE, KV_HEADS, row.head_dim)
        cache[table.flatten()] = values.transpose(1, 2).reshape(num * blocks, BLOCK_SIZE, KV_HEADS, row.head_dim)
        return cache

    k, v = (random(num, KV_HEADS, context, row.head_dim) for _ in range(2))
    starts = torch.arange(num + 1, dtype=torch.int32, device="cuda") * row.num_tokens
    maps = AttentionMaps(
        query_starts=tuple(starts.tolist()),
        kv_lens=(context,) * num,
        block_tables=(),
        query_start_loc=starts,
        kv_lens_device=torch.full((num,), context, dtype=torch.int32, device="cuda"),
        block_table=table.int(),
        slot_mapping=torch.full((num * row.num_tokens,), -1, device="cuda"),
    )
    q = random(num * row.num_tokens, NUM_HEADS, row.head_dim)
    return Arguments(q, k, v, in_blocks(k), in_blocks(v), maps)


def ours(row: Row, arguments: Arguments, tile: TileConfig | None = None) -> torch.Tensor:
    """One call of the kernel, with another tile than the table's on request."""
    plan = plan_of(row)
    if tile is not None:
        plan = replace(
            plan, tile=tile, min_split_blocks=max(1, plan.min_split_blocks * plan.tile.block_n // tile.block_n)
        )
    out = torch.empty_like(arguments.q)
    triton_cuda.paged_attention(
        arguments.q,
        arguments.k_cache,
        arguments.v_cache,
        arguments.maps,
        scale=row.head_dim**-0.5,
        sliding_window=None,
        out=out,
        plan=plan,
    )
    return out


def plan_of(row: Row) -> LaunchPlan:
    """The launch that the table chooses."""
    heads = Heads(NUM_HEADS, KV_HEADS, row.head_dim, 2, None)
    num_tokens, platform = row.num_sequences * row.num_tokens, in_use(torch.device("cuda"))
    return plan_for(platform, heads, num_tokens, row.num_sequences, row.context, is_decode=row.num_tokens == 1)


def sdpa(row: Row, arguments: Arguments) -> torch.Tensor:
    """torch's attention over the dense keys and values, as [tokens, heads, head_dim]."""
    q = arguments.q.view(row.num_sequences, row.num_tokens, NUM_HEADS, row.head_dim).transpose(1, 2)
    mask = None if row.num_tokens == 1 else causal_lower_right(row.num_tokens, row.context)
    out = scaled_dot_product_attention(q, arguments.k, arguments.v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).reshape(arguments.q.shape)


def check(row: Row, arguments: Arguments, tile: TileConfig | None = None) -> None:
    """Both compute the same, to bfloat16's rounding."""
    expected = sdpa(row, arguments).float()
    error = float((ours(row, arguments, tile).float() - expected).norm() / expected.norm())
    if not error < 1e-2:
        raise RuntimeError(f"{row.name}: relative difference {error:.1e} from torch's attention")


def make_sets(row: Row) -> list[Arguments]:
    """As many sets of arguments as the harness rotates."""
    return [make_arguments(row) for _ in range(num_sets(row.num_bytes))]


@dataclass(frozen=True)
class Result:
    """One measured row."""

    name: str
    microseconds: float
    floor_microseconds: float
    sdpa_microseconds: float


def measure(row: Row) -> Result:
    """Check the row, then time both."""
    sets = make_sets(row)
    check(row, sets[0])
    mine = time_graph([functools.partial(ours, row, arguments) for arguments in sets])
    theirs = time_graph([functools.partial(sdpa, row, arguments) for arguments in sets])
    return Result(row.name, mine, row.floor_microseconds, theirs)


def candidates(row: Row) -> list[TileConfig]:
    """Other tiles than the table's."""
    present = plan_of(row).tile
    heights = (present.block_m,) if row.num_tokens == 1 else (64, 128)
    tiles = [
        TileConfig(block_m, block_n, stages, warps)
        for block_m, block_n, stages, warps in itertools.product(heights, (32, 64, 128), (2, 3, 4), (4, 8))
        if block_n * stages * row.head_dim <= 24576 and block_m // 16 >= (warps // 4 if row.num_tokens > 1 else 0)
    ]
    return list(dict.fromkeys([present, *tiles]))


def _compile(job: tuple[Row, TileConfig]) -> None:
    row, tile = job
    try:
        ours(row, make_arguments(row), tile)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{row.name} {tile}: {str(error)[:100]}", flush=True)


def tune(rows: Sequence[Row]) -> None:
    """Print the fastest tiles of each row, and of each kind of row by the geometric mean."""
    jobs = [(row, tile) for row in rows for tile in candidates(row)]
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
        pool.map(_compile, jobs, chunksize=1)
    times: dict[tuple[bool, int], dict[TileConfig, list[float]]] = {}
    for row in rows:
        sets = make_sets(row)
        found: dict[TileConfig, float] = {}
        for tile in candidates(row):
            try:
                check(row, sets[0], tile)
                found[tile] = time_graph([functools.partial(ours, row, a, tile) for a in sets], num_replays=10)
            except Exception as error:
                print(f"{row.name} {tile}: {str(error)[:100]}")
                continue
            times.setdefault((row.num_tokens == 1, row.head_dim), {}).setdefault(tile, []).append(found[tile])
        best = sorted(found, key=found.__getitem__)[:3]
        present = plan_of(row).tile
        print(f"{row.name}: table {found.get(present, 0):.1f} us; " + ", ".join(f"{found[t]:.1f} {t}" for t in best))
    for (is_decode, head_dim), by_tile in times.items():
        complete = max(map(len, by_tile.values()))
        means = {tile: geometric_mean(values) for tile, values in by_tile.items() if len(values) == complete}
        for tile in sorted(means, key=means.__getitem__)[:4]:
            print(f"{'decode' if is_decode else 'chunks'} d{head_dim}: {means[tile]:.1f} us {tile}")


# Steps padded to 64 tokens and 64 sequences, no decode steps: of each sequence its tokens in the step, and those in the
# cache after it.
MIXED: dict[str, tuple[tuple[int, int], ...]] = {
    "chunk64.c8192": ((64, 8192),),
    "chunk64.c1024": ((64, 1024),),
    "chunk16.c8192+decode.s48.c1024": ((16, 8192), *((1, 1024),) * 48),
    "chunk16.c4096+decode.s48.c4096": ((16, 4096), *((1, 4096),) * 48),
    "chunk2.c2048+decode.s60.c2048": ((2, 2048), *((1, 2048),) * 60),
}


def make_mixed(sequences: Sequence[tuple[int, int]], head_dim: int, num_padded: int = 64) -> Arguments:
    """A captured step's arguments, its other sequences empty; no dense keys."""
    lens = [context for _, context in sequences] + [0] * (num_padded - len(sequences))
    blocks = [-(-length // BLOCK_SIZE) for length in lens]
    table = torch.zeros(num_padded, -(-16384 // BLOCK_SIZE), dtype=torch.int32, device="cuda")
    scattered, first = (torch.randperm(sum(blocks), device="cuda") + 1).int(), 0
    for index, num in enumerate(blocks):
        table[index, :num] = scattered[first : first + num]
        first += num
    starts = [0, *itertools.accumulate(num for num, _ in sequences)]
    starts += starts[-1:] * (num_padded + 1 - len(starts))
    cache_shape = (sum(blocks) + 1, BLOCK_SIZE, KV_HEADS, head_dim)
    k_cache, v_cache = (torch.randn(cache_shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    maps = AttentionMaps(
        query_starts=tuple(starts),
        kv_lens=tuple(lens),
        block_tables=(),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device="cuda"),
        kv_lens_device=torch.tensor(lens, dtype=torch.int32, device="cuda"),
        block_table=table,
        slot_mapping=torch.full((num_padded,), -1, device="cuda"),
    )
    q = torch.randn(num_padded, NUM_HEADS, head_dim, dtype=torch.bfloat16, device="cuda")
    return Arguments(q, k_cache, v_cache, k_cache, v_cache, maps)


def measure_mixed() -> None:
    """Print the time of each mixed step with the tile of each kind, and the splits that go with it."""
    kinds: tuple[TileKind, ...] = ("decode", "mixed", "chunks")
    print(f"{'step':34} {'d':>4} " + " ".join(f"{kind + ' us':>10}" for kind in kinds))
    for head_dim, (name, sequences) in itertools.product((64, 128, 256), MIXED.items()):
        arguments, heads = make_mixed(sequences, head_dim), Heads(NUM_HEADS, KV_HEADS, head_dim, 2, None)
        plan = plan_for(in_use(torch.device("cuda")), heads, 64, 64, 16384, is_decode=False)
        times, outs = [], []
        for kind in kinds:
            tile = tile_for(TABLES["any"], heads, kind)
            at_least = max(1, plan.min_split_blocks * plan.tile.block_n // tile.block_n)
            chosen = replace(plan, tile=tile, min_split_blocks=at_least)

            def call(chosen: LaunchPlan = chosen, a: Arguments = arguments) -> torch.Tensor:
                out, scale = torch.empty_like(a.q), a.q.shape[-1] ** -0.5
                caches = (a.k_cache, a.v_cache, a.maps)
                triton_cuda.paged_attention(a.q, *caches, scale=scale, sliding_window=None, out=out, plan=chosen)
                return out

            outs.append(call().float())
            times.append(time_graph([call]))
        for out in outs[1:]:
            error = float((out - outs[0]).norm() / outs[0].norm())
            if not error < 1e-2:
                raise RuntimeError(f"{name}: relative difference {error:.1e} between tiles")
        print(f"{name:34} {head_dim:>4} " + " ".join(f"{one:10.1f}" for one in times), flush=True)


def main() -> None:
    """Print the table, or the fastest tiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try other tiles")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--mixed", action="store_true", help="steps with chunks and decode tokens, by kind of tile")
    options = parser.parse_args()
    if options.mixed:
        measure_mixed()
        return
    if options.tune:
        tune(ROWS)
        return
    print(f"{'row':26} {'floor us':>9} {'ours us':>9} {'of floor':>9} {'sdpa us':>9} {'of sdpa':>8}")
    results = []
    for row in ROWS:
        result = measure(row)
        results.append(result)
        over_floor, over_sdpa = (
            result.microseconds / result.floor_microseconds,
            result.microseconds / result.sdpa_microseconds,
        )
        print(
            f"{row.name:26} {result.floor_microseconds:9.1f} {result.microseconds:9.1f} {over_floor:9.2f} "
            f"{result.sdpa_microseconds:9.1f} {over_sdpa:8.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
