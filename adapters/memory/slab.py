"""An adapter in host memory: one slab of bytes in the order of the device, and views of it.

    slab    for each module in the layout's order: a [rank, in_features], then b [rank, out_features], each at a
            multiple of ALIGNMENT_BYTES; then the two table columns, int32 and float32 [slices of the layout]; then what
            is no row, likewise aligned

So a load of rows is one copy of the slab up to there, or a few of consecutive parts, whatever the number of modules.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from adapters.layout import BaseLayout, Group
from adapters.memory.row_ranges import RangeAllocator
from adapters.peft.bound_tensors import BIAS, SCORE, WEIGHT

_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_PAGE_BYTES = 2 << 20


def give_back_pages(tensor: torch.Tensor) -> None:
    """Release the whole pages of a contiguous tensor to the system; its contents are lost. Writing allocates them
    again. A no-op for other tensors, other devices, and systems without the call."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or _MADV_DONTNEED is None:
        return
    _advise(tensor, mmap.PAGESIZE, _MADV_DONTNEED)


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Have the system use huge pages for a contiguous CPU tensor that is written next, where it has them: the first
    touch of each small page costs more than the copy into it. A no-op elsewhere."""
    if _MADV_HUGEPAGE is not None:
        _advise(tensor, _HUGE_PAGE_BYTES, _MADV_HUGEPAGE)


def _advise(tensor: torch.Tensor, page_bytes: int, advice: int) -> None:
    start = -(-tensor.data_ptr() // page_bytes) * page_bytes
    end = (tensor.data_ptr() + tensor.nbytes) // page_bytes * page_bytes
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and end > start:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True, eq=False)
class HostSlice:
    """LoRA weights of one slice: a [rank, in_features], b [rank, out_features] (lora_B transposed), contiguous views of
    the slab; a_start, b_start in bytes of it."""

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scaling: float
    a_start: int
    b_start: int


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """The non-LoRA parameters of an adapter, which few adapters have.

    shapes         shape and dtype by module path and part (see `adapters.peft.binding.BoundExtra`): float32 vectors,
                   and the embedding and the head in the rows' dtype
    tokens         ids of trained tokens by module path, one per rank of that slice. The file's values are loaded in
                   place of the deltas; the base's values are subtracted on the device
    non_lora_rows  1 for each non-LoRA group in which the tensors occupy a line, or a table
    """

    shapes: dict[tuple[str, str], tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    non_lora_rows: dict[Group, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreHead:
    """weight float32 [labels, width], bias float32 [labels] or None."""

    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None

    def logits(self, hidden: bytes) -> bytes | None:
        """float32 [labels] of a hidden state, float32 [width], both little-endian; None if they are not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self.weight @ np.frombuffer(hidden, "<f4")
            if self.bias is not None:
                logits = logits + self.bias
        return logits.astype("<f4").tobytes() if np.isfinite(logits).all() else None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HostAdapter:
    """One adapter in host memory. The slab's memory is released with the last reference to this object: hold this, not
    its tensors.

    slices     by module path, in the order of the slab
    rows       the largest rank per projection group, and 1 per non-LoRA group
    slab       uint8 [num_bytes]
    ranks, scalings  int32 and float32 [slices of the layout], views of the slab's bytes [tables_start, tables_end)
    shape_key  equal for adapters with the same slab layout up to the tables' end
    extras     views of the slab, by module path and part
    tokens     see `Extras`
    """

    digest: str
    slices: dict[str, HostSlice]
    rows: dict[str, int]
    slab: torch.Tensor
    ranks: torch.Tensor
    scalings: torch.Tensor
    tables_start: int
    tables_end: int
    shape_key: tuple[tuple[str, int], ...]
    extras: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.slab.nbytes

    @property
    def score_head(self) -> ScoreHead | None:
        """A copy of its score head, which outlives the slab; None without one."""
        weight, bias = (self.extras.get((SCORE, part)) for part in (WEIGHT, BIAS))
        if weight is None:
            return None
        return ScoreHead(weight.numpy().copy(), None if bias is None else bias.numpy().copy())


@dataclass(frozen=True, slots=True)
class SumSlice:
    """A slice of a sum. ratios: (first row, rank, what B is multiplied by) of each part but those of the slice's own
    scaling; of experts the rows of one."""

    rank: int
    scaling: float
    ratios: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSum:
    """A sum of adapters (see `adapters.sums`) in host memory, which has its parts there and no weights of its own.

    On the device each part's rows of a group stand behind those of the parts before it, as many as its largest rank in
    the group, zeros past each rank; of experts, in the rows of each expert.

    firsts  by group, the first row of each part; widths: rows of all parts together
    rows    as of `HostAdapter`
    tables  an adapter without modules, which has the ranks and scalings of `slices`
    """

    digest: str
    parts: tuple[HostAdapter, ...]
    firsts: tuple[dict[str, int], ...]
    widths: dict[str, int]
    slices: dict[str, SumSlice]
    rows: dict[str, int]
    tables: HostAdapter

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.parts)

    @property
    def score_head(self) -> ScoreHead | None:
        """None: a sum has no score head."""
        return None

    @property
    def shape_key(self) -> tuple[Any, ...]:
        """Equal for sums whose parts' slabs have the same layouts."""
        return tuple(one.shape_key for one in self.parts)


class SlabMemory(Protocol):
    """Allocator of slabs."""

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """uint8 [num_bytes], uninitialised; None if no memory is left."""

    def free(self, slab: torch.Tensor) -> None:
        """Free a slab without users. Any thread."""


class PageableMemory:
    """Heap memory, for engines on a CPU."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        slab = torch.empty(num_bytes, dtype=torch.uint8)
        use_huge_pages(slab)
        return slab

    def free(self, slab: torch.Tensor) -> None:
        """The slab is freed with its last reference."""


class Arena:
    """One block of memory, pinned once at the start: to pin memory takes milliseconds, and may wait for the device.

    allocate is called by one thread at a time; free by any, also while the collector runs.
    """

    def __init__(self, num_bytes: int, *, is_pinned: bool = True) -> None:
        num_pages = num_bytes // ALIGNMENT_BYTES
        self._memory = torch.empty(num_pages * ALIGNMENT_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        self._pages = RangeAllocator(num_pages)
        self._returned: deque[int] = deque()  # addresses

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        while self._returned:
            self._pages.release(str(self._returned.popleft()))
        owner = f"taking-{num_bytes}"
        taken = self._pages.allocate(owner, max(-(-num_bytes // ALIGNMENT_BYTES), 1))
        if taken is None:
            return None
        start = taken.start * ALIGNMENT_BYTES
        slab = self._memory[start : start + num_bytes]
        self._pages.rename(owner, str(slab.data_ptr()))
        return slab

    def free(self, slab: torch.Tensor) -> None:
        self._returned.append(slab.data_ptr())

    def check_integrity(self) -> None:
        self._pages.check_integrity()


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """One module that an adapter targets; of experts `rank` counts the rows of all."""

    module: str
    rank: int
    in_features: int
    out_features: int
    scaling: float


def slab_bytes(
    layout: BaseLayout, modules: Iterable[ModuleShape], dtype: torch.dtype, extras: Extras | None = None
) -> int:
    """Bytes of an adapter's slab."""
    return _extra_offsets(_offsets(layout, modules, dtype)[-1] + 8 * _num_slices(layout), extras or Extras())[-1]


def make_adapter(
    layout: BaseLayout,
    digest: str,
    modules: Iterable[ModuleShape],
    dtype: torch.dtype,
    slab: torch.Tensor,
    memory: SlabMemory,
    extras: Extras | None = None,
) -> HostAdapter:
    """An adapter with its tables written, its weights and extras not yet. `slab` is uint8 [slab_bytes] of `memory`."""
    in_order = _in_order(layout, modules)
    offsets = _offsets(layout, in_order, dtype)
    slices: dict[str, HostSlice] = {}
    extras = extras or Extras()
    rows: dict[str, int] = {}
    group_of = {piece.module: p.group for p in layout.projections for piece in p.slices}
    for at, one in enumerate(in_order):
        a_start, b_start = offsets[2 * at : 2 * at + 2]
        slices[one.module] = HostSlice(
            a=_view(slab, a_start, one.rank, one.in_features, dtype),
            b=_view(slab, b_start, one.rank, one.out_features, dtype),
            rank=one.rank,
            scaling=one.scaling,
            a_start=a_start,
            b_start=b_start,
        )
        group = group_of[one.module]
        rows[group] = max(rows.get(group, 0), one.rank)
    tables_end = offsets[-1] + 8 * _num_slices(layout)
    tables = slab[offsets[-1] : tables_end]
    ranks, scalings = tables[: len(tables) // 2].view(torch.int32), tables[len(tables) // 2 :].view(torch.float32)
    _fill_tables(layout, ranks, scalings, slices)
    extra_offsets = _extra_offsets(tables_end, extras)
    own = {
        key: slab[start : start + shape.numel() * kind.itemsize].view(kind).view(shape)
        for (key, (shape, kind)), start in zip(extras.shapes.items(), extra_offsets, strict=False)
    }
    adapter = HostAdapter(
        digest,
        slices,
        rows | extras.non_lora_rows,
        slab,
        ranks,
        scalings,
        offsets[-1],
        tables_end,
        tuple((module, one.rank) for module, one in slices.items()),
        own,
        extras.tokens,
    )
    weakref.finalize(adapter, memory.free, slab).atexit = False
    return adapter


def make_sum(layout: BaseLayout, digest: str, parts: Sequence[tuple[HostAdapter, float]]) -> AdapterSum:
    """The sum of these adapters, each times its weight."""
    assert not any(one.extras or one.tokens for one, _ in parts), "sums are of LoRA weights alone"
    firsts: list[dict[str, int]] = []
    widths: dict[str, int] = {}
    for one, _ in parts:
        firsts.append(dict(widths))
        for group, width in ranks_of(layout, one).items():
            widths[group] = widths.get(group, 0) + width
    slices: dict[str, SumSlice] = {}
    rows: dict[str, int] = {}
    shares = [(first, one, weight) for first, (one, weight) in zip(firsts, parts, strict=True)]
    for projection in layout.projections:
        group, num_experts = projection.group, layout.num_experts_of(projection)
        for module in (piece.module for piece in projection.slices):
            held = [(first.get(group, 0), one.slices[module], w) for first, one, w in shares if module in one.slices]
            if held:
                slices[module] = _sum_slice(held, widths[group], num_experts)
                rows[group] = max(rows.get(group, 0), slices[module].rank)
    memory = PageableMemory()
    tables = make_adapter(
        layout, digest, (), torch.float32, memory.allocate(slab_bytes(layout, (), torch.float32)), memory
    )
    _fill_tables(layout, tables.ranks, tables.scalings, slices)
    return AdapterSum(digest, tuple(one for one, _ in parts), tuple(firsts), widths, slices, rows, tables)


def _sum_slice(held: Sequence[tuple[int, HostSlice, float]], width: int, num_experts: int) -> SumSlice:
    """The slice of (first row, slice, weight) of each part that has it."""
    factors = [weight * one.scaling for _, one, weight in held]
    # The largest, so that B is multiplied by 1 at most, and one part is exact in any dtype.
    scaling = max(factors, key=abs)
    ratios = tuple(
        (first, one.rank // num_experts, factor / scaling if scaling else 0.0)
        for (first, one, _), factor in zip(held, factors, strict=True)
    )
    return SumSlice(width * num_experts, scaling, tuple(one for one in ratios if one[2] != 1.0))


def ranks_of(layout: BaseLayout, adapter: HostAdapter) -> dict[str, int]:
    """An adapter's largest rank by projection group; of experts, that of one."""
    ranks: dict[str, int] = {}
    for projection in layout.projections:
        for held in (adapter.slices.get(piece.module) for piece in projection.slices):
            if held is not None:
                rank = held.rank // layout.num_experts_of(projection)
                ranks[projection.group] = max(ranks.get(projection.group, 0), rank)
    return ranks


def pack(
    layout: BaseLayout, digest: str, weights: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]], dtype: torch.dtype
) -> HostAdapter:
    """An adapter from weights in memory: a [rank, in_features], b [rank, out_features] and the scaling, by module
    path."""
    shapes = [
        ModuleShape(name, a.shape[0], a.shape[1], b.shape[1], scaling) for name, (a, b, scaling) in weights.items()
    ]
    memory = PageableMemory()
    adapter = make_adapter(layout, digest, shapes, dtype, memory.allocate(slab_bytes(layout, shapes, dtype)), memory)
    for name, held in adapter.slices.items():
        held.a.copy_(weights[name][0])
        held.b.copy_(weights[name][1])
    return adapter


def _in_order(layout: BaseLayout, modules: Iterable[ModuleShape]) -> list[ModuleShape]:
    by_name = {one.module: one for one in modules}
    names = (piece.module for projection in layout.projections for piece in projection.slices)
    return [by_name[name] for name in names if name in by_name]


def _offsets(layout: BaseLayout, modules: Iterable[ModuleShape], dtype: torch.dtype) -> list[int]:
    """Offsets of a and b of each module, in bytes, and last of the tables."""
    offsets, end = [], 0
    for one in _in_order(layout, modules):
        for width in (one.in_features, one.out_features):
            offsets.append(end)
            end = _aligned(end + one.rank * width * dtype.itemsize)
    return [*offsets, end]


def _extra_offsets(tables_end: int, extras: Extras) -> list[int]:
    """Offsets of the extras, in bytes, and last the end of the slab."""
    offsets, end = [], tables_end
    for shape, dtype in extras.shapes.values():
        offsets.append(_aligned(end))
        end = offsets[-1] + shape.numel() * dtype.itemsize
    return [*offsets, end]


def _fill_tables(
    layout: BaseLayout, ranks: torch.Tensor, scalings: torch.Tensor, slices: Mapping[str, HostSlice | SumSlice]
) -> None:
    found = [slices.get(piece.module) for projection in layout.projections for piece in projection.slices]
    ranks.copy_(torch.tensor([0 if one is None else one.rank for one in found], dtype=torch.int32))
    scalings.copy_(torch.tensor([0.0 if one is None else one.scaling for one in found]))


def _num_slices(layout: BaseLayout) -> int:
    return sum(len(projection.slices) for projection in layout.projections)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _view(slab: torch.Tensor, start: int, rank: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return slab[start : start + rank * width * dtype.itemsize].view(dtype).view(rank, width)
