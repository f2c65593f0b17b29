"""The range allocator of one projection group: who owns which rows, and what must move or go to make room.

Pure integers; `RowAllocation` has one for each group. A range is [start, start + length).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adapters.worth import Worth


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


class RangeAllocator:
    """Rows [0, num_rows) of a group. Owners are digests; each owns at most one range.

    `ordered` lists the ranges by start. Integers only: the caller moves the data.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._ranges: dict[str, Range] = {}

    def get(self, owner: str) -> Range | None:
        return self._ranges.get(owner)

    def owners(self) -> frozenset[str]:
        return frozenset(self._ranges)

    def ordered(self) -> list[tuple[str, Range]]:
        return sorted(self._ranges.items(), key=lambda item: item[1].start)

    @property
    def num_used(self) -> int:
        return sum(owned.length for owned in self._ranges.values())

    @property
    def num_free(self) -> int:
        return self.num_rows - self.num_used

    def take(self, owner: str, length: int) -> Range | None:
        """Give `owner` the lowest gap that holds `length` rows; None if no single gap does.

        The lowest, not the smallest: the windows behind base weights are prefixes of the rows, and a short one is all
        that a step needs whose adapters stand low. (Moving those in use often down, while others are idle, is a step
        that is not taken here.)
        """
        assert owner not in self._ranges, owner
        assert length > 0
        gap = next((gap for gap in self.gaps() if gap.length >= length), None)
        if gap is None:
            return None
        self._ranges[owner] = Range(gap.start, length)
        return self._ranges[owner]

    def has_gap(self, length: int) -> bool:
        return any(gap.length >= length for gap in self.gaps())

    def release(self, owner: str) -> None:
        del self._ranges[owner]

    def rename(self, owner: str, to: str) -> None:
        """Give an owner's range to another one, which has none."""
        assert to not in self._ranges, to
        self._ranges[to] = self._ranges.pop(owner)

    def apply(self, move: Move) -> Range:
        """Record that a range was moved; returns where it stood."""
        before = self._ranges[move.owner]
        self._ranges[move.owner] = Range(move.to, before.length)
        return before

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
        """Ranges lie inside, do not overlap, and with the gaps add up to all rows."""
        end = 0
        for owner, owned in self.ordered():
            assert owned.length > 0, owner
            assert owned.start >= end, f"{owner} overlaps the range before it"
            end = owned.end
        assert end <= self.num_rows
        assert sum(gap.length for gap in self.gaps()) == self.num_free

    def gaps(self) -> list[Range]:
        """That nobody has, by start."""
        found, end = [], 0
        for _, owned in self.ordered():
            if owned.start > end:
                found.append(Range(end, owned.start - end))
            end = owned.end
        if end < self.num_rows:
            found.append(Range(end, self.num_rows - end))
        return found
