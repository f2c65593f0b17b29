"""Launch configurations of the window's kernels on NVIDIA GPUs, chosen by the padded token count and the window. Apart
from the kernels, which Triton builds without CUDA cannot import.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """Programs of one token.

    block_n        columns
    max_registers  of a thread; fewer let more programs share a core
    """

    block_n: int
    num_warps: int
    max_registers: int | None = None

    def num_programs(self, num_tokens: int, _window_rows: int) -> int:
        """Programs of each block of columns."""
        return num_tokens


@dataclass(frozen=True, slots=True)
class WindowTileConfig:
    """Programs of a tile of tokens; fields as in `TokenConfig`.

    block_m  tokens, at least 16
    stages   blocks of sixteen ranks in flight, past the first
    """

    block_m: int
    block_n: int
    num_warps: int
    max_registers: int | None = None
    stages: int = 3

    def num_programs(self, num_tokens: int, window_rows: int) -> int:
        """Programs of each block of columns: tiles times `turns`."""
        return -(-num_tokens // self.block_m) * self.turns(num_tokens, window_rows)

    def turns(self, num_tokens: int, window_rows: int) -> int:
        """Programs that take the segments of a tile in turn: about as many as it has if the window is full.

        A window of w rows holds w / 16 adapters at most.
        """
        return min(self.block_m, num_tokens, max(1, window_rows * self.block_m // (16 * num_tokens)))


@dataclass(frozen=True, slots=True)
class OpConfig:
    """Both forms of an op, and when tokens are taken one by one.

    min_rows_per_token  rows of the window for each token of the step from which on they are: its adapters stand low, so
                        the window says how many they may be, and tokens that share few of them are taken in tiles
    """

    token: TokenConfig
    tile: WindowTileConfig
    min_rows_per_token: int

    def choose(self, num_tokens: int, window_rows: int) -> TokenConfig | WindowTileConfig:
        """For a step of `num_tokens` padded tokens."""
        return self.token if window_rows >= self.min_rows_per_token * num_tokens else self.tile


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """Configurations of a kind of GPU."""

    expand: OpConfig
    swiglu: OpConfig


_H200 = WindowConfig(
    expand=OpConfig(TokenConfig(512, 2), WindowTileConfig(16, 128, 4), min_rows_per_token=2),
    swiglu=OpConfig(TokenConfig(128, 1), WindowTileConfig(16, 128, 4, 128), min_rows_per_token=4),
)

# By the name that the driver reports; "any" serves the rest.
TABLE: dict[str, WindowConfig] = {"NVIDIA H200": _H200, "any": _H200}


def config_for(kind: str) -> WindowConfig:
    """The configurations of a GPU of this kind."""
    return TABLE.get(kind, TABLE["any"])
