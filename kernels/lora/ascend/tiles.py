"""Tiles, grids and splits of the LoRA kernels on Ascend NPUs: one table, chosen from by sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.platform import BackendError

# Steps of up to this many (padded) tokens run on the vector cores, larger ones on the cube cores.
FEW_TOKENS = 64
# Splits and chunks for the vector cores are multiples of so many inputs and columns: 128 bytes, the smallest piece of
# global memory that the chip moves. With 16, more cores work, but on rows that begin and end within pieces.
SPLIT_GRANULE = 64
# A whole number of splits seldom fits the cores exactly; none is much smaller, so that a transfer is worth its latency.
SMALLEST_SPLIT = 96
# Likewise the fewest columns of a chunk of the output.
SMALLEST_CHUNK = 64
# Every chunk of output columns reads all partial sums of its tokens. Where few tokens meet an adapter's rows, as many
# splits as there are cores would have them read more than a tenth of what B has; with so few splits they do not.
VERY_FEW_TOKENS = 8
SPLITS_OF_VERY_FEW = 11
# The blocks of an adapter's ranks are dealt out to so many work items, so that a large rank occupies more cores.
RANK_PARTS = 4


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one regime.

    shrink_tokens  of a shrink's tile
    inputs         of its block, candidates from large to small
    expand_tokens  of an expand's tile
    columns        of its block, candidates likewise
    """

    shrink_tokens: int
    inputs: tuple[int, ...]
    expand_tokens: int
    columns: tuple[int, ...]


@dataclass(frozen=True)
class LaunchTable:
    """Tiles for every chip with at least this much unified buffer. The gate compiles each of them."""

    on_chip_bytes: int
    few: Tiles
    many: Tiles


# Few tokens: what takes the least time by estimate, the worst and the mean of the mixes that the gate judges
# (`python -m tests.ascend.compare_tiles`; not verified on an NPU). Each token of a shrink pays for a mask over its
# tile, so 16 tokens take less than 32; 8 leave cores idle where a projection has three slices. An expand has no such
# mask, and narrower blocks with 64 tokens, for each of which h is summed up again. Many: what fills the cube's L1, L0.
TABLES = (
    LaunchTable(
        192 * 1024,
        few=Tiles(16, (512, 256, 128), 32, (256, 128)),
        many=Tiles(128, (256, 128, 64), 128, (128,)),
    ),
)


@dataclass(frozen=True)
class Regime:
    """How a step of one padded size runs: which pair of kernels, with which tiles, on how many cores."""

    name: Literal["few", "many"]
    tiles: Tiles
    num_cores: int

    def num_splits(self, in_features: int, num_tokens: int, num_slices: int) -> int:
        """Parts of the input, enough for every core to get one of some slice and tile of tokens."""
        num_items = -(-num_tokens // self.tiles.shrink_tokens) * num_slices
        most = min(in_features // SMALLEST_SPLIT, self.num_cores // num_items)
        if num_tokens <= VERY_FEW_TOKENS:
            most = min(most, SPLITS_OF_VERY_FEW)
        size = self.split_size(in_features, max(1, most))
        return -(-in_features // size)

    def split_size(self, in_features: int, num_splits: int) -> int:
        """Inputs of a part; the cube's kernel takes whole blocks only."""
        granule = self.block(in_features, in_features) if self.name == "many" else SPLIT_GRANULE
        return -(-in_features // (num_splits * granule)) * granule

    def block(self, split_size: int, in_features: int) -> int:
        """Inputs of a shrink's block: one that covers a part or, for the cube, one that divides every part."""
        if self.name == "many":
            # The last part is what the others leave: its size is divided by what divides theirs and the whole.
            return next(block for block in self.tiles.inputs if split_size % block == 0 and in_features % block == 0)
        return next((block for block in reversed(self.tiles.inputs) if block >= split_size), self.tiles.inputs[0])

    def columns(self, num_columns: int, num_tokens: int) -> tuple[int, int]:
        """(columns of an expand's block, columns of a chunk), with a chunk for every core where that is possible."""
        num_tiles = -(-num_tokens // self.tiles.expand_tokens)
        wanted = -(-num_columns * num_tiles // self.num_cores)
        block = next((block for block in reversed(self.tiles.columns) if block >= wanted), self.tiles.columns[0])
        if self.name == "many":
            return block, block
        return block, min(block, max(SMALLEST_CHUNK, -(-wanted // SPLIT_GRANULE) * SPLIT_GRANULE))


def choose(num_tokens: int, in_features: int, num_vector_cores: int, on_chip_bytes: int) -> Regime:
    """The regime, from sizes that a captured graph fixes. Inputs that no cube block divides stay on the vector cores.

    Raises BackendError for a chip with less on-chip memory than any table is made for.
    """
    table = next((table for table in TABLES if table.on_chip_bytes <= on_chip_bytes), None)
    if table is None:
        raise BackendError(f"the LoRA kernels have no tiles for an NPU with {on_chip_bytes} bytes of unified buffer")
    if num_tokens <= FEW_TOKENS or in_features % table.many.inputs[-1]:
        return Regime("few", table.few, num_vector_cores)
    # Two vector cores belong to one cube core.
    return Regime("many", table.many, max(1, num_vector_cores // 2))
