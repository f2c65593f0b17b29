"""Allocation of rows and table entries on the device. Integers only: `RowPool` applies the decisions to tensors."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from adapters.errors import RowsExceeded
from adapters.layout import WINDOW_GROUPS, Group
from adapters.memory.eviction import DecayingLfu, Worth
from adapters.memory.row_ranges import Move, Range, RangeAllocator, Swap
from adapters.row_plan import RowPlan


@dataclass(frozen=True, slots=True)
class RowMove:
    """Rows `before` of the group slide down to `to`, in the order in which moves are listed; both may overlap."""

    group: Group
    before: Range
    to: int


@dataclass(slots=True)
class Placement:
    """The ranges of a newcomer, and the steps before its rows can be written: `moves`, one after the other.

    place    entry of the newcomer in the tables
    ranges   its ranges, by group
    evicted  digests that have lost their rows and their place
    """

    place: int
    ranges: dict[Group, Range] = field(default_factory=dict)
    moves: list[RowMove] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Resident:
    place: int
    rows: dict[Group, int]
    num_pins: int = 0
    is_held: bool = False

    @property
    def is_idle(self) -> bool:
        return self.num_pins == 0 and not self.is_held


class RowAllocation:
    """Tries in this order to make room for a newcomer: a free range; compacting idle ranges when only fragmentation is
    in the way; evicting the window of idle ranges of least worth; evicting the idle adapters of least worth and
    compacting all ranges, including those in use. An adapter's place never changes while it is resident; its ranges
    may.

    cost_per_row  cost of loading an adapter again, per row
    """

    def __init__(self, plan: RowPlan, cost_per_row: Callable[[str], float] = lambda _: 1.0) -> None:
        groups = plan.groups
        self.plan = plan
        self.num_evictions = self.num_moves = 0
        self.num_places = 0  # ever used
        self.num_changes = 0  # of who has rows, and of who is pinned no more
        self._groups = groups
        self._ranges = {group: RangeAllocator(plan.rows[group]) for group in groups}
        self._residents: dict[str, _Resident] = {}
        self._first_rows: dict[int, tuple[int, ...]] = {}
        self._free_places: list[int] = []
        self._rows_in_use = dict.fromkeys(groups, 0)  # of pinned and held residents
        self._worths = DecayingLfu(cost_per_row)

    # ---- questions

    def place_of(self, digest: str) -> int | None:
        """The adapter's entry in the tables, None if it is not resident."""
        resident = self._residents.get(digest)
        return None if resident is None else resident.place

    def first_rows(self, place: int) -> tuple[int, ...]:
        """First row per group, -1 where the adapter has none."""
        return self._first_rows[place]

    def rows_end(self, digests: Collection[str]) -> int:
        """The row behind the last one, in any group that windows hold, of these residents."""
        taken = (
            self._ranges[group].get(digest)
            for digest in digests
            for group in self._residents[digest].rows
            if group in WINDOW_GROUPS
        )
        return max((owned.end for owned in taken if owned is not None), default=0)

    def rows_needed(self, digests: Collection[str]) -> int:
        """The least that `rows_end` of these residents could be: their rows in the group in which they have most."""
        rows = [self._residents[digest].rows for digest in digests]
        return max((sum(one.get(group, 0) for one in rows) for group in WINDOW_GROUPS), default=0)

    def resident(self) -> tuple[str, ...]:
        """Digests, least recently used first."""
        return tuple(sorted(self._residents, key=self._worths.last_use))

    @property
    def num_resident(self) -> int:
        return len(self._residents)

    def rows_used(self) -> dict[Group, int]:
        """Rows in use, by group."""
        return {group: ranges.num_used for group, ranges in self._ranges.items()}

    def free_ranges(self, group: Group) -> list[Range]:
        """Ranges of the group without an owner."""
        return self._ranges[group].gaps()

    def check_size(self, rows: Mapping[str, int]) -> None:
        """Raises RowsExceeded when an adapter of so many rows would not fit an empty pool, or when the kernels do not
        take its rank."""
        rank, max_rank = self.plan.rank_of(rows), self.plan.max_rank
        if max_rank is not None and rank > max_rank:
            raise RowsExceeded(
                f"The adapter has rank {rank}; the kernels of this device take ranks up to {max_rank}. Upload it with "
                "a smaller rank."
            )
        group = self.plan.group_too_small(rows)
        if group is not None:
            raise RowsExceeded(self.plan.refusal(group, rows))

    def has_room(self, rows: Mapping[str, int]) -> bool:
        """Whether the residents in use leave an adapter of so many rows its room."""
        lengths = self._lengths(rows)
        return all(length + self._rows_in_use[group] <= self.plan.rows[group] for group, length in lengths.items())

    def fits_beside(self, rows: Mapping[str, int], digests: Collection[str], *, and_held: bool = True) -> bool:
        """Whether an adapter of so many rows would have room if these residents, and those that are held, were the only
        ones in use. Without `and_held` those are not counted."""
        held = {digest for digest, one in self._residents.items() if and_held and one.is_held}
        residents = [self._residents[digest] for digest in held.union(digests)]
        return all(
            length + sum(one.rows.get(group, 0) for one in residents) <= self.plan.rows[group]
            for group, length in self._lengths(rows).items()
        )

    # ---- changes

    def allocate(self, digest: str, rows: Mapping[str, int], *, may_evict: bool = True) -> Placement | None:
        """Allocate ranges and a place for a newcomer. None, with nothing changed, when the residents in use leave too
        few rows, or when, without `may_evict`, compacting idle ranges is not enough."""
        assert digest not in self._residents, digest
        lengths = self._lengths(rows)
        if not self.has_room(rows):
            return None
        if not may_evict and not all(self._has_room_beside_all(group, length) for group, length in lengths.items()):
            return None
        placement = Placement(-1)
        for group, length in lengths.items():
            self._make_room(group, length, placement)
            taken = self._ranges[group].allocate(digest, length)
            assert taken is not None, (group, length)
            # In use until all are there: room in the next group is not made at the cost of this one.
            placement.ranges[group] = taken
        if self._free_places:
            placement.place = heapq.heappop(self._free_places)
        else:
            placement.place = self.num_places
            assert placement.place < self.plan.num_places, "each resident takes a range, so places cannot run out"
            self.num_places += 1
        self.num_changes += 1
        self._residents[digest] = _Resident(placement.place, lengths)
        self._worths.add(digest)
        self._note_first_rows(digest)
        return placement

    def swap_below(
        self, digest: str, end_row: int, busy: Mapping[Group, Sequence[Range]]
    ) -> list[tuple[Group, Swap]] | None:
        """Bring the ranges of a resident below row `end_row`, in exchange for free rows and for residents without a
        pin. None, with nothing changed, where pins or `busy` rows are in the way in any group."""
        swaps: list[tuple[Group, Swap]] = []
        for group in self._residents[digest].rows:
            owned = self._ranges[group].get(digest)
            if group not in WINDOW_GROUPS or owned is None or owned.end <= end_row:
                continue
            found = self._ranges[group].swap_below(digest, end_row, self._worth_unless_pinned, busy.get(group, ()))
            if found is None:
                return None
            swaps.append((group, found))
        for group, swap in swaps:
            for owner in self._ranges[group].swap(swap):
                self._note_first_rows(owner)
        self.num_moves += len(swaps)
        return swaps

    def use(self, digest: str) -> None:
        """Count a use of a resident."""
        self._worths.use(digest)

    def pin(self, digest: str) -> None:
        """Protect a resident from eviction until as many unpins."""
        resident = self._residents[digest]
        self._worths.use(digest)
        resident.num_pins += 1
        if resident.num_pins == 1 and not resident.is_held:
            self._count_in_use(resident, 1)

    def unpin(self, digest: str) -> None:
        resident = self._residents[digest]
        assert resident.num_pins > 0, digest
        self._worths.touch(digest)
        resident.num_pins -= 1
        self.num_changes += resident.num_pins == 0
        if resident.is_idle:
            self._count_in_use(resident, -1)

    def hold(self, digest: str, is_held: bool) -> None:
        """Protect a resident from eviction whether it is used or not, or end that."""
        resident = self._residents[digest]
        was_idle, resident.is_held = resident.is_idle, is_held
        if was_idle != resident.is_idle:
            self._count_in_use(resident, 1 if was_idle else -1)

    def drop(self, digest: str) -> None:
        """Free the rows of a resident that is not in use; unknown digests are ignored."""
        resident = self._residents.get(digest)
        if resident is not None:
            assert resident.is_idle, digest
            self._worths.forget(digest)
            self._remove(digest)

    # ---- making room

    def _lengths(self, rows: Mapping[str, int]) -> dict[Group, int]:
        """Lengths of the ranges for an adapter with so many rows, by group."""
        return {group: self.plan.length(group, rows[group]) for group in self._groups if rows.get(group)}

    def _has_room_beside_all(self, group: Group, length: int) -> bool:
        """Whether `_make_room` would evict nobody and move no rows in use."""
        ranges = self._ranges[group]
        if ranges.has_gap(length):
            return True
        # Asked first: without enough free rows, the search for moves is quadratic in the residents.
        return ranges.num_free >= length and ranges.moves_for(length, self._is_idle) is not None

    def _make_room(self, group: Group, length: int, placement: Placement) -> None:
        """Leave one gap of `length` rows in the group. The rows in use are known to leave that many."""
        ranges = self._ranges[group]
        if ranges.has_gap(length):
            return
        moves = ranges.moves_for(length, self._is_idle) if ranges.num_free >= length else None
        if moves is None:
            victims = ranges.cheapest_window(length, self._worth_if_idle)
            if victims is not None:
                for victim in victims:
                    self._evict(victim, placement)
                return
            while ranges.num_free < length:
                idle = [owner for owner in ranges.owners() if self._is_idle(owner)]
                self._evict(min(idle, key=self._worths.of), placement)
            moves = ranges.moves_for(length, lambda _: True)
        assert moves is not None, (group, length)
        for move in moves:
            self._move(group, move, placement)

    def _is_idle(self, owner: str) -> bool:
        resident = self._residents.get(owner)
        return resident is not None and resident.is_idle

    def _worth_if_idle(self, owner: str) -> Worth | None:
        return self._worths.of(owner) if self._is_idle(owner) else None

    def _worth_unless_pinned(self, owner: str) -> Worth | None:
        return None if self._residents[owner].num_pins else self._worths.of(owner)

    def _count_in_use(self, resident: _Resident, sign: int) -> None:
        for group, length in resident.rows.items():
            self._rows_in_use[group] += sign * length

    def _evict(self, digest: str, placement: Placement) -> None:
        self._worths.evict(digest)
        self._remove(digest)
        placement.evicted.append(digest)
        self.num_evictions += 1

    def _remove(self, digest: str) -> None:
        self.num_changes += 1
        resident = self._residents.pop(digest)
        for group in resident.rows:
            self._ranges[group].release(digest)
        del self._first_rows[resident.place]
        heapq.heappush(self._free_places, resident.place)

    def _move(self, group: Group, move: Move, placement: Placement) -> None:
        placement.moves.append(RowMove(group, self._ranges[group].apply(move), move.to))
        self.num_moves += 1
        if move.owner in self._residents:
            self._note_first_rows(move.owner)

    def _note_first_rows(self, digest: str) -> None:
        ranges = [self._ranges[group].get(digest) for group in self._groups]
        self._first_rows[self._residents[digest].place] = tuple(-1 if r is None else r.start for r in ranges)

    # ---- integrity

    def check_integrity(self) -> None:
        """Ranges add up per group; residents, places, first rows and the rows in use agree."""
        for group, ranges in self._ranges.items():
            ranges.check_integrity()
            owners = {digest for digest, resident in self._residents.items() if group in resident.rows}
            assert ranges.owners() == owners, group
        places = [resident.place for resident in self._residents.values()]
        assert sorted(places + self._free_places) == list(range(self.num_places))
        assert set(self._first_rows) == set(places)
        for digest, resident in self._residents.items():
            self._check_resident(digest, resident)
        for group, in_use in self._rows_in_use.items():
            assert in_use == sum(r.rows.get(group, 0) for r in self._residents.values() if not r.is_idle), group

    def _check_resident(self, digest: str, resident: _Resident) -> None:
        assert resident.num_pins >= 0
        first_rows = self._first_rows[resident.place]
        for index, group in enumerate(self._groups):
            owned = self._ranges[group].get(digest)
            assert (owned.start if owned else -1) == first_rows[index], digest
            assert (owned.length if owned else 0) == resident.rows.get(group, 0), digest
