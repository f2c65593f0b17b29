"""The adapters on the device: one stack of rows per projection, written as `RowAllocation` decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from adapters.layout import NON_LORA_GROUPS, BaseLayout, Group
from adapters.memory.device_upload import (
    BUFFER_BYTES,
    COMPLETED,
    CopyEvent,
    CopyStream,
    NoStream,
    Scatter,
    copy_stream_of,
)
from adapters.memory.non_lora_pool import BaseFacts, NonLoraPool
from adapters.memory.row_allocation import Placement, RowAllocation, RowMove
from adapters.memory.row_ranges import Range
from adapters.memory.row_tensors import RowsBehindOf, RowTensors
from adapters.memory.slab import AdapterSum, HostAdapter
from adapters.row_plan import plan_rows
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


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy under way: its source `adapter`, and the `ranges` that it will write, by group."""

    digest: str
    adapter: HostAdapter | AdapterSum
    ranges: Mapping[Group, Range]
    mark: CopyEvent


class RowPool:
    """Owns every `LoraStack`. One thread, between launches of steps. The result of `first_rows` holds until the next
    `load` or `bring_below`.

    A load copies an adapter's slab to the device on the copy stream, beside the steps, and then into its rows and its
    non-LoRA parameters, after the steps launched before: these may still use the rows of evicted adapters, and none
    uses the newcomer. Steps launched after `publish` may use it. Moves of ranges are ordered with the steps, since the
    next one may use the ranges. Swaps of rows are ordered with the steps too, and exclude rows that a copy under way
    will write, so they wait for none.
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
        rows_behind: RowsBehindOf | None = None,
        cost_per_row: Callable[[str], float] = lambda _: 1.0,
        copies: CopyStream | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        side_bytes: int = 0,
        base: BaseFacts | None = None,
    ) -> None:
        """rows_behind   (name of a projection, number of rows, number of slices) -> memory behind its base weight for
                      the rows of A, [rows * slices, in_features], row j of slice s at j * slices + s; None: separate
                      memory. The bytes count as the pool's either way.
        cost_per_row  see `RowAllocation`
        copies        None: the device's own
        buffer_bytes  staging buffer on the device for loads; see `Scatter`
        side_bytes, base  for non-LoRA parameters; 0: adapters that have some do not fit
        """
        self.plan = plan_rows(
            layout,
            budget_bytes,
            element_bytes=dtype.itemsize,
            alignment=alignment,
            max_rank=max_rank,
            side_bytes=side_bytes,
        )
        self.allocation = RowAllocation(self.plan, cost_per_row)
        self._groups = self.plan.groups
        self._base = base
        self.side: NonLoraPool | None = None
        if side_bytes:
            assert base is not None, "what adapters have beside rows depends on the base"
            self.side = NonLoraPool(layout, self.plan.rows, base, dtype, device)
        self._tensors = RowTensors(layout, self.plan, dtype=dtype, device=device, rows_behind=rows_behind)
        self._copies = copies or copy_stream_of(torch.device(device))
        if isinstance(self._copies, NoStream):
            buffer_bytes = 0
        held = self._tensors
        self._scatter = Scatter(layout, held.stacks, held.ranks, held.scalings, self.plan, buffer_bytes)
        self._under_way: deque[_Copy] = deque()
        self._num_loads = 0
        self._evicted: list[str] = []
        self._freed_groups: set[Group] = set()

    # ---- for the model and the maps

    def stack(self, name: str) -> LoraStack:
        """The rows of a projection; the same object for the life of the pool."""
        return self._tensors.stacks[name]

    def place_of(self, digest: str) -> int | None:
        """The place of an adapter that has rows, None if it has none."""
        return self.allocation.place_of(digest)

    def first_rows(self, place: int) -> tuple[int, ...]:
        """First row per group of the plan, -1 where the adapter has none. Read it when the maps of a step are built,
        after all loads of that step."""
        return self.allocation.first_rows(place)

    def rows_end(self, digests: Collection[str]) -> int:
        """The row behind the last one, in any group, of these residents: a window must be as long to hold them all."""
        return self.allocation.rows_end(digests)

    @property
    def num_changes(self) -> int:
        """Changes of row owners and unpins so far: after a change, an allocation that was refused may succeed."""
        return self.allocation.num_changes

    def rows_needed(self, digests: Collection[str]) -> int:
        """See `RowAllocation.rows_needed`."""
        return self.allocation.rows_needed(digests)

    @torch.no_grad()
    def bring_below(self, end_row: int, digests: Collection[str], *, max_adapters: int) -> bool:
        """Swap the ranges of these residents, of at most `max_adapters`, with free rows or with those of residents
        without a pin, so that they end below row `end_row` in all groups. Returns whether the same call would do
        nothing until `num_changes` changes."""
        self._let_go()
        busy: dict[Group, list[Range]] = {}
        for copy in self._under_way:
            for group, owned in copy.ranges.items():
                busy.setdefault(group, []).append(owned)
        above = [digest for digest in sorted(digests) if self.allocation.rows_end((digest,)) > end_row]
        for digest in above[:max_adapters]:
            swaps = self.allocation.swap_below(digest, end_row, busy)
            if swaps is None:
                return not busy
            for group, swap in swaps:
                self._tensors.swap(group, swap)
        return len(above) <= max_adapters

    # ---- residents

    @torch.no_grad()
    def load(self, digest: str, adapter: HostAdapter | AdapterSum, *, may_evict: bool = True) -> CopyEvent | None:
        """Begin to copy the adapter, or sum, to the device, unless it has rows. Returns the copy's event; None, with
        nothing changed, when the adapters in use leave too few rows, or when, without `may_evict`, compacting idle
        ranges is not enough. Steps may use it after `publish`; until then the caller keeps it pinned.

        Raises RowsExceeded when it would not fit an empty pool, or when the kernels do not support its rank: the store
        may hold it from a server with more rows, or with another device.
        """
        if self.place_of(digest) is not None:
            self.allocation.use(digest)
            return next((copy.mark for copy in self._under_way if copy.digest == digest), COMPLETED)
        self.check_size(adapter.rows)
        placement = self.allocation.allocate(digest, adapter.rows, may_evict=may_evict)
        if placement is None:
            return None
        self._evicted += placement.evicted
        self._let_go()
        self._move(placement.moves)
        self._tensors.note(placement, adapter)
        mark = self._copy(adapter, placement)
        self._under_way.append(_Copy(digest, adapter, placement.ranges, mark))
        self._num_loads += 1
        return mark

    def publish(self, mark: CopyEvent) -> None:
        """Steps launched from now on wait for the copies before the event, and see their rows."""
        if not mark.is_completed():
            self._copies.before_steps(mark)
        self._let_go()

    def take_evicted(self) -> list[str]:
        """Adapters evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def check_size(self, rows: Mapping[str, int]) -> None:
        """See `RowAllocation.check_size`."""
        self.allocation.check_size(rows)

    def has_room(self, rows: Mapping[str, int]) -> bool:
        """See `RowAllocation.has_room`."""
        return self.allocation.has_room(rows)

    def fits_beside(self, rows: Mapping[str, int], digests: Collection[str], *, and_held: bool = True) -> bool:
        """See `RowAllocation.fits_beside`."""
        return self.allocation.fits_beside(rows, digests, and_held=and_held)

    def pin(self, digest: str) -> None:
        """See `RowAllocation.pin`."""
        self.allocation.pin(digest)

    def unpin(self, digest: str) -> None:
        """See `RowAllocation.unpin`."""
        self.allocation.unpin(digest)

    def hold(self, digest: str, is_held: bool) -> None:
        """See `RowAllocation.hold`."""
        self.allocation.hold(digest, is_held)

    def drop(self, digest: str) -> None:
        """Free the adapter's rows; it must not be in use. Unknown digests are ignored."""
        if self.place_of(digest) is not None:
            self.allocation.drop(digest)
            self._freed_groups.update(self._groups)

    def resident(self) -> tuple[str, ...]:
        """Digests that have rows, least recently used first."""
        return self.allocation.resident()

    def usage(self) -> PoolUsage:
        used = self.allocation.rows_used()
        return PoolUsage(
            rows_used=sum(num for group, num in used.items() if group not in NON_LORA_GROUPS),
            rows_total=self.plan.num_rows,
            bytes_used=sum(used[group] * self.plan.row_bytes[group] for group in self._groups),
            bytes_total=self.plan.total_bytes,
            num_resident=self.allocation.num_resident,
            num_loads=self._num_loads,
            num_evictions=self.allocation.num_evictions,
            num_moves=self.allocation.num_moves,
        )

    def forget_addresses(self) -> None:
        """Forget what was derived from where tensors lie, because they lie elsewhere now."""
        self._scatter.forget_plans()
        self._tensors.forget_addresses()

    def trim(self) -> None:
        """On a CPU: release the memory of rows that dropped adapters have left. Rows never used occupy none."""
        for group in self._freed_groups:
            self._tensors.free_rows(group, self.allocation.free_ranges(group))
        self._freed_groups.clear()

    # ---- writing

    def _copy(self, adapter: HostAdapter | AdapterSum, placement: Placement) -> CopyEvent:
        """Copy host -> device, and into the rows, part by part."""
        for part in self._scatter.parts(adapter):
            with self._copies.begin():
                part.fetch()
            self._copies.after_steps()
            with self._copies.begin():
                part.write(placement)
        if isinstance(adapter, AdapterSum):
            with self._copies.begin():
                self._tensors.scale_parts(placement, adapter)
            return self._copies.mark()
        if adapter.tokens:
            with self._copies.begin():
                assert self._base is not None, "trained tokens depend on the base"
                self._tensors.subtract_base(self._base, placement, adapter)
        for group in NON_LORA_GROUPS:
            if group in placement.ranges:
                assert self.side is not None
                with self._copies.begin():
                    self.side.write(group, placement.ranges[group].start, adapter)
        return self._copies.mark()

    def _move(self, moves: list[RowMove]) -> None:
        """Slide ranges down, in the order of the steps."""
        if moves and self._under_way:
            self._copies.before_steps(self._under_way[-1].mark)
        for move in moves:
            self._tensors.move(move)
            if move.group in NON_LORA_GROUPS:
                assert self.side is not None and move.before.length == 1
                self.side.move(move.group, move.before.start, move.to)

    def _let_go(self) -> None:
        """Release the host memory of finished copies."""
        while self._under_way and self._under_way[0].mark.is_completed():
            self._under_way.popleft()

    # ---- integrity

    def check_integrity(self) -> None:
        """The allocation's, and both tables agree for every resident whose copy has ended."""
        self.allocation.check_integrity()
        under_way = {copy.digest for copy in self._under_way if not copy.mark.is_completed()}
        found = (self.place_of(digest) for digest in self.resident() if digest not in under_way)
        self._tensors.check_tables([place for place in found if place is not None])
