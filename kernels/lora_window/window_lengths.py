"""Which window a step takes: data, measured on one H200 with rank 16 on all projections of an 8B model.

A window of w rows is the first w rows of every group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowLength:
    """A window of `rows` rows serves steps of min_tokens to max_tokens (padded) tokens.

    Fewer tokens use few adapters, whose rows two kernels of their own read in less time than the product takes for a
    long window; for more tokens the product is bound by arithmetic, and pays for every row of the window.
    """

    rows: int
    min_tokens: int
    max_tokens: int


LENGTHS = (
    WindowLength(16, 1, 256),
    WindowLength(64, 1, 256),
    WindowLength(128, 1, 256),
    WindowLength(256, 1, 256),
    WindowLength(512, 4, 256),
    WindowLength(1024, 8, 256),
)


def window_lengths(total_rows: int) -> tuple[int, ...]:
    """The lengths, ascending, that steps can need where a group has at most `total_rows` rows."""
    shorter = sum(length.rows < total_rows for length in LENGTHS)
    return tuple(length.rows for length in LENGTHS[: shorter + 1]) if total_rows else ()


def window_for(end_row: int, num_tokens: int) -> int | None:
    """The length of the window for a step of `num_tokens` padded tokens whose adapters' rows, in all groups, lie below
    row `end_row` (`RowPool.rows_end`); None where the step is better off without one."""
    found = next((length for length in LENGTHS if end_row <= length.rows), None)
    if found is None or not found.min_tokens <= num_tokens <= found.max_tokens:
        return None
    return found.rows
