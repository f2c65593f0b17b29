"""The adapters on the device: one stack of rows per projection, written as `RowAllocation` decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from adapters.copy_stream import REACHED, CopyStream, Mark, NoStream, copy_stream_of
from adapters.layout import SIDE_GROUPS, BaseLayout, Group, Projection
from adapters.pages import give_back_pages
from adapters.row_allocation import Placement, RowAllocation, RowMove
from adapters.row_plan import plan_rows
from adapters.scatter import BUFFER_BYTES, Scatter
from adapters.side_pool import BaseFacts, SidePool
from adapters.slab import HostAdapter
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
    """On its way; `adapter` is what it reads from."""

    digest: str
    adapter: HostAdapter
    mark: Mark


class RowPool:
    """Owns every `LoraStack`. One thread, between launches of steps. What `first_rows` says holds until the next
    `load`.

    A load copies an adapter's slab to the device on a stream of its own, beside the steps, and then into its rows:
    after the steps that were launched before, which may still use the rows of who made room, and of which none uses the
    newcomer. It is there for the steps that are launched after `publish`. Only moves of ranges go in the order of the
    steps: the ranges may be in use by the next one.
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
        cost_per_row: Callable[[str], float] = lambda _: 1.0,
        copies: CopyStream | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        side_bytes: int = 0,
        base: BaseFacts | None = None,
    ) -> None:
        """rows_behind   (name of a projection, number of rows, number of slices) -> memory behind its base weight for
                      the rows of A, [rows * slices, in_features], row j of slice s at j * slices + s; None: they stand
                      by themselves. The bytes count as the pool's either way.
        cost_per_row  see `RowAllocation`
        copies        None: the device's own
        buffer_bytes  of the device, through which adapters come there; see `Scatter`
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
        self.allocation = RowAllocation(self.plan, cost_per_row)
        self._layout = layout
        self._groups = self.plan.groups
        self._base = base
        self.side: SidePool | None = None
        if side_bytes:
            assert base is not None, "what adapters have beside rows depends on the base"
            self.side = SidePool(layout, self.plan.rows, base, dtype, device)
        num_slices = sum(len(projection.slices) for projection in layout.projections)
        # One column per place, one row per slice: a load writes one column of each.
        self._ranks = torch.zeros(num_slices, self.plan.num_places, dtype=torch.int32, device=device)
        self._scalings = torch.zeros(num_slices, self.plan.num_places, dtype=torch.float32, device=device)
        self._stacks: dict[str, LoraStack] = {}
        for projection in layout.projections:
            self._stacks[projection.name] = self._make_stack(projection, dtype, device)
        self._copies = copies or copy_stream_of(torch.device(device))
        if isinstance(self._copies, NoStream):
            buffer_bytes = 0
        self._scatter = Scatter(layout, self._stacks, self._ranks, self._scalings, self.plan, buffer_bytes)
        self._under_way: deque[_Copy] = deque()
        self._num_loads = 0
        self._evicted: list[str] = []
        self._freed_groups: set[Group] = set()

    # ---- for the model and the maps

    def stack(self, name: str) -> LoraStack:
        """The rows of a projection; the same object for the life of the pool."""
        return self._stacks[name]

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

    # ---- residents

    @torch.no_grad()
    def load(self, digest: str, adapter: HostAdapter, *, may_evict: bool = True) -> Mark | None:
        """Begin to copy the adapter to the device, unless it has rows. Returns when it is there; None when the adapters
        in use leave too few rows, or, without `may_evict`, when no more than sliding idle ranges together is not
        enough: then nothing has changed. Steps may use it after `publish`; until then the caller keeps it pinned.

        Raises RowsExceeded when it would not fit an empty pool, or when the kernels do not take its rank: the store may
        hold it from a server with more rows, or with another device."""
        if self.place_of(digest) is not None:
            self.allocation.use(digest)
            return next((copy.mark for copy in self._under_way if copy.digest == digest), REACHED)
        self.check_size(adapter.rows)
        placement = self.allocation.take(digest, adapter.rows, may_evict=may_evict)
        if placement is None:
            return None
        self._evicted += placement.evicted
        self._let_go()
        self._move(placement.moves)
        self._note_tables(placement, adapter)
        mark = self._copy(adapter, placement)
        self._under_way.append(_Copy(digest, adapter, mark))
        self._num_loads += 1
        return mark

    def publish(self, mark: Mark) -> None:
        """Steps that are launched from now on find what was copied until the mark."""
        if not mark.is_reached():
            self._copies.before_steps(mark)
        self._let_go()

    def take_evicted(self) -> list[str]:
        """Adapters that have made room since the last call."""
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
            rows_used=sum(num for group, num in used.items() if group not in SIDE_GROUPS),
            rows_total=self.plan.num_rows,
            bytes_used=sum(used[group] * self.plan.row_bytes[group] for group in self._groups),
            bytes_total=self.plan.total_bytes,
            num_resident=self.allocation.num_resident,
            num_loads=self._num_loads,
            num_evictions=self.allocation.num_evictions,
            num_moves=self.allocation.num_moves,
        )

    def trim(self) -> None:
        """On a CPU: let the system have the memory of rows that dropped adapters have left. Rows that nobody has used
        yet take none, and these then neither."""
        for group in self._freed_groups:
            for projection in self._projections(group):
                stack = self._stacks[projection.name]
                for rows in (*stack.a, *stack.b):
                    for gap in self.allocation.free_ranges(group):
                        give_back_pages(rows[gap.start : gap.end])
        self._freed_groups.clear()

    # ---- writing

    def _copy(self, adapter: HostAdapter, placement: Placement) -> Mark:
        """Host -> device, and into the rows, part by part."""
        for part in self._scatter.parts(adapter):
            with self._copies.begin():
                part.fetch()
            self._copies.after_steps()
            with self._copies.begin():
                part.write(placement)
        if adapter.tokens:
            with self._copies.begin():
                self._subtract_base(placement, adapter)
        for group in SIDE_GROUPS:
            if group in placement.ranges:  # few adapters have any: in the order of the steps
                assert self.side is not None
                self.side.write(group, placement.ranges[group].start, adapter)
        return self._copies.mark()

    def _subtract_base(self, placement: Placement, adapter: HostAdapter) -> None:
        """Trained tokens are held as what they are; rows are what they change the base by."""
        assert self._base is not None, "trained tokens depend on the base"
        for projection in self._projections("embeddings"):
            token_ids = adapter.tokens.get(projection.slices[0].module)
            if token_ids is not None:
                stack = self._stacks[projection.name]
                rows = stack.b[0] if projection.kind == "embedding" else stack.a[0]
                base = self._base.rows(projection.name, torch.tensor(token_ids, device=rows.device))
                held = rows.narrow(0, placement.ranges["embeddings"].start, len(token_ids))
                held.copy_(held.float() - base)

    def _move(self, moves: list[RowMove]) -> None:
        """Slide ranges down in every tensor of their groups, in the order of the steps."""
        if moves and self._under_way:
            self._copies.before_steps(self._under_way[-1].mark)
        for move in moves:
            for projection in self._projections(move.group):
                stack = self._stacks[projection.name]
                for rows in (*stack.a, *stack.b):
                    # Source and target may overlap, which copy_ does not allow.
                    rows[move.to : move.to + move.before.length] = rows[move.before.start : move.before.end].clone()
            if move.group in SIDE_GROUPS:
                assert self.side is not None and move.before.length == 1
                self.side.move(move.group, move.before.start, move.to)

    def _note_tables(self, placement: Placement, adapter: HostAdapter) -> None:
        """Ranks and scalings of the place, on the host; the device's are part of the slab."""
        for projection in self._layout.projections:
            stack = self._stacks[projection.name]
            for index, piece in enumerate(projection.slices):
                held = adapter.slices.get(piece.module)
                ranks, scalings = stack.host_ranks[index], stack.host_scalings[index]
                if placement.place == len(ranks):
                    ranks.append(0)
                    scalings.append(0.0)
                ranks[placement.place] = 0 if held is None else held.rank
                scalings[placement.place] = 0.0 if held is None else held.scaling

    def _let_go(self) -> None:
        """Of the host memory of copies that have ended."""
        while self._under_way and self._under_way[0].mark.is_reached():
            self._under_way.popleft()

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
        """The allocation's, and both tables agree for every resident whose copy has ended."""
        self.allocation.check_integrity()
        under_way = {copy.digest for copy in self._under_way if not copy.mark.is_reached()}
        found = (self.place_of(digest) for digest in self.resident() if digest not in under_way)
        places = [place for place in found if place is not None]
        host_ranks = [ranks for stack in self._stacks.values() for ranks in stack.host_ranks]
        host_scalings = [scalings for stack in self._stacks.values() for scalings in stack.host_scalings]
        assert self._ranks[:, places].tolist() == [[ranks[place] for place in places] for ranks in host_ranks]
        wanted = [[scalings[place] for place in places] for scalings in host_scalings]
        assert torch.equal(self._scalings[:, places].cpu(), torch.tensor(wanted).reshape(len(wanted), -1))
