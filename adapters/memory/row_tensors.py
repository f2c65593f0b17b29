"""The rows of adapters on the device: one stack for each projection, and the tables of ranks and scalings.

`RowAllocation` decides who owns which rows, `RowPool` fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adapters.layout import BaseLayout, Group, ProjectionSpec
from adapters.memory.non_lora_pool import BaseFacts
from adapters.memory.row_allocation import Placement, RowMove
from adapters.memory.row_ranges import Range, Swap
from adapters.memory.slab import AdapterSum, HostAdapter, give_back_pages
from adapters.row_plan import RowPlan
from kernels.lora.maps import LoraStack
from kernels.row_scatter.ops import RowTensorSet, swap_rows

# (name of a projection, number of rows, number of slices) -> memory behind its base weight for the rows of A, see
# `RowPool`; None: they stand by themselves.
RowsBehindOf = Callable[[str, int, int], torch.Tensor | None]


class RowTensors:
    """Changed in place, between launches of steps.

    ranks, scalings  int32 and float32 [slices of all projections, places]
    """

    def __init__(
        self,
        layout: BaseLayout,
        plan: RowPlan,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        rows_behind: RowsBehindOf | None,
    ) -> None:
        self._layout = layout
        self._plan = plan
        self._rows_behind = rows_behind
        num_slices = sum(len(projection.slices) for projection in layout.projections)
        # One column per place, one row per slice: a load writes one column of each.
        self.ranks = torch.zeros(num_slices, plan.num_places, dtype=torch.int32, device=device)
        self.scalings = torch.zeros(num_slices, plan.num_places, dtype=torch.float32, device=device)
        self.stacks: dict[str, LoraStack] = {}  # by projection; the same objects for life
        self._swapped: dict[Group, RowTensorSet] = {}  # that have been asked for
        # Module and its two lines of the host's tables, in the order of the device's.
        self._host_lines: list[tuple[str, list[int], list[float]]] = []
        for projection in layout.projections:
            stack = self.stacks[projection.name] = self._make_stack(projection, dtype, device)
            modules = [piece.module for piece in projection.slices]
            self._host_lines += zip(modules, stack.host_ranks, stack.host_scalings, strict=True)

    def move(self, move: RowMove) -> None:
        """Slide a range down in every tensor of its group."""
        for projection in self._projections(move.group):
            stack = self.stacks[projection.name]
            for rows in (*stack.a, *stack.b):
                # Source and target may overlap, which copy_ does not allow.
                rows[move.to : move.to + move.before.length] = rows[move.before.start : move.before.end].clone()

    def swap(self, group: Group, swap: Swap) -> None:
        """Swap rows in every tensor of a group."""
        tensors = self._swapped.get(group)
        if tensors is None:
            stacks = [self.stacks[projection.name] for projection in self._projections(group)]
            tensors = self._swapped[group] = RowTensorSet(tuple(t for one in stacks for t in (*one.a, *one.b)))
        swap_rows(tensors, swap.low, swap.high, swap.length)

    def forget_addresses(self) -> None:
        """See `RowPool.forget_addresses`."""
        self._swapped.clear()

    def note(self, placement: Placement, adapter: HostAdapter | AdapterSum) -> None:
        """Write the place's ranks and scalings to the host's tables; the device's are part of the slab."""
        place, slices = placement.place, adapter.slices
        for module, ranks, scalings in self._host_lines:
            if place == len(ranks):
                ranks.append(0)
                scalings.append(0.0)
            held = slices.get(module)
            if held is None:
                ranks[place], scalings[place] = 0, 0.0
            else:
                ranks[place], scalings[place] = held.rank, held.scaling

    def subtract_base(self, base: BaseFacts, placement: Placement, adapter: HostAdapter) -> None:
        """Turn the values of trained tokens in the rows into differences from the base's."""
        for projection in self._projections("embeddings"):
            token_ids = adapter.tokens.get(projection.slices[0].module)
            if token_ids is not None:
                stack = self.stacks[projection.name]
                rows = stack.b[0] if projection.kind == "embedding" else stack.a[0]
                known = base.rows(projection.name, torch.tensor(token_ids, device=rows.device))
                held = rows.narrow(0, placement.ranges["embeddings"].start, len(token_ids))
                held.copy_(held.float() - known)

    def scale_parts(self, placement: Placement, whole: AdapterSum) -> None:
        """Multiply each part's rows of B by what its share of the sum differs from the slice's scaling in."""
        scaled, ratios = [], []
        for projection in self._layout.projections:
            num_experts = self._layout.num_experts_of(projection)
            for index, piece in enumerate(projection.slices):
                held = whole.slices.get(piece.module)
                for first, rank, ratio in () if held is None else held.ratios:
                    assert held is not None
                    rows = self.stacks[projection.name].b[index]
                    own = rows.narrow(0, placement.ranges[projection.group].start, held.rank)
                    scaled.append(own.unflatten(0, (num_experts, -1))[:, first : first + rank])
                    ratios.append(ratio)
        if scaled:
            torch._foreach_mul_(scaled, ratios)

    def free_rows(self, group: Group, free: Sequence[Range]) -> None:
        """On a CPU: release the memory of these rows."""
        for projection in self._projections(group):
            stack = self.stacks[projection.name]
            for rows in (*stack.a, *stack.b):
                for gap in free:
                    give_back_pages(rows[gap.start : gap.end])

    def check_tables(self, places: Sequence[int]) -> None:
        """Assert that the host's and the device's tables agree for these places."""
        host_ranks = [ranks for stack in self.stacks.values() for ranks in stack.host_ranks]
        host_scalings = [scalings for stack in self.stacks.values() for scalings in stack.host_scalings]
        assert self.ranks[:, places].tolist() == [[ranks[place] for place in places] for ranks in host_ranks]
        wanted = [[scalings[place] for place in places] for scalings in host_scalings]
        assert torch.equal(self.scalings[:, places].cpu(), torch.tensor(wanted).reshape(len(wanted), -1))

    def _make_stack(self, projection: ProjectionSpec, dtype: torch.dtype, device: torch.device | str) -> LoraStack:
        num_rows = self._plan.rows[projection.group]
        first = sum(len(stack.a) for stack in self.stacks.values())
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
            ranks=self.ranks[first : first + num_slices],
            scalings=self.scalings[first : first + num_slices],
            group=self._plan.groups.index(projection.group),
            slice_starts=tuple(sum(widths[:index]) for index in range(num_slices)),
            host_ranks=[[] for _ in widths],
            host_scalings=[[] for _ in widths],
        )

    def _projections(self, group: Group) -> list[ProjectionSpec]:
        return [projection for projection in self._layout.projections if projection.group == group]
