"""How an adapter's slab gets into its rows: copied to the device in a few large parts, and from there into place.

A host that is its own device needs no copy in between. Elsewhere a part goes to one buffer on the device that is used
again for the next, in the order of one stream, and is written from there with as few launches as torch has for many
tensors. Rows of B, and of A where they stand by themselves, are contiguous and go by one of these; rows of A behind
base weights are interleaved by slice, and take a launch each.

Who owns: the buffer lives as long as the pool, and counts beside its budget: at most BUFFER_BYTES, or one tensor of the
largest adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from adapters.layout import BaseLayout, Group
from adapters.row_allocation import Placement
from adapters.row_plan import RowPlan
from adapters.slab import HostAdapter
from kernels.lora.maps import LoraStack

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
    """Bytes [start, end) of a slab and where they go; `sources` on the device, one for each target with a rank."""

    start: int
    end: int
    targets: list[_Target] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    has_tables: bool = False
    ranks: torch.Tensor | None = None
    scalings: torch.Tensor | None = None


class Part:
    """One part of one load: `fetch`, then `write`."""

    def __init__(self, scatter: Scatter, plan: _PartPlan, adapter: HostAdapter) -> None:
        self._scatter = scatter
        self._plan = plan
        self._adapter = adapter

    def fetch(self) -> None:
        """To the buffer on the device, from pinned memory; nothing where the host is the device."""
        buffer = self._scatter.buffer
        if buffer is not None:
            plan = self._plan
            size = plan.end - plan.start
            buffer[:size].copy_(self._adapter.slab[plan.start : plan.end], non_blocking=True)

    def write(self, placement: Placement) -> None:
        """Into the rows and the tables' columns."""
        plan, adapter = self._plan, self._adapter
        sources = plan.sources if self._scatter.buffer is not None else _host_sources(adapter)
        targets, zeros = [], []
        for one in plan.targets:
            taken = placement.ranges[one.group]
            if one.rank:
                targets.append(one.rows.narrow(0, taken.start, one.rank))
            if one.rank < taken.length:
                zeros.append(one.rows.narrow(0, taken.start + one.rank, taken.length - one.rank))
        _copy_all(targets, sources)
        if zeros:
            torch._foreach_zero_(zeros)
        if plan.has_tables:
            of_host = self._scatter.buffer is None
            ranks, scalings = (adapter.ranks, adapter.scalings) if of_host else (plan.ranks, plan.scalings)
            assert ranks is not None and scalings is not None
            self._scatter.ranks[:, placement.place].copy_(ranks)
            self._scatter.scalings[:, placement.place].copy_(scalings)


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
        self.ranks, self.scalings = ranks, scalings
        self._layout = layout
        self._stacks = stacks
        self._plans: dict[tuple[tuple[str, int], ...], list[_PartPlan]] = {}
        self.buffer: torch.Tensor | None = None
        if buffer_bytes:
            self._make_buffer(plan, buffer_bytes)

    def _make_buffer(self, plan: RowPlan, buffer_bytes: int) -> None:
        """Holds one tensor of any adapter that fits the pool."""
        largest = 8 * self.ranks.shape[0]
        for projection in self._layout.projections:
            num_rows = plan.rows[projection.group]
            rank = min(plan.max_rank or num_rows, num_rows)
            for rows in (*self._stacks[projection.name].a, *self._stacks[projection.name].b):
                largest = max(largest, rank * rows.shape[1] * rows.dtype.itemsize)
        size = max(min(buffer_bytes, plan.total_bytes), largest)
        self.buffer = torch.empty(size, dtype=torch.uint8, device=self.ranks.device)

    def parts(self, adapter: HostAdapter) -> Iterator[Part]:
        """Of a load, in order."""
        key = adapter.shape_key
        plans = self._plans.get(key)
        if plans is None:
            if len(self._plans) >= _MAX_KEPT:
                self._plans.clear()
            plans = self._plans[key] = self._plan(adapter)
        return (Part(self, plan, adapter) for plan in plans)

    def _plan(self, adapter: HostAdapter) -> list[_PartPlan]:
        limit = adapter.slab.nbytes if self.buffer is None else len(self.buffer)
        plans = [_PartPlan(0, 0)]
        for target in self._targets(adapter):
            if target.rank and target.end - plans[-1].start > limit:
                plans.append(_PartPlan(target.start, target.start))
            plans[-1].targets.append(target)
            plans[-1].end = max(plans[-1].end, target.end)
        if adapter.slab.nbytes - plans[-1].start > limit:
            plans.append(_PartPlan(adapter.tables_start, adapter.tables_start))
        plans[-1].end, plans[-1].has_tables = adapter.slab.nbytes, True
        if self.buffer is not None:
            for plan in plans:
                self._cut(plan, adapter, self.buffer)
        return plans

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

    def _cut(self, plan: _PartPlan, adapter: HostAdapter, buffer: torch.Tensor) -> None:
        """Views of the buffer, as the slab's part lies in it."""
        for one in plan.targets:
            if one.rank:
                piece = buffer[one.start - plan.start : one.end - plan.start]
                plan.sources.append(piece.view(one.rows.dtype).view(one.rank, -1))
        if plan.has_tables:
            tables = buffer[adapter.tables_start - plan.start : plan.end - plan.start]
            half = len(tables) // 2
            plan.ranks, plan.scalings = tables[:half].view(torch.int32), tables[half:].view(torch.float32)


def _host_sources(adapter: HostAdapter) -> list[torch.Tensor]:
    return [side for one in adapter.slices.values() for side in (one.a, one.b)]


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """targets[i] = sources[i]. Contiguous ones by a few launches for all; others take a launch each, as would all that
    are in one call with them."""
    pairs = list(zip(targets, sources, strict=True))
    for is_dense in (True, False):
        chosen = [pair for pair in pairs if pair[0].is_contiguous() is is_dense]
        if chosen:
            torch._foreach_copy_([target for target, _ in chosen], [source for _, source in chosen])
