"""Launch configurations of the LoRA kernels on NVIDIA GPUs, chosen by the padded token count and the input width alone.

`python -m bench.kernels.tune_lora` prints a table of this form for the GPU it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

LONG_INPUTS = 8192 + 1


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """Tile and launch shape of the shrink.

    num_splits        parts of the input whose products are summed by the expand; more parts fill more cores
    block_m           tokens of a tile
    block_k           inputs of a block
    block_r           ranks of a block where an adapter has so many; what is left of them takes blocks of 32 and 16
    groups            parts of a block's inputs that warps multiply side by side; 1 lets tiles of 64 tokens use wgmma
    stages            blocks in flight in the loop over the inputs
    programs_per_core of the persistent grid
    max_registers     of a thread; fewer let more programs share a core
    num_splits_long   parts of LONG_INPUTS inputs and more; None: as many as of fewer
    """

    num_splits: int
    block_m: int
    block_k: int
    block_r: int
    groups: int
    stages: int
    num_warps: int
    programs_per_core: int
    max_registers: int | None = None
    num_splits_long: int | None = None

    def splits(self, in_features: int) -> int:
        """Parts that these inputs are split into."""
        if in_features < LONG_INPUTS or self.num_splits_long is None:
            return self.num_splits
        return self.num_splits_long


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """Tile and launch shape of the expand; fields as in `ShrinkConfig`.

    block_n          columns of a block for ranks up to 16
    block_n_tall     columns of a block for ranks up to 64, a divisor of block_n
    tallest          (columns of a block, stages) for ranks up to 128; None: half of block_n_tall, and stages
    """

    block_m: int
    block_n: int
    block_n_tall: int
    stages: int
    num_warps: int
    programs_per_core: int
    max_registers: int | None = None
    tallest: tuple[int, int] | None = None

    @property
    def of_tallest(self) -> tuple[int, int]:
        """(columns of a block, stages) for ranks up to 128."""
        return self.tallest or (self.block_n_tall // 2, self.stages)


@dataclass(frozen=True, slots=True)
class OneTokenShrink:
    """Launch shape of the shrink of steps of one token; fields as in `ShrinkConfig`.

    num_splits  at most; fewer where a part of the input would be less than block_k
    block_k     fewest inputs of a part, and what parts are multiples of half of
    """

    num_splits: int
    block_k: int
    num_warps: int
    programs_per_core: int

    def part(self, in_features: int, num_splits: int) -> int:
        """Inputs of each of so many parts but the last."""
        granule = self.block_k // 2
        return -(-in_features // (num_splits * granule)) * granule

    def splits(self, in_features: int) -> int:
        """Parts that these inputs are split into."""
        most = max(1, min(self.num_splits, in_features // self.block_k))
        return -(-in_features // self.part(in_features, most))


@dataclass(frozen=True, slots=True)
class OneTokenExpand:
    """Launch shape of the expand of steps of one token; fields as in `ExpandConfig`.

    block_n  columns of a block, candidates; the narrowest is taken that does not make more blocks than programs
    """

    block_n: tuple[int, ...]
    num_warps: int
    programs_per_core: int

    def columns(self, widths: tuple[int, ...], max_programs: int) -> tuple[int, int]:
        """(columns of a block, number of blocks) of slices of these widths."""
        counted = [(block, sum(-(-width // block) for width in widths)) for block in self.block_n]
        return next((pair for pair in counted if pair[1] <= max_programs), counted[-1])


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Configurations for steps of up to `max_tokens` tokens.

    min_plain_tokens  tokens that each adapter of a step must have for products of the GPU's library; None: never
    """

    max_tokens: int
    shrink: ShrinkConfig | OneTokenShrink
    expand: ExpandConfig | OneTokenExpand
    min_plain_tokens: int | None = None

    def is_plain(self, num_tokens: Sequence[int], rank: int, in_features: int, widths: Sequence[int]) -> bool:
        """Whether two products of the GPU's library, for each adapter and slice, are faster than the two kernels.

        num_tokens  of each adapter of a step that is not captured
        rank        the largest

        With one adapter they read x once for each slice, as the shrink does, and the library's tiles are better; the
        kernels win where the output is wide (they add to it as they go) and where ranks are few (one read of x serves
        all slices). Ranks above 128 do not fit their tiles at all. Ratios: docs/performance-kernels.md.
        """
        if self.min_plain_tokens is None or min(num_tokens, default=0) < self.min_plain_tokens:
            return False
        if rank > 128 or len(num_tokens) > 1:
            return rank > 128
        if len(widths) > 1:
            return rank > 64 and sum(widths) < 4 * in_features
        return rank > 32 or (rank > 16 and in_features >= LONG_INPUTS)


UNBOUNDED = 2**31

_H200 = (
    LoraConfig(1, OneTokenShrink(32, 128, 8, 1), OneTokenExpand((64, 128), 1, 4)),
    LoraConfig(4, ShrinkConfig(8, 16, 128, 32, 2, 4, 2, 4), ExpandConfig(16, 128, 128, 3, 4, 4, 128)),
    LoraConfig(
        128, ShrinkConfig(4, 16, 128, 32, 2, 4, 2, 4, num_splits_long=8), ExpandConfig(16, 128, 128, 3, 4, 4, 128)
    ),
    LoraConfig(256, ShrinkConfig(4, 16, 128, 32, 2, 4, 2, 4), ExpandConfig(16, 128, 128, 3, 4, 3, 168)),
    LoraConfig(1024, ShrinkConfig(2, 64, 128, 64, 1, 4, 4, 2, num_splits_long=4), ExpandConfig(64, 128, 128, 3, 4, 2)),
    LoraConfig(
        4096,
        ShrinkConfig(2, 64, 128, 64, 1, 4, 4, 2),
        ExpandConfig(64, 128, 128, 3, 4, 2, tallest=(64, 3)),
        min_plain_tokens=1024,
    ),
    LoraConfig(
        UNBOUNDED,
        ShrinkConfig(1, 64, 128, 64, 1, 3, 4, 4),
        ExpandConfig(64, 128, 128, 3, 8, 4, 128, tallest=(128, 2)),
        min_plain_tokens=1024,
    ),
)

# Kind of GPU, by the name its driver reports -> configurations by ascending token count; "any" serves the rest.
TABLES: dict[str, tuple[LoraConfig, ...]] = {"NVIDIA H200": _H200, "any": _H200}

# Of steps whose size must not matter: what serves decode steps serves all.
BATCH_INVARIANT = replace(_H200[2], max_tokens=UNBOUNDED)


def config_for(kind: str, num_tokens: int) -> LoraConfig:
    """The configuration for a step of `num_tokens` padded tokens on a GPU of this kind."""
    table = TABLES.get(kind, TABLES["any"])
    return next(config for config in table if num_tokens <= config.max_tokens)
