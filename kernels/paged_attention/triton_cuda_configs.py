"""Launch configurations of the paged attention on NVIDIA GPUs: 16-bit heads of up to 128 as
`python -m bench.kernels.attention --tune` found them on an H200, the others chosen by reasoning.

How a call is launched follows from the padded sizes of a step and the GPU alone, never from the lengths of its
sequences, so that a captured step fits all steps of its size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from kernels.platform import Platform

TileKind = Literal["decode", "mixed", "chunks"]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile and launch shape of one program.

    block_m  rows of a tile: queries, times the query heads that share a key/value head
    block_n  keys of a block
    stages   blocks of keys and values in flight
    """

    block_m: int
    block_n: int
    stages: int
    num_warps: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTable:
    """How a kind of GPU runs paged attention.

    decode, mixed, chunks  (bytes of an element, largest head_dim) -> tile, by ascending head_dim; `mixed` serves steps
                       that are no decode steps and padded to few tokens for each sequence: some of their sequences may
                       be decode tokens, whose time the rows of a tile must not exceed, or one chunk all that is there,
                       whose keys each tile reads again
    mixed_tokens       for each sequence, at most, of steps that `mixed` serves; one with tiles of fewer than 64 rows
    programs_per_core  keys are split among programs until there are so many
    min_split_tokens   keys that a split is worth
    max_split_tokens   keys after which a sequence is split even among many, so that it does not end long after them
    chunk_programs_per_core, chunk_split_tokens
                       of steps with chunks whose tokens are few: most of their padded sequences may be empty, and a
                       chunk behind a long prefix all that is there. Its keys are split among so many programs, where
                       the block table has room for so many keys a split
    filling_tokens     keys that all these programs are worth; fewer keys go to fewer, since decode tokens may stand
                       beside the chunk that gain nothing from splits
    max_programs_per_core, loop_programs_per_core
                       a launch of `mixed` over no longer tables than max_split_tokens that would need more programs for
                       all that padded sequences could hold, loops in so many, which takes each a tenth longer
    """

    decode: Mapping[tuple[int, int], TileConfig]
    mixed: Mapping[tuple[int, int], TileConfig]
    chunks: Mapping[tuple[int, int], TileConfig]
    mixed_tokens: int
    programs_per_core: int
    min_split_tokens: int
    max_split_tokens: int
    chunk_programs_per_core: int
    chunk_split_tokens: int
    filling_tokens: int
    max_programs_per_core: int
    loop_programs_per_core: int


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes that all calls of a layer have in common."""

    num_heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How one call is launched.

    num_splits        programs that share the keys of a tile; 1 writes `out` without a sum
    min_split_blocks  blocks of keys that a split takes at least
    fixed_blocks      above 0: splits are of so many blocks from a multiple of these on, and one program that takes
                      them all adds them up as if they were several programs'
    max_programs      of a key/value head where keys are split, each of which takes one split of one tile after the
                      other; None: as many as the padded sizes could need, most of which may find nothing to do
    """

    tile: TileConfig
    num_splits: int
    min_split_blocks: int
    fixed_blocks: int = 0
    max_programs: int | None = None


MAX_SPLITS = 64
# Rows of a tile that reads the keys of a long chunk few times.
_TALL_ROWS = 64
# Partial results of split sequences; fewer splits where more would not fit.
WORKSPACE_BYTES = 64 * 2**20

# Two programs share a multiprocessor (228 KiB of shared memory on compute capability 9.0), 16-bit chunks of heads above
# 64 excepted. float32 has no tensor cores at full precision: its tiles are small, since each product is an instruction.
_HOPPER = AttentionTable(
    decode=MappingProxyType(
        {
            (2, 64): TileConfig(16, 64, 3, 4),
            (2, 128): TileConfig(16, 32, 2, 4),
            (2, 256): TileConfig(16, 32, 3, 4),
            (2, 512): TileConfig(16, 16, 2, 4),
            (4, 128): TileConfig(16, 32, 2, 8),
            (4, 256): TileConfig(16, 16, 2, 8),
            (4, 512): TileConfig(16, 16, 1, 8),
        }
    ),
    mixed=MappingProxyType(
        {
            (2, 64): TileConfig(64, 64, 2, 4),
            (2, 128): TileConfig(64, 64, 2, 4),
            # The tile of decode steps: 64 rows take 0.7 of its time for a chunk alone, but 1.5 to 1.8 beside decodes.
            (2, 256): TileConfig(16, 32, 3, 4),
            (2, 512): TileConfig(16, 16, 2, 4),
            (4, 128): TileConfig(32, 32, 2, 8),
            (4, 256): TileConfig(16, 16, 2, 8),
            (4, 512): TileConfig(16, 16, 1, 8),
        }
    ),
    chunks=MappingProxyType(
        {
            (2, 64): TileConfig(128, 64, 2, 4),
            (2, 128): TileConfig(128, 64, 2, 8),
            (2, 256): TileConfig(64, 32, 2, 8),
            (2, 512): TileConfig(32, 32, 2, 8),
            (4, 128): TileConfig(32, 32, 2, 8),
            (4, 256): TileConfig(16, 16, 2, 8),
            (4, 512): TileConfig(16, 16, 1, 8),
        }
    ),
    mixed_tokens=8,
    programs_per_core=4,
    min_split_tokens=256,
    max_split_tokens=16384,
    chunk_programs_per_core=2,
    chunk_split_tokens=1024,
    filling_tokens=8192,
    max_programs_per_core=20,
    loop_programs_per_core=8,
)

# Kind of GPU, by the name its driver reports; "any" serves the rest.
TABLES: dict[str, AttentionTable] = {"any": _HOPPER}


def max_head_dim(element_bytes: int) -> int:
    """The largest head that any table has a tile for."""
    return min(max(dim for size, dim in table.decode if size == element_bytes) for table in TABLES.values())


def tile_for(table: AttentionTable, heads: Heads, kind: TileKind) -> TileConfig:
    """The tile for these heads; it holds at least one query of all heads of a group."""
    tiles = getattr(table, kind)
    sizes = [size for size in tiles if size[0] == heads.element_bytes and size[1] >= heads.head_dim]
    assert sizes, f"the kernel has no tile for heads of {heads.head_dim} elements of {heads.element_bytes} bytes"
    tile = tiles[sizes[0]]
    groups = heads.num_heads // heads.kv_heads
    return replace(tile, block_m=max(tile.block_m, 1 << (groups - 1).bit_length()))


def plan_for(
    platform: Platform, heads: Heads, num_tokens: int, num_sequences: int, max_kv_tokens: int, *, is_decode: bool
) -> LaunchPlan:
    """The launch of a step of these padded sizes.

    max_kv_tokens  that a row of the block table has room for
    is_decode      every sequence has one token
    """
    if platform.batch_invariant:
        return _invariant_plan(platform.kind, platform.num_cores, heads, num_tokens, max_kv_tokens)
    return _plan(platform.kind, platform.num_cores, heads, num_tokens, num_sequences, max_kv_tokens, is_decode)


def _invariant_plan(kind: str, num_cores: int, heads: Heads, num_tokens: int, max_kv_tokens: int) -> LaunchPlan:
    """One tile, and splits at fixed positions of a sequence, whatever the step; by several programs if these have room
    for their results."""
    table = TABLES.get(kind, TABLES["any"])
    tile = tile_for(table, heads, "mixed")
    if heads.sliding_window is not None:
        # One more begins before the window.
        queries = tile.block_m * heads.kv_heads // heads.num_heads
        max_kv_tokens = min(max_kv_tokens, heads.sliding_window + queries - 1 + table.min_split_tokens)
    num_splits = -(-max_kv_tokens // table.min_split_tokens)
    fitting = WORKSPACE_BYTES // (4 * num_tokens * heads.num_heads * (heads.head_dim + 2) + 256)
    num_splits, fixed_blocks = num_splits if num_splits <= fitting else 1, table.min_split_tokens // tile.block_n
    return LaunchPlan(tile, num_splits, 1, fixed_blocks, _loop_programs(table, num_cores, heads))


@functools.lru_cache(maxsize=4096)
def _plan(
    kind: str, num_cores: int, heads: Heads, num_tokens: int, num_sequences: int, max_kv_tokens: int, is_decode: bool
) -> LaunchPlan:
    table = TABLES.get(kind, TABLES["any"])
    kind_of_tile = "decode" if is_decode else _kind_of(table, heads, num_tokens, num_sequences)
    tile = tile_for(table, heads, kind_of_tile)
    queries = tile.block_m * heads.kv_heads // heads.num_heads
    if heads.sliding_window is not None:
        max_kv_tokens = min(max_kv_tokens, heads.sliding_window + queries - 1)
    worth = -(-max_kv_tokens // table.min_split_tokens)
    fitting = WORKSPACE_BYTES // (4 * num_tokens * heads.num_heads * (heads.head_dim + 1))
    min_split_tokens = table.min_split_tokens
    # Without the tiles that padded sequences may need, there is less than two for each core.
    if not is_decode and heads.kv_heads * (num_tokens // queries + 1) < 2 * num_cores:
        wanted = table.chunk_programs_per_core * num_cores // (heads.kv_heads * -(-num_tokens // queries))
        wanted = _power_of_two(min(max(wanted, 2), -(-max_kv_tokens // table.chunk_split_tokens)))
        min_split_tokens = max(min_split_tokens, table.filling_tokens // wanted)
    else:
        num_programs = heads.kv_heads * min(num_tokens, num_tokens // queries + num_sequences)
        wanted = num_cores * table.programs_per_core // num_programs
    wanted = max(wanted, -(-max_kv_tokens // table.max_split_tokens))
    # Few distinct numbers, so that captured sizes share their launch.
    num_splits = _power_of_two(min(wanted, worth, fitting, MAX_SPLITS))
    most = None
    if kind_of_tile == "mixed" and max_kv_tokens <= table.max_split_tokens:
        most_tiles = min(num_tokens, num_tokens // queries + num_sequences + 1)
        if heads.kv_heads * most_tiles * num_splits > table.max_programs_per_core * num_cores:
            most = _loop_programs(table, num_cores, heads)
    return LaunchPlan(tile, num_splits, min_split_tokens // tile.block_n, max_programs=most)


def _kind_of(table: AttentionTable, heads: Heads, num_tokens: int, num_sequences: int) -> TileKind:
    """The kind of tile for a step that is no decode step."""
    few = table.mixed_tokens if tile_for(table, heads, "mixed").block_m >= _TALL_ROWS else 1
    return "mixed" if num_tokens <= few * num_sequences else "chunks"


def _loop_programs(table: AttentionTable, num_cores: int, heads: Heads) -> int:
    return max(1, table.loop_programs_per_core * num_cores // heads.kv_heads)


def _power_of_two(number: int) -> int:
    """The largest that is no larger; at least 1."""
    return 1 << (max(1, number).bit_length() - 1)
