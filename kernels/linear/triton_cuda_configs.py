"""Launch configurations of products with quantised weights on NVIDIA GPUs: data, by bits of a code and tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A tile of products.

    block_out     outputs, at least 64
    block_tokens  tokens, at least 16
    stages        blocks of inputs in flight
    """

    block_out: int
    block_tokens: int
    num_warps: int
    stages: int


# Words of a block of inputs for each output, at most, by bits of a code; fixed when a weight is packed.
MAX_WORDS = {8: 32, 4: 16}
# Most tokens of a step whose codes are dequantised in registers; more take a dequantised copy of some rows at a time.
MAX_TOKENS = 256
# Programs for each core that the inputs of a narrow weight are split for, and the fewest blocks of one. Neither depends
# on the tokens, so that sums have the same order in every step.
PROGRAMS_PER_CORE = 2
MIN_BLOCKS = 4
# Outputs of a program by which the splits are counted.
SPLIT_OUT = 128

# By bits of a code, for steps of up to so many tokens, ascending.
TABLE: dict[int, dict[int, TileConfig]] = {
    8: {
        16: TileConfig(128, 16, 4, 3),
        32: TileConfig(128, 32, 4, 4),
        64: TileConfig(128, 64, 8, 3),
        128: TileConfig(128, 128, 8, 3),
        256: TileConfig(128, 128, 8, 3),
    },
    4: {
        16: TileConfig(128, 16, 4, 4),
        32: TileConfig(128, 32, 4, 4),
        64: TileConfig(128, 64, 4, 3),
        128: TileConfig(128, 128, 8, 3),
        256: TileConfig(128, 128, 8, 3),
    },
}


def config_for(bits: int, num_tokens: int) -> TileConfig:
    """The configuration for a step of up to MAX_TOKENS tokens."""
    return next(config for tokens, config in TABLE[bits].items() if num_tokens <= tokens)


def num_splits(out_features: int, num_blocks: int, num_cores: int) -> int:
    """Programs that share the inputs of a tile."""
    wanted = PROGRAMS_PER_CORE * num_cores // -(-out_features // SPLIT_OUT)
    return max(1, min(wanted, num_blocks // MIN_BLOCKS))
