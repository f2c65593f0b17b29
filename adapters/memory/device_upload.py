"""Loading an adapter's slab into its rows: copied to the device in a few large parts, and scattered from there.

A CPU needs no copy in between. Elsewhere a part goes to one buffer on the device that the next part reuses, in the
order of one stream, and one call of `scatter_rows` writes it from there: on a GPU one launch, whatever the adapter's
modules. The plan that depends only on modules and ranks is made once and reused for adapters with the same. A sum is
loaded slab by slab of its parts, which lie in host memory as they are for themselves.

Who owns: the buffer lives as long as the pool, and counts beside its budget: at most BUFFER_BYTES, or one tensor of the
largest adapter. A GPU keeps some 12 bytes per row for each of _MAX_KEPT kinds of adapters.

A stream of its own copies adapters beside the steps' stream, and events order the two:

    begin         work issued inside the context goes to the copy stream
    after_steps   copies issued from now on start after all steps launched so far
    mark          records an event behind all copies issued so far
    before_steps  steps launched from now on wait for the event

On a CPU everything happens at once, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from adapters.layout import BaseLayout, Group, ProjectionSpec
from adapters.memory.row_allocation import Placement
from adapters.memory.slab import AdapterSum, HostAdapter, ranks_of
from adapters.row_plan import RowPlan
from kernels.lora.maps import LoraStack
from kernels.row_scatter import ops as row_scatter_ops
from kernels.row_scatter.ops import RowPiece, RowPieces

BUFFER_BYTES = 128 << 20
_MAX_KEPT = 16  # plans; most adapters of a fleet share one


@dataclass(frozen=True, slots=True)
class _Target:
    """The first `length` rows of a range in one tensor: `rank` of them from the slab's bytes [start, end), 0 for a
    slice that is not targeted; the others are zero."""

    group: Group
    rows: torch.Tensor
    length: int
    rank: int
    start: int
    end: int


@dataclass(slots=True)
class _PartPlan:
    """Bytes [start, end) of a slab and where they go.

    slab     which of a sum's slabs that is: its parts' and its tables' in their order; 0 for an adapter's own
    sources  of the pieces, views of the buffer; None where they lie in each adapter's slab
    """

    start: int
    end: int
    slab: int = 0
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
            sources = _sources(self._plan, self._adapter, self._adapter.slab[self._plan.start : self._plan.end])
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
        self._length = plan.length
        self._plans: dict[tuple[Any, ...], list[_PartPlan]] = {}
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

    def parts(self, adapter: HostAdapter | AdapterSum) -> Iterator[LoadPart]:
        """The parts of one load, in order."""
        slabs = (adapter,) if isinstance(adapter, HostAdapter) else (*adapter.parts, adapter.tables)
        plans = self._plans.get(adapter.shape_key)
        if plans is None:
            if len(self._plans) >= _MAX_KEPT:
                self._plans.clear()
            plans = self._plans[adapter.shape_key] = self._plan(adapter)
        return (LoadPart(self, plan, slabs[plan.slab]) for plan in plans)

    def forget_plans(self) -> None:
        """See `RowPool.forget_addresses`."""
        self._plans.clear()

    def _plan(self, adapter: HostAdapter | AdapterSum) -> list[_PartPlan]:
        if isinstance(adapter, HostAdapter):
            return self._cut(adapter, self._targets(adapter), 0, has_tables=True)
        plans = []
        for index, part in enumerate(adapter.parts):
            plans += self._cut(part, self._targets_in_sum(adapter, index), index, has_tables=False)
        return [*plans, *self._cut(adapter.tables, self._behind_sum(adapter), len(adapter.parts), has_tables=True)]

    def _cut(self, adapter: HostAdapter, targets: Iterable[_Target], slab: int, *, has_tables: bool) -> list[_PartPlan]:
        """Cut a slab and its targets into parts that fit the buffer."""
        limit = adapter.tables_end if self.buffer is None else len(self.buffer)
        plans = [_PartPlan(0, 0, slab)]
        for target in targets:
            if target.rank and target.end - plans[-1].start > limit:
                plans.append(_PartPlan(target.start, target.start, slab))
            plans[-1].targets.append(target)
            plans[-1].end = max(plans[-1].end, target.end)
        if has_tables:
            if adapter.tables_end - plans[-1].start > limit:
                plans.append(_PartPlan(adapter.tables_start, adapter.tables_start, slab))
            plans[-1].end, plans[-1].has_tables = adapter.tables_end, True
        for plan in plans:
            plan.pieces = RowPieces(tuple(self._pieces(plan)))
        return plans

    def starts(self, placement: Placement) -> list[int]:
        """First rows of the groups of the layout, 0 where the adapter has none, and then its place in the tables."""
        ranges = placement.ranges
        return [*(ranges[group].start if group in ranges else 0 for group in self._groups), placement.place]

    def _pieces(self, plan: _PartPlan) -> Iterator[RowPiece]:
        for one in plan.targets:
            yield RowPiece(one.rows, one.rank, one.length, self._groups.index(one.group))
        if plan.has_tables:
            for table in self._tables:
                yield RowPiece(table, 1, 1, len(self._groups))

    def _targets(self, adapter: HostAdapter) -> Iterator[_Target]:
        """In the order of the slab; slices of a group that the adapter has rows in, and does not target, between."""
        for projection, rows, rank, start in self._tensors(adapter):
            if projection.group in adapter.rows:
                length = self._length(projection.group, adapter.rows[projection.group])
                yield _Target(projection.group, rows, length, rank, start, start + rank * _row_bytes(rows))

    def _targets_in_sum(self, whole: AdapterSum, index: int) -> Iterator[_Target]:
        """Those of one part: of experts, rows in the range of each."""
        first, widths = whole.firsts[index], ranks_of(self._layout, whole.parts[index])
        for projection, rows, rank, start in self._tensors(whole.parts[index]):
            group = projection.group
            if group not in widths:
                continue
            num_experts = self._layout.num_experts_of(projection)
            num_rows, size = rank // num_experts, rank // num_experts * _row_bytes(rows)
            for expert in range(num_experts):
                own = rows[expert * whole.widths[group] + first.get(group, 0) :]
                at = start + expert * size
                yield _Target(group, own, widths[group], num_rows, at, at + size)

    def _behind_sum(self, whole: AdapterSum) -> Iterator[_Target]:
        """The rows between the last part's and the end of each range, which have no source."""
        for projection, rows, _, _ in self._tensors(whole.tables):
            num_rows = whole.rows.get(projection.group, 0)
            if missing := self._length(projection.group, num_rows) - num_rows:
                yield _Target(projection.group, rows[num_rows:], missing, 0, 0, 0)

    def _tensors(self, adapter: HostAdapter) -> Iterator[tuple[ProjectionSpec, torch.Tensor, int, int]]:
        """(projection, rows, the adapter's rank there, where its rows begin in its slab), A before B of each slice."""
        for projection in self._layout.projections:
            stack = self._stacks[projection.name]
            for index, piece in enumerate(projection.slices):
                held = adapter.slices.get(piece.module)
                rank, starts = (0, (0, 0)) if held is None else (held.rank, (held.a_start, held.b_start))
                for rows, start in zip((stack.a[index], stack.b[index]), starts, strict=True):
                    yield projection, rows, rank, start

    def prepare(self, plan: _PartPlan, adapter: HostAdapter) -> None:
        """Views of the buffer, as the slab's part lies in it, and what `scatter_rows` derives from them."""
        assert self.buffer is not None
        plan.sources = _sources(plan, adapter, self.buffer)
        if plan.pieces.pieces:
            row_scatter_ops.prepare(plan.pieces, plan.sources)


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.dtype.itemsize


def _sources(plan: _PartPlan, adapter: HostAdapter, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sources of a part's pieces, in `memory`, which begins with the part."""
    sources = []
    for one in plan.targets:
        if one.rank:
            piece = memory[one.start - plan.start : one.end - plan.start]
            sources.append(piece.view(one.rows.dtype).view(one.rank, -1))
    if plan.has_tables:
        tables = memory[adapter.tables_start - plan.start : plan.end - plan.start]
        half = len(tables) // 2
        sources += [tables[:half].view(torch.int32)[None], tables[half:].view(torch.float32)[None]]
    return tuple(sources)


class CopyEvent(Protocol):
    """An event on the copy stream."""

    def is_completed(self) -> bool:
        """Whether the copies before it are done. Queries the device without blocking."""


class CopyStream(Protocol):
    """See the module's docstring. One thread, between launches of steps."""

    def begin(self) -> AbstractContextManager[Any]: ...
    def after_steps(self) -> None: ...
    def mark(self) -> CopyEvent: ...
    def before_steps(self, mark: CopyEvent) -> None: ...


class CompletedCopy:
    """The event of copies that are already done."""

    def is_completed(self) -> bool:
        return True


COMPLETED = CompletedCopy()


class NoStream:
    """The copy stream of a CPU, where copies are synchronous."""

    def begin(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_steps(self) -> None:
        """They have happened."""

    def mark(self) -> CopyEvent:
        return COMPLETED

    def before_steps(self, mark: CopyEvent) -> None:
        """It has happened."""


class DeviceCopyEvent:
    """An event of the device."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_completed(self) -> bool:
        return bool(self.event.query())


class DeviceStream:
    """The copy stream of a GPU, or of an NPU, whose torch module has the same calls. Not verified on an NPU."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device)

    def begin(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def after_steps(self) -> None:
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        self._stream.wait_event(event)

    def mark(self) -> CopyEvent:
        event = self._module.Event()
        event.record(self._stream)
        return DeviceCopyEvent(event)

    def before_steps(self, mark: CopyEvent) -> None:
        assert isinstance(mark, DeviceCopyEvent), "a mark of another stream"
        self._module.current_stream(self._device).wait_event(mark.event)


def copy_stream_of(device: torch.device) -> CopyStream:
    """A new copy stream of the device."""
    return NoStream() if device.type == "cpu" else DeviceStream(device)
