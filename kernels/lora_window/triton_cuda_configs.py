"""Launch configurations of the window's kernels on NVIDIA GPUs, chosen by the padded token count and the window."""

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
        """Of each block of columns."""
        return num_tokens


@dataclass(frozen=True, slots=True)
class TileConfig:
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
        """Of each block of columns: tiles times `turns`."""
        return -(-num_tokens // self.block_m) * self.turns(num_tokens, window_rows)

    def turns(self, num_tokens: int, window_rows: int) -> int:
        """Programs that take the segments of a tile in turn: about as many as it has if the window is full.

        A window of w rows holds w / 16 adapters at most.
        """
        return min(self.block_m, num_tokens, max(1, window_rows * self.block_m // (16 * num_tokens)))


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """Configurations for steps of up to `max_tokens` tokens and windows of at least `min_rows_per_token` rows for each.

    A step's adapters stand low, so the window says how many they may be: tokens that share few are taken in tiles.
    """

    max_tokens: int
    min_rows_per_token: int
    expand: TileConfig | TokenConfig
    swiglu: TileConfig | TokenConfig


UNBOUNDED = 2**31

_H200 = (
    WindowConfig(64, 8, TokenConfig(512, 4), TokenConfig(512, 4)),
    WindowConfig(64, 0, TileConfig(16, 128, 4), TileConfig(16, 64, 2, 128)),
    WindowConfig(UNBOUNDED, 0, TileConfig(32, 128, 4), TileConfig(16, 128, 4)),
)

# Kind of GPU, by the name its driver reports -> configurations, of which the first that fits is taken; "any" serves the
# rest.
TABLES: dict[str, tuple[WindowConfig, ...]] = {"NVIDIA H200": _H200, "any": _H200}


def config_for(kind: str, num_tokens: int, window_rows: int) -> WindowConfig:
    """The configuration for a step of `num_tokens` padded tokens on a GPU of this kind."""
    table = TABLES.get(kind, TABLES["any"])
    return next(
        config
        for config in table
        if num_tokens <= config.max_tokens and window_rows >= config.min_rows_per_token * num_tokens
    )
