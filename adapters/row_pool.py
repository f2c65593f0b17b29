"""The adapters on the device: one stack of rows per projection, one range allocator per projection group."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from adapters.errors import RowsExceeded
from adapters.host_tier import HostAdapter
from adapters.layout import SIDE_GROUPS, BaseLayout, Group, Projection
from adapters.row_plan import plan_rows
from adapters.row_ranges import Move, Range, RangeAllocator
from adapters.side_pool import BaseFacts, SidePool
from kernels.lora.maps import LoraStack


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """rows and bytes of resident adapters (their aligned ranges) and in total; counters since the pool was made."""

    rows_used: int
    rows_total: int
    bytes_used: int
    bytes_total: int
    num_resident: int
    num_loads: int
    num_evictions: int
    num_moves: int


@dataclass(slots=True)
class _Resident:
    place: int
    rows: dict[Group, int]
    last_use: int
    num_pins: int = 0


class RowPool:
    """Owns every `LoraStack`. One thread, between launches of steps, in whose order the device does what is asked here;
    a load waits for the steps before it, since it copies from memory that is not pinned. What `first_rows` says holds
    until the next `load`.

    A load makes room in this order: a free range; sliding idle ranges together when only fragmentation is in the way;
    evicting the window of idle ranges that was not used for longest; evicting the least recently used idle adapters and
    sliding all ranges, those in use included. Places never change while an adapter is resident, ranges may.
    """

    def __init__(
        self,
        layout: BaseLayout,
        budget_bytes: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        alignment: int = 16,
        max_rank: int | None = None,
        rows_behind: Callable[[str, int, int], torch.Tensor | None] | None = None,
        side_bytes: int = 0,
        base: BaseFacts | None = None,
    ) -> None:
        """rows_behind  (name of a projection, number of rows, number of slices) -> memory behind its base weight for
        the rows of A, [rows * slices, in_features], row j of slice s at j * slices + s; None: they stand by themselves.
        The bytes count as the pool's either way.
        side_bytes, base  for what adapters have beside rows; 0: those that have such find no room
        """
        self._rows_behind = rows_behind
        self.plan = plan_rows(
            layout,
            budget_bytes,
            element_bytes=dtype.itemsize,
            alignment=alignment,
            max_rank=max_rank,
            side_bytes=side_bytes,
        )
        self._layout = layout
        self._groups = self.plan.groups
        self._base = base
        self.side: SidePool | None = None
        if side_bytes:
            assert base is not None, "what adapters have beside rows depends on the base"
            self.side = SidePool(layout, self.plan.rows, base, dtype, device)
        self._ranges = {group: RangeAllocator(self.plan.rows[group]) for group in self._groups}
        num_slices = sum(len(projection.slices) for projection in layout.projections)
        # One column per place, one row per slice: a load writes one column of each.
        self._ranks = torch.zeros(num_slices, self.plan.num_places, dtype=torch.int32, device=device)
        self._scalings = torch.zeros(num_slices, self.plan.num_places, dtype=torch.float32, device=device)
        self._stacks: dict[str, LoraStack] = {}
        for projection in layout.projections:
            self._stacks[projection.name] = self._make_stack(projection, dtype, device)
        self._residents: dict[str, _Resident] = {}
        self._first_rows: dict[int, tuple[int, ...]] = {}
        self._free_places: list[int] = []
        self._num_places = 0  # places ever used: the length of the host tables
        self._rows_in_use = dict.fromkeys(self._groups, 0)  # of pinned residents
        self._clock = 0
        self._num_loads = self._num_evictions = self._num_moves = 0

    # ---- for the model and the maps

    def stack(self, name: str) -> LoraStack:
        """The rows of a projection; the same object for the life of the pool."""
        return self._stacks[name]

    def place_of(self, digest: str) -> int | None:
        """The place of a resident adapter, None if it is not on the device."""
        resident = self._residents.get(digest)
        return None if resident is None else resident.place

    def first_rows(self, place: int) -> tuple[int, ...]:
        """First row per group of the plan, -1 where the adapter has none. Read it when the maps of a step are built,
        after all loads of that step."""
        return self._first_rows[place]

    def rows_end(self, digests: Collection[str]) -> int:
        """The row behind the last one, in any group, of these residents: a window must be as long to hold them all."""
        taken = (
            self._ranges[group].get(digest)
            for digest in digests
            for group in self._residents[digest].rows
            if group not in SIDE_GROUPS
        )
        return max((owned.end for owned in taken if owned is not None), default=0)

    # ---- residents

    def load(self, digest: str, adapter: HostAdapter, *, may_evict: bool = True) -> bool:
        """Copy the adapter to the device unless it is there. False when the adapters in use leave too few rows, or,
        without `may_evict`, when no more than sliding idle ranges together is not enough; then nothing has changed.
        Raises RowsExceeded when it would not fit an empty pool, or when the kernels do not take its rank: the store may
        hold it from a server with more rows, or with another device."""
        self._clock += 1
        resident = self._residents.get(digest)
        if resident is not None:
            resident.last_use = self._clock
            return True
        self.check_size(adapter.rows)
        lengths = self._lengths(adapter.rows)
        if not self.has_room(adapter.rows):
            return False
        if not may_evict and not all(self._has_room_beside_all(group, length) for group, length in lengths.items()):
            return False
        for group, length in lengths.items():
            self._make_room(group, length)
            taken = self._ranges[group].take(digest, length)
            assert taken is not None, (group, length)
            # In use until the load is complete: room in the next group is not made at the cost of this one.
        place = heapq.heappop(self._free_places) if self._free_places else self._new_place()
        resident = _Resident(place, lengths, self._clock)
        self._residents[digest] = resident
        self._write(digest, resident, adapter)
        self._num_loads += 1
        return True

    def check_size(self, rows: Mapping[str, int]) -> None:
        """Raises RowsExceeded when an adapter of so many rows would not fit an empty pool, or when the kernels do not
        take its rank."""
        rank, max_rank = max(rows.values(), default=0), self.plan.max_rank
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

    def fits_beside(self, rows: Mapping[str, int], digests: Collection[str]) -> bool:
        """Whether an adapter of so many rows would have room if these residents were the only ones in use."""
        residents = [self._residents[digest] for digest in digests]
        return all(
            length + sum(one.rows.get(group, 0) for one in residents) <= self.plan.rows[group]
            for group, length in self._lengths(rows).items()
        )

    def pin(self, digest: str) -> None:
        """Keep a resident adapter on the device until as many unpins."""
        self._clock += 1
        resident = self._residents[digest]
        resident.num_pins += 1
        resident.last_use = self._clock
        if resident.num_pins == 1:
            self._count_in_use(resident, 1)

    def unpin(self, digest: str) -> None:
        self._clock += 1
        resident = self._residents[digest]
        assert resident.num_pins > 0, digest
        resident.num_pins -= 1
        resident.last_use = self._clock
        if resident.num_pins == 0:
            self._count_in_use(resident, -1)

    def drop(self, digest: str) -> None:
        """Free the adapter's rows; it must not be pinned. Unknown digests are ignored."""
        resident = self._residents.get(digest)
        if resident is None:
            return
        assert resident.num_pins == 0, digest
        self._remove(digest)

    def resident(self) -> tuple[str, ...]:
        """Digests on the device, least recently used first."""
        return tuple(sorted(self._residents, key=lambda digest: self._residents[digest].last_use))

    def usage(self) -> PoolUsage:
        used = {group: self._ranges[group].num_used for group in self._groups}
        return PoolUsage(
            rows_used=sum(num for group, num in used.items() if group not in SIDE_GROUPS),
            rows_total=self.plan.num_rows,
            bytes_used=sum(used[group] * self.plan.row_bytes[group] for group in self._groups),
            bytes_total=self.plan.total_bytes,
            num_resident=len(self._residents),
            num_loads=self._num_loads,
            num_evictions=self._num_evictions,
            num_moves=self._num_moves,
        )

    # ---- making room

    def _lengths(self, rows: Mapping[str, int]) -> dict[Group, int]:
        """Of the ranges that an adapter of so many rows takes."""
        return {group: self.plan.length(group, rows[group]) for group in self._groups if rows.get(group)}

    def _has_room_beside_all(self, group: Group, length: int) -> bool:
        """Whether `_make_room` would evict nobody and move no rows in use."""
        ranges = self._ranges[group]
        if ranges.has_gap(length):
            return True
        # Asked first: without enough free rows, the search for moves is quadratic in the residents.
        return ranges.num_free >= length and ranges.moves_for(length, self._is_idle) is not None

    def _make_room(self, group: Group, length: int) -> None:
        """Leave one gap of `length` rows in the group. The rows in use are known to leave that many."""
        ranges = self._ranges[group]
        if ranges.has_gap(length):
            return
        moves = ranges.moves_for(length, self._is_idle) if ranges.num_free >= length else None
        if moves is None:
            victims = ranges.oldest_window(length, self._idle_since)
            if victims is not None:
                for victim in victims:
                    self._evict(victim)
                return
            while ranges.num_free < length:
                idle = [owner for owner in ranges.owners() if self._is_idle(owner)]
                self._evict(min(idle, key=lambda owner: self._residents[owner].last_use))
            moves = ranges.moves_for(length, lambda _: True)
        assert moves is not None, (group, length)
        for move in moves:
            self._move(group, move)

    def _is_idle(self, owner: str) -> bool:
        resident = self._residents.get(owner)
        return resident is not None and resident.num_pins == 0

    def _idle_since(self, owner: str) -> int | None:
        """The clock at the adapter's last use; None while in use."""
        return self._residents[owner].last_use if self._is_idle(owner) else None

    def _count_in_use(self, resident: _Resident, sign: int) -> None:
        for group, length in resident.rows.items():
            self._rows_in_use[group] += sign * length

    def _evict(self, digest: str) -> None:
        self._remove(digest)
        self._num_evictions += 1

    def _remove(self, digest: str) -> None:
        resident = self._residents.pop(digest)
        for group in resident.rows:
            self._ranges[group].release(digest)
        del self._first_rows[resident.place]
        self._write_tables(resident.place, {})
        heapq.heappush(self._free_places, resident.place)

    def _move(self, group: Group, move: Move) -> None:
        """Slide a range down in every tensor of the group."""
        before = self._ranges[group].apply(move)
        for projection in self._projections(group):
            stack = self._stacks[projection.name]
            for rows in (*stack.a, *stack.b):
                # Source and target may overlap, which copy_ does not allow.
                rows[move.to : move.to + before.length] = rows[before.start : before.end].clone()
        if group in SIDE_GROUPS:
            assert self.side is not None and before.length == 1
            self.side.move(group, before.start, move.to)
        self._num_moves += 1
        if move.owner in self._residents:
            self._note_first_rows(move.owner)

    # ---- writing

    def _write(self, digest: str, resident: _Resident, adapter: HostAdapter) -> None:
        """Fill the ranges: the adapter's rows, and zeros past the rank of each slice, which kernels may read."""
        for group in resident.rows:
            taken = self._ranges[group].get(digest)
            assert taken is not None
            if group in SIDE_GROUPS:
                assert self.side is not None
                self.side.write(group, taken.start, adapter)
                continue
            for projection in self._projections(group):
                stack = self._stacks[projection.name]
                for index, piece in enumerate(projection.slices):
                    weights = adapter.slices.get(piece.module)
                    _fill(stack.a[index], taken, None if weights is None else weights.a)
                    _fill(stack.b[index], taken, None if weights is None else weights.b)
                    if piece.module in adapter.tokens:
                        self._subtract_base(projection, taken, adapter.tokens[piece.module])
        self._write_tables(resident.place, {module: (s.rank, s.scaling) for module, s in adapter.slices.items()})
        self._note_first_rows(digest)

    def _subtract_base(self, projection: Projection, taken: Range, token_ids: tuple[int, ...]) -> None:
        """Trained tokens are held as what they are; rows are what they change the base by."""
        assert self._base is not None, "trained tokens depend on the base"
        stack = self._stacks[projection.name]
        rows = stack.b[0] if projection.kind == "embedding" else stack.a[0]
        base = self._base.rows(projection.name, torch.tensor(token_ids, device=rows.device))
        held = rows[taken.start : taken.start + len(token_ids)]
        held.copy_(held.float() - base)

    def _write_tables(self, place: int, values: Mapping[str, tuple[int, float]]) -> None:
        """Ranks and scalings of a place, on the device and on the host; (0, 0.0) for modules not in `values`."""
        column: list[tuple[int, float]] = []
        for projection in self._layout.projections:
            stack = self._stacks[projection.name]
            for index, piece in enumerate(projection.slices):
                rank, scaling = values.get(piece.module, (0, 0.0))
                stack.host_ranks[index][place] = rank
                stack.host_scalings[index][place] = scaling
                column.append((rank, scaling))
        self._ranks[:, place] = torch.tensor([rank for rank, _ in column], dtype=torch.int32)
        self._scalings[:, place] = torch.tensor([scaling for _, scaling in column], dtype=torch.float32)

    def _note_first_rows(self, digest: str) -> None:
        ranges = [self._ranges[group].get(digest) for group in self._groups]
        self._first_rows[self._residents[digest].place] = tuple(-1 if r is None else r.start for r in ranges)

    def _new_place(self) -> int:
        place = self._num_places
        assert place < self.plan.num_places, "each resident takes a range, so places cannot run out"
        self._num_places += 1
        for stack in self._stacks.values():
            for ranks, scalings in zip(stack.host_ranks, stack.host_scalings, strict=True):
                ranks.append(0)
                scalings.append(0.0)
        return place

    def _make_stack(self, projection: Projection, dtype: torch.dtype, device: torch.device | str) -> LoraStack:
        num_rows = self.plan.rows[projection.group]
        first = sum(len(stack.a) for stack in self._stacks.values())
        num_slices = len(projection.slices)
        widths = [piece.out_features for piece in projection.slices]
        behind = self._rows_behind(projection.name, num_rows, num_slices) if self._rows_behind else None
        assert behind is None or behind.dtype == dtype, "rows behind a weight are of its dtype"
        # Not cleared: memory that no adapter has used yet then costs nothing on a CPU.
        return LoraStack(
            a=tuple(
                torch.empty(num_rows, projection.in_features, dtype=dtype, device=device)
                if behind is None
                else behind[s::num_slices]
                for s in range(num_slices)
            ),
            b=tuple(torch.empty(num_rows, width, dtype=dtype, device=device) for width in widths),
            ranks=self._ranks[first : first + num_slices],
            scalings=self._scalings[first : first + num_slices],
            group=self._groups.index(projection.group),
            slice_starts=tuple(sum(widths[:index]) for index in range(num_slices)),
            host_ranks=[[] for _ in widths],
            host_scalings=[[] for _ in widths],
        )

    def _projections(self, group: Group) -> list[Projection]:
        return [projection for projection in self._layout.projections if projection.group == group]

    # ---- integrity

    def check_integrity(self) -> None:
        """Ranges add up per group; residents, places, first rows and both tables agree; bytes are within the plan."""
        for group, ranges in self._ranges.items():
            ranges.check_integrity()
            owners = {digest for digest, resident in self._residents.items() if group in resident.rows}
            assert ranges.owners() == owners, group
        places = [resident.place for resident in self._residents.values()]
        assert sorted(places + self._free_places) == list(range(self._num_places))
        assert set(self._first_rows) == set(places)
        for digest, resident in self._residents.items():
            self._check_resident(digest, resident)
        for group, in_use in self._rows_in_use.items():
            assert in_use == sum(r.rows.get(group, 0) for r in self._residents.values() if r.num_pins), group
        host_ranks = [ranks for stack in self._stacks.values() for ranks in stack.host_ranks]
        host_scalings = [scalings for stack in self._stacks.values() for scalings in stack.host_scalings]
        known = slice(0, self._num_places)
        assert self._ranks[:, known].tolist() == host_ranks
        assert torch.equal(self._scalings[:, known].cpu(), torch.tensor(host_scalings).reshape(len(host_scalings), -1))
        for place in self._free_places:
            assert not any(ranks[place] for ranks in host_ranks)

    def _check_resident(self, digest: str, resident: _Resident) -> None:
        assert resident.num_pins >= 0
        first_rows = self._first_rows[resident.place]
        for index, group in enumerate(self._groups):
            owned = self._ranges[group].get(digest)
            assert (owned.start if owned else -1) == first_rows[index], digest
            assert (owned.length if owned else 0) == resident.rows.get(group, 0), digest


def _fill(rows: torch.Tensor, taken: Range, weights: torch.Tensor | None) -> None:
    """rows[taken.start : taken.end] = weights, then zeros."""
    rank = 0 if weights is None else weights.shape[0]
    if weights is not None:
        rows[taken.start : taken.start + rank].copy_(weights)
    rows[taken.start + rank : taken.end].zero_()
