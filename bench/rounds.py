"""What all benchmarks share: the order of a round's runs, percentiles, numbers in tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def forth_and_back(sides: Iterable[str]) -> list[str]:
    """All sides and back to the first; the last runs once in the middle, the others twice, so that the mean time of
    all their runs is the same and a machine whose speed drifts favours none."""
    there = list(sides)
    return [*there, *reversed(there[:-1])]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that `percent` of all do not exceed; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(math.ceil(percent * len(ordered) / 100), 1) - 1]


def cell(value: float | None) -> str:
    """A number in a table."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
