"""Loading an adapter's slab into its rows: copied to the device in a few large parts, and scattered from there.

A CPU needs no copy in between. Elsewhere a part goes to one buffer on the device that the next part reuses, in the
order of one stream, and one call of `scatter_rows` writes it from there: on a GPU one launch, whatever the adapter's
modules. The plan that depends only on modules and ranks is made once and reused for adapters with the same.

Who owns: the buffer lives as long as the pool, and counts beside its budget: at most BUFFER_BYTES, or one tensor of the
largest adapter. A GPU keeps some 12 bytes per row for each of _MAX_KEPT kinds of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from adapters.layout import BaseLayout, Group
from adapters.memory.row_allocation import Placement
from adapters.memory.slab import HostAdapter
from adapters.row_plan import RowPlan
from kernels.lora.maps import LoraStack
from kernels.row_scatter import ops as row_scatter_ops
from kernels.row_scatter.pieces import RowPiece, RowPieces

BUFFER_BYTES = 128 << 20
_MAX_KEPT = 16  # plans; most adapters of a fleet share one


@dataclass(frozen=True, slots=True)
class _Target:
    """Rows of one tensor: `rank` of them from the slab's bytes [start, end), 0 for a slice that is not targeted; what
    is past them in the range is zero."""

    group: Group
    rows: torch.Tensor
    rank: int
    start: int
    end: int


@dataclass(slots=True)
class _PartPlan:
    """Bytes [start, end) of a slab and where they go.

    sources  of the pieces, views of the buffer; None where they lie in each adapter's slab
    """

    start: int
    end: int
    targets: list[_Target] = field(default_factory=list)
    has_tables: bool = False
    pieces: RowPieces = field(default_factory=lambda: RowPieces(()))
    sources: tuple[torch.Tensor, ...] | None = None


class LoadPart:
    """One part of one load: `fetch`, then `write`."""

    def __init__(self, scatter: Scatter, plan: _PartPlan, adapter: HostAdapter) -> None:
        self._scatter = scatter
        self._plan = plan
        self._adapter = adapter

    def fetch(self) -> None:
        """Copy the part from pinned memory to the buffer on the device; nothing on a CPU."""
        buffer, plan = self._scatter.buffer, self._plan
        if buffer is None:
            return
        if plan.sources is None:  # here, since what is derived from them may wait: not for the steps
            self._scatter.prepare(plan, self._adapter)
        size = plan.end - plan.start
        buffer[:size].copy_(self._adapter.slab[plan.start : plan.end], non_blocking=True)

    def write(self, placement: Placement) -> None:
        """Write the part into the rows and the tables' columns."""
        sources = self._plan.sources
        if sources is None:
            sources = _host_sources(self._adapter)
        if self._plan.pieces.pieces:
            row_scatter_ops.scatter_rows(self._plan.pieces, sources, self._scatter.starts(placement))


class Scatter:
    """See the module's docstring.

    ranks, scalings  the tables of the pool, [slices, places]
    buffer_bytes     0 where the host is the device
    """

    def __init__(
        self,
        layout: BaseLayout,
        stacks: dict[str, LoraStack],
        ranks: torch.Tensor,
        scalings: torch.Tensor,
        plan: RowPlan,
        buffer_bytes: int,
    ) -> None:
        self._tables = ranks.t(), scalings.t()  # a place's column of each is a row
        self._layout = layout
        self._stacks = stacks
        self._groups = layout.groups
        self._lengths = plan.length
        self._plans: dict[tuple[tuple[str, int], ...], list[_PartPlan]] = {}
        self.buffer: torch.Tensor | None = None
        if buffer_bytes:
            self._make_buffer(plan, buffer_bytes)

    def _make_buffer(self, plan: RowPlan, buffer_bytes: int) -> None:
        """Allocate a buffer that holds one tensor of any adapter that fits the pool."""
        device, largest = self._tables[0].device, 8 * self._tables[0].shape[1]
        for projection in self._layout.projections:
            num_rows = plan.rows[projection.group]
            rank = num_rows if projection.kind == "experts" else min(plan.max_rank or num_rows, num_rows)
            for rows in (*self._stacks[projection.name].a, *self._stacks[projection.name].b):
                largest = max(largest, rank * rows.shape[1] * rows.dtype.itemsize)
        size = max(min(buffer_bytes, plan.total_bytes), largest)
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def parts(self, adapter: HostAdapter) -> Iterator[LoadPart]:
        """The parts of one load, in order."""
        key = adapter.shape_key
        plans = self._plans.get(key)
        if plans is None:
            if len(self._plans) >= _MAX_KEPT:
                self._plans.clear()
            plans = self._plans[key] = self._plan(adapter)
        return (LoadPart(self, plan, adapter) for plan in plans)

    def _plan(self, adapter: HostAdapter) -> list[_PartPlan]:
        limit = adapter.tables_end if self.buffer is None else len(self.buffer)
        plans = [_PartPlan(0, 0)]
        for target in self._targets(adapter):
            if target.rank and target.end - plans[-1].start > limit:
                plans.append(_PartPlan(target.start, target.start))
            plans[-1].targets.append(target)
            plans[-1].end = max(plans[-1].end, target.end)
        if adapter.tables_end - plans[-1].start > limit:
            plans.append(_PartPlan(adapter.tables_start, adapter.tables_start))
        plans[-1].end, plans[-1].has_tables = adapter.tables_end, True
        for plan in plans:
            plan.pieces = RowPieces(tuple(self._pieces(plan, adapter)))
        return plans

    def starts(self, placement: Placement) -> list[int]:
        """First rows of the groups of the layout, 0 where the adapter has none, and then its place in the tables."""
        ranges = placement.ranges
        return [*(ranges[group].start if group in ranges else 0 for group in self._groups), placement.place]

    def _pieces(self, plan: _PartPlan, adapter: HostAdapter) -> Iterator[RowPiece]:
        for one in plan.targets:
            length = self._lengths(one.group, adapter.rows[one.group])
            yield RowPiece(one.rows, one.rank, length, self._groups.index(one.group))
        if plan.has_tables:
            for table in self._tables:
                yield RowPiece(table, 1, 1, len(self._groups))

    def _targets(self, adapter: HostAdapter) -> Iterator[_Target]:
        """In the order of the slab; slices of a group that the adapter has rows in, and does not target, between."""
        for projection in self._layout.projections:
            if projection.group not in adapter.rows:
                continue
            stack = self._stacks[projection.name]
            for index, piece in enumerate(projection.slices):
                held = adapter.slices.get(piece.module)
                sides = (("a_start", stack.a[index]), ("b_start", stack.b[index]))
                for name, rows in sides:
                    rank, start = (0, 0) if held is None else (held.rank, getattr(held, name))
                    end = start + rank * rows.shape[1] * rows.dtype.itemsize
                    yield _Target(projection.group, rows, rank, start, end)

    def prepare(self, plan: _PartPlan, adapter: HostAdapter) -> None:
        """Views of the buffer, as the slab's part lies in it, and what `scatter_rows` derives from them."""
        assert self.buffer is not None
        sources = []
        for one in plan.targets:
            if one.rank:
                piece = self.buffer[one.start - plan.start : one.end - plan.start]
                sources.append(piece.view(one.rows.dtype).view(one.rank, -1))
        if plan.has_tables:
            tables = self.buffer[adapter.tables_start - plan.start : plan.end - plan.start]
            half = len(tables) // 2
            sources += [tables[:half].view(torch.int32)[None], tables[half:].view(torch.float32)[None]]
        plan.sources = tuple(sources)
        if plan.pieces.pieces:
            row_scatter_ops.prepare(plan.pieces, plan.sources)


def _host_sources(adapter: HostAdapter) -> tuple[torch.Tensor, ...]:
    sides = (side for one in adapter.slices.values() for side in (one.a, one.b))
    return (*sides, adapter.ranks[None], adapter.scalings[None])
