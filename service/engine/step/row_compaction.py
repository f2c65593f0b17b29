"""Moves of running adapters to low rows, so that the windows of their steps are short.

A window is a prefix of the rows (`kernels.lora_window`), so one adapter that stands high makes it long for all, and
past the longest there is none. Where an adapter came to the device says nothing of whom it will run beside. So before a
step the rows of its adapters that stand higher than they need to change places with rows of nobody, or of adapters that
do not run. On a GPU that is a launch for each group of projections, which goes through the rows once in either
direction (0.15 ms for an adapter of 84 MB on an H100), and what it saves it saves in each step until another adapter
joins.
"""

from __future__ import annotations

from kernels.lora_window.window_lengths import window_for
from service.engine.loras.interfaces import Rows

# In one step: a burst of many new adapters is spread over some. Each takes 0.3 ms of the host in a pool of a thousand.
MAX_ADAPTERS_A_STEP = 4


class RowCompaction:
    """Between launches of steps."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._settled: tuple[frozenset[str], int, int] | None = None

    def bring(self, digests: frozenset[str], num_tokens: int) -> None:
        """Shorten the window of a step of `num_tokens` padded tokens with these adapters, which are pinned."""
        now = digests, num_tokens, self._rows.num_changes
        if now == self._settled:
            return
        end_row = window_for(self._rows.rows_needed(digests), num_tokens)
        if end_row is None or self._rows.bring_below(end_row, digests, max_adapters=MAX_ADAPTERS_A_STEP):
            self._settled = now
