"""The range allocator of one projection group: who owns which rows, and what must move or go to make room.

Pure integers; `RowAllocation` has one for each group. A range is [start, start + length).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adapters.memory.eviction import Worth

_NOTHING: Worth = (0.0, 0)  # of rows that nobody has


@dataclass(frozen=True, slots=True)
class Range:
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Move:
    """Slide `owner`'s range down to `to` (to < its start): an overlapping-safe copy when done in the order given."""

    owner: str
    to: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Disjoint rows [low, low + length) and [high, high + length) are exchanged."""

    low: int
    high: int
    length: int


def _start(item: tuple[str, Range]) -> int:
    return item[1].start


def _end(item: tuple[str, Range]) -> int:
    return item[1].end


class RangeAllocator:
    """Rows [0, num_rows) of a group. Owners are digests; each owns at most one range.

    `ordered` lists the ranges by start. Integers only: the caller moves the data.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._ranges: dict[str, Range] = {}
        self._ordered: list[tuple[str, Range]] | None = None  # None: to be sorted anew

    def get(self, owner: str) -> Range | None:
        return self._ranges.get(owner)

    def owners(self) -> frozenset[str]:
        return frozenset(self._ranges)

    def ordered(self) -> Sequence[tuple[str, Range]]:
        if self._ordered is None:
            self._ordered = sorted(self._ranges.items(), key=_start)
        return self._ordered

    @property
    def num_used(self) -> int:
        return sum(owned.length for owned in self._ranges.values())

    @property
    def num_free(self) -> int:
        return self.num_rows - self.num_used

    def allocate(self, owner: str, length: int) -> Range | None:
        """Allocate the lowest gap of at least `length` rows to `owner`; None if no single gap is long enough.

        The lowest, not the smallest: the windows behind base weights are prefixes of the rows, and a short window is
        all that
        a step needs whose adapters have low rows; see `swap_below` for those that do not.
        """
        assert owner not in self._ranges, owner
        assert length > 0
        gap = next((gap for gap in self.gaps() if gap.length >= length), None)
        if gap is None:
            return None
        self._ranges[owner] = Range(gap.start, length)
        self._ordered = None
        return self._ranges[owner]

    def has_gap(self, length: int) -> bool:
        return any(gap.length >= length for gap in self.gaps())

    def release(self, owner: str) -> None:
        del self._ranges[owner]
        self._ordered = None

    def rename(self, owner: str, to: str) -> None:
        """Transfer an owner's range to another owner, which has none."""
        assert to not in self._ranges, to
        self._ranges[to] = self._ranges.pop(owner)
        self._ordered = None

    def apply(self, move: Move) -> Range:
        """Record that a range was moved; returns where it stood."""
        before = self._ranges[move.owner]
        self._ranges[move.owner] = Range(move.to, before.length)
        self._ordered = None
        return before

    def swap(self, swap: Swap) -> list[str]:
        """Record that these rows, which cut no range, were swapped; returns the owners of the ranges that moved."""
        ranges, shift = self.ordered(), swap.high - swap.low
        low, low_end, high, high_end = (
            bisect_left(ranges, row, key=_start)
            for row in (swap.low, swap.low + swap.length, swap.high, swap.high + swap.length)
        )
        raised = [(owner, Range(owned.start + shift, owned.length)) for owner, owned in ranges[low:low_end]]
        lowered = [(owner, Range(owned.start - shift, owned.length)) for owner, owned in ranges[high:high_end]]
        self._ordered = [*ranges[:low], *lowered, *ranges[low_end:high], *raised, *ranges[high_end:]]
        self._ranges.update(raised + lowered)
        return [owner for owner, _ in raised + lowered]

    def swap_below(
        self, owner: str, end_row: int, worth_of: Callable[[str], Worth | None], busy: Sequence[Range] = ()
    ) -> Swap | None:
        """The swap that brings `owner`'s range, which is not there, below row `end_row`, in exchange for free rows or
        the ranges of least worth. It moves as few rows as possible. None if ranges of worth None are always in the way.

        busy  rows that stay where they are, whoever owns them
        """
        own, ranges = self._ranges[owner], self.ordered()
        below = ranges[: bisect_right(ranges, end_row, key=_end)]
        longer = {owned.length for _, owned in below if owned.length > own.length}
        find = _RegionSearch(ranges, worth_of, busy)
        for length in sorted({own.length, *longer}):
            low = find.cheapest(length, Range(0, min(end_row, own.start)))
            if low is None:
                continue
            first = max(low + length, own.end - length)
            last_end = min(own.start + length, self.num_rows)
            high = find.cheapest(length, Range(first, last_end - first), beside=owner)
            if high is not None:
                return Swap(low, high, length)
        return None

    def moves_for(self, length: int, movable: Callable[[str], bool]) -> list[Move] | None:
        """The fewest rows to slide so that one gap of `length` rows appears; None if the movable ranges cannot do it.

        Looks at runs gap, range, gap, range, ..., gap of movable neighbours: sliding a run's ranges to its low end
        leaves all of its gaps as one at its high end.
        """
        best: tuple[int, list[Move]] | None = None
        ranges = self.ordered()
        for first in range(len(ranges)):
            low = ranges[first - 1][1].end if first else 0
            to, moved = low, 0
            moves: list[Move] = []
            for index in range(first, len(ranges)):
                owner, owned = ranges[index]
                if not movable(owner):
                    break
                if owned.start != to:
                    moves.append(Move(owner, to))
                    moved += owned.length
                to += owned.length
                high = ranges[index + 1][1].start if index + 1 < len(ranges) else self.num_rows
                if high - to >= length:
                    if best is None or moved < best[0]:
                        best = moved, moves
                    break
        return None if best is None else best[1]

    def cheapest_window(self, length: int, worth_of: Callable[[str], Worth | None]) -> list[str] | None:
        """The owners to evict so that one gap of `length` rows appears: the worthiest of them is worth as little as
        possible, and they are few. None where ranges of worth None (in use) are always in the way."""
        best: tuple[Worth, int, list[str]] | None = None
        ranges = self.ordered()
        for first in range(len(ranges)):
            low = ranges[first - 1][1].end if first else 0
            most: Worth = (0.0, 0)
            victims: list[str] = []
            for index in range(first, len(ranges)):
                worth = worth_of(ranges[index][0])
                if worth is None:
                    break
                most = max(most, worth)
                victims.append(ranges[index][0])
                high = ranges[index + 1][1].start if index + 1 < len(ranges) else self.num_rows
                if high - low >= length:
                    if best is None or (most, len(victims)) < best[:2]:
                        best = most, len(victims), victims
                    break
        return None if best is None else best[2]

    def check_integrity(self) -> None:
        """Ranges lie inside, do not overlap, and with the gaps add up to all rows; they are listed as they are."""
        assert list(self.ordered()) == sorted(self._ranges.items(), key=_start)
        end = 0
        for owner, owned in self.ordered():
            assert owned.length > 0, owner
            assert owned.start >= end, f"{owner} overlaps the range before it"
            end = owned.end
        assert end <= self.num_rows
        assert sum(gap.length for gap in self.gaps()) == self.num_free

    def gaps(self) -> list[Range]:
        """Ranges without an owner, by start."""
        found, end = [], 0
        for _, owned in self.ordered():
            if owned.start > end:
                found.append(Range(end, owned.start - end))
            end = owned.start + owned.length  # a property would be called for each owner, some times in every load
        if end < self.num_rows:
            found.append(Range(end, self.num_rows - end))
        return found


class _RegionSearch:
    """Looks for regions, runs of rows that cut no range, which only ranges that may move have a part in.

    ranges  by start
    """

    def __init__(
        self, ranges: Sequence[tuple[str, Range]], worth_of: Callable[[str], Worth | None], busy: Sequence[Range]
    ) -> None:
        self._ranges = ranges
        self._worth_of = worth_of
        self._busy = busy

    def cheapest(self, length: int, within: Range, beside: str | None = None) -> int | None:
        """Where a region of `length` rows begins whose worthiest range is worth least; None if there is none.

        beside  a range that may move, whatever it is worth
        """
        first = bisect_right(self._ranges, within.start, key=_end)
        last = bisect_right(self._ranges, within.end, key=_start)
        # Once each: where one ends the next one mostly begins.
        borders = dict.fromkeys(border for _, owned in self._ranges[first:last] for border in (owned.start, owned.end))
        best: tuple[Worth, int] | None = None
        for start in (within.start, *(one for one in borders if within.start < one <= within.end - length)):
            worth = self._worth(Range(start, length), beside) if start + length <= within.end else None
            if worth is not None and (best is None or worth < best[0]):
                best = worth, start
                if worth == _NOTHING:
                    break
        return None if best is None else best[1]

    def _worth(self, region: Range, beside: str | None) -> Worth | None:
        """The largest worth of a range in the region; None if a range is cut, or must stay."""
        if any(one.start < region.end and region.start < one.end for one in self._busy):
            return None
        most = _NOTHING
        for at in range(bisect_right(self._ranges, region.start, key=_end), len(self._ranges)):
            owner, owned = self._ranges[at]
            if owned.start >= region.end:
                break
            worth = _NOTHING if owner == beside else self._worth_of(owner)
            if worth is None or owned.start < region.start or owned.end > region.end:
                return None
            most = max(most, worth)
        return most
