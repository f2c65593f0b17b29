"""A launch of the gated delta rule's kernels for Ascend NPUs, made ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.ascend_runtime import check_launch


@dataclass(frozen=True)
class DeltaLaunch:
    """A kernel, its grid, and all of its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        """Launch it."""
        check_launch(self.grid, self.arguments)
        self.kernel[self.grid](**self.arguments)
