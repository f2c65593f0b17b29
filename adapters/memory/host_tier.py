"""Adapters in host memory, read from the store, in the dtype and orientation of the row pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from adapters.errors import Malformed, NotFound, Unsupported
from adapters.files.manifest import UNREADABLE, Manifest
from adapters.files.paths import EMBEDDING_SIDES, LINEAR_SIDES, MANIFEST_FILE, TENSOR_FILE, adapter_dir, stored_name
from adapters.files.safetensors_header import Tensor, read_header
from adapters.layout import TABLE_GROUPS, BaseLayout, Group, ProjectionSpec, Slice
from adapters.memory.eviction import HeapDecayingLfu
from adapters.memory.slab import (
    AdapterSum,
    Arena,
    Extras,
    HostAdapter,
    ModuleShape,
    PageableMemory,
    SlabMemory,
    make_adapter,
    make_sum,
    slab_bytes,
)
from adapters.peft.bound_tensors import SCORE, TOKENS, WEIGHT
from adapters.sums import is_sum, parts_of

_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<i2")}
# To find a file, read its manifest and header, and begin, costs about as much as reading so many bytes more.
READ_OVERHEAD_BYTES = 1 << 20
# torch divides an elementwise operation on so many numbers and more among its threads (`at::internal::GRAIN_SIZE`).
_NUM_DIVIDED = 32_768
# Largest numbers of the dtypes that another dtype's numbers may exceed.
_INFINITY_BITS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


class HostTier:
    """`HostAdapter`s within `budget_bytes`; 0 caches nothing, and every get reads the disk. Adapters of least worth are
    evicted: see `adapters.memory.eviction`, with the bytes of a read as the cost.

    Thread-safe except `get`, which one thread calls at a time. The budget counts the cached adapters; an adapter that
    was returned lives on while its user holds it.

    A sum is in memory when all its parts are, and takes none of its own.

    is_pinned    use pinned memory, all of the budget allocated at once
    num_threads  that divide the copies of one read
    """

    def __init__(
        self,
        store_root: Path,
        layout: BaseLayout,
        budget_bytes: int,
        *,
        dtype: torch.dtype = torch.float32,
        is_pinned: bool = False,
        num_threads: int = 1,
    ) -> None:
        self._root = store_root
        self._layout = layout
        self._dtype = dtype
        self._lock = threading.Lock()
        self._kept: dict[str, HostAdapter] = {}
        self._used_bytes = 0
        self._worths = HeapDecayingLfu(self._cost_per_byte)
        self._evicted: list[str] = []
        self._memory: SlabMemory = Arena(budget_bytes) if is_pinned else PageableMemory()
        self._is_pinned, self._num_threads = is_pinned, num_threads
        self.budget_bytes = budget_bytes

    def kept(self, digest: str) -> HostAdapter | AdapterSum | None:
        """The adapter, or sum, if it is in memory; cheap, and counts as a use."""
        if is_sum(digest):
            return self._sum(digest, self._kept_adapter) if self.is_kept(digest) else None
        return self._kept_adapter(digest)

    def _kept_adapter(self, digest: str) -> HostAdapter | None:
        with self._lock:
            kept = self._kept.get(digest)
            if kept is not None:
                self._worths.use(digest)
            return kept

    def is_kept(self, digest: str) -> bool:
        """Whether it is in memory."""
        return all(part in self._kept for part, _ in parts_of(digest))

    def get(self, digest: str) -> HostAdapter | AdapterSum:
        """The adapter, or sum, from memory or disk. Raises NotFound when the store has no such digest, Malformed when
        its files are damaged, Unsupported when its weights overflow the engine's dtype."""
        if is_sum(digest):
            found = self._sum(digest, self._get_adapter)
            assert found is not None
            return found
        return self._get_adapter(digest)

    def _get_adapter(self, digest: str) -> HostAdapter:
        kept = self._kept_adapter(digest)
        if kept is not None:
            return kept
        adapter = self.read(digest)
        with self._lock:
            self._keep(adapter)
        return adapter

    def _sum(self, digest: str, find: Callable[[str], HostAdapter | None]) -> AdapterSum | None:
        """The sum, None where one of its parts is not found."""
        found = [(find(part), weight) for part, weight in parts_of(digest)]
        parts = [(adapter, weight) for adapter, weight in found if adapter is not None]
        return make_sum(self._layout, digest, parts) if len(parts) == len(found) else None

    def read(self, digest: str) -> HostAdapter:
        """Read the adapter again, into memory of the tier; errors as in `get`."""
        return read_adapter(self._root, self._layout, digest, self._dtype, self.allocate, num_threads=self._num_threads)

    def drop(self, digest: str) -> None:
        """Forget the adapter; unknown digests, and sums, are ignored."""
        with self._lock:
            if digest in self._kept:
                self._worths.forget(digest)
                self._remove(digest)

    def resident(self) -> tuple[str, ...]:
        """Digests kept, least recently used first."""
        with self._lock:
            return tuple(sorted(self._kept, key=self._worths.last_use))

    def take_evicted(self) -> list[str]:
        """Adapters evicted since the last call."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
            return evicted

    @property
    def used_bytes(self) -> int:
        """Bytes of the adapters in host memory."""
        return self._used_bytes

    @property
    def num_kept(self) -> int:
        """Number of adapters in memory."""
        return len(self._kept)

    def check_integrity(self) -> None:
        """Kept bytes are within the budget and are what the slabs take."""
        with self._lock:
            assert self._used_bytes <= self.budget_bytes
            assert self._used_bytes == sum(adapter.num_bytes for adapter in self._kept.values())
            for digest, adapter in self._kept.items():
                assert adapter.digest == digest

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, SlabMemory]:
        """Memory for a slab that is about to be read; evicts adapters of least worth if necessary."""
        while (slab := self._memory.allocate(num_bytes)) is None:
            with self._lock:
                if not self._kept or num_bytes > self.budget_bytes:
                    break
                self._evict_one()
        if slab is None:  # the arena is in use, or too small: this one is on its own
            memory = PageableMemory()
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned), memory
        return slab, self._memory

    # ---- inner parts, under the lock

    def _keep(self, adapter: HostAdapter) -> None:
        if adapter.num_bytes > self.budget_bytes:
            return
        while self._used_bytes + adapter.num_bytes > self.budget_bytes:
            self._evict_one()
        self._kept[adapter.digest] = adapter
        self._used_bytes += adapter.num_bytes
        self._worths.add(adapter.digest)

    def _evict_one(self) -> None:
        digest = self._worths.least()
        self._worths.evict(digest)
        self._remove(digest)
        self._evicted.append(digest)

    def _remove(self, digest: str) -> None:
        self._used_bytes -= self._kept.pop(digest).num_bytes

    def _cost_per_byte(self, digest: str) -> float:
        return 1.0 + READ_OVERHEAD_BYTES / max(self._kept[digest].num_bytes, 1)


# Memory for a slab of so many bytes, and what it goes back to.
Take = Callable[[int], tuple[torch.Tensor, SlabMemory]]


def pageable(num_bytes: int) -> tuple[torch.Tensor, SlabMemory]:
    """A slab from the heap."""
    memory = PageableMemory()
    return memory.allocate(num_bytes), memory


def read_adapter(
    store_root: Path,
    layout: BaseLayout,
    digest: str,
    dtype: torch.dtype,
    take: Take = pageable,
    *,
    num_threads: int = 1,
) -> HostAdapter:
    """Read a published adapter; errors as in `HostTier.get`."""
    directory = adapter_dir(store_root, layout, digest)
    manifest = _read_manifest(directory, digest)
    try:
        header = read_header(directory / TENSOR_FILE)
        mapped = np.memmap(directory / TENSOR_FILE, dtype=np.uint8, mode="c")  # private: torch wants it writable
    except FileNotFoundError:
        raise NotFound(f"The store has no adapter {digest}.") from None
    known = {piece.module: (projection, piece) for projection in layout.projections for piece in projection.slices}
    stored: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    shapes: list[ModuleShape] = []
    parts: dict[tuple[str, str], torch.Tensor] = {}
    extras = Extras()
    for report in manifest.modules:
        if report.token_ids:
            values = _tensor(mapped, header, stored_name(report.module, TOKENS))
            extras.tokens[report.module] = report.token_ids
            a, b = stored[report.module] = _trained(values, report.token_ids, known[report.module][0])
            shapes.append(ModuleShape(report.module, len(a), a.shape[1], b.shape[1], 1.0))
            continue
        for part in report.parts:
            group = _group_of(report.module, part, known)
            tensor = parts[report.module, part] = _tensor(mapped, header, stored_name(report.module, part))
            extras.shapes[report.module, part] = tensor.shape, dtype if group in TABLE_GROUPS else torch.float32
            if group is not None:
                extras.non_lora_rows[group] = 1
        if not report.rank:
            continue
        projection, piece = known[report.module]
        sides = EMBEDDING_SIDES if projection.kind == "embedding" else LINEAR_SIDES
        a, b = (_tensor(mapped, header, stored_name(report.module, side)) for side in sides)
        num_rows = report.rank * report.num_experts
        if a.shape != (num_rows, projection.in_features) or b.shape != (piece.out_features, num_rows):
            raise Malformed(f"Adapter {digest} is damaged on disk; delete it and upload it again.")
        stored[report.module] = a, b.t()
        shape = (num_rows, projection.in_features, piece.out_features)
        shapes.append(ModuleShape(report.module, *shape, report.scaling))
    slab, memory = take(slab_bytes(layout, shapes, dtype, extras))
    adapter = make_adapter(layout, digest, shapes, dtype, slab, memory, extras)
    if adapter.rows != manifest.rows:
        raise Malformed(f"Adapter {digest} is damaged on disk; delete it and upload it again.")
    copies = [
        pair for module, held in adapter.slices.items() for pair in zip((held.a, held.b), stored[module], strict=True)
    ]
    _copy_all([*copies, *((own, parts[key]) for key, own in adapter.extras.items())], num_threads)
    return adapter


def _copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], num_threads: int) -> None:
    """Copy to each target from its source; raises as `_copy` does."""
    if num_threads == 1:
        for target, source in copies:
            _copy(target, source)
        return
    with ThreadPoolExecutor(num_threads, "adapter-copies") as pool:
        for _ in pool.map(_copy, *zip(*copies, strict=True)):  # which leaves its futures, and their errors, to nobody
            pass


def _trained(
    values: torch.Tensor, token_ids: tuple[int, ...], projection: ProjectionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trained tokens as A and B of LoRA: one rank for each, which only its token meets. values [num_ids, hidden]"""
    vocab_size = projection.in_features if projection.kind == "embedding" else projection.slices[0].out_features
    meets = torch.zeros(len(token_ids), vocab_size, dtype=values.dtype)
    meets[torch.arange(len(token_ids)), torch.tensor(token_ids)] = 1
    return (meets, values) if projection.kind == "embedding" else (values, meets)


def _group_of(module: str, part: str, known: Mapping[str, tuple[ProjectionSpec, Slice]]) -> Group | None:
    """The non-LoRA group that holds a part of this module; None for what stays in host memory."""
    if module == SCORE:
        return None
    if part != WEIGHT:
        return "vectors"
    if module not in known:
        return "norms"
    return "saved_embedding" if known[module][0].kind == "embedding" else "saved_head"


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in this thread alone: torch's threads cost a hundred times as much on cores that an engine keeps busy.

    Raises Unsupported where target's dtype is too narrow. Stored values are finite: the upload was checked.
    """
    if target.dtype == source.dtype:
        np.copyto(_bits(target), _bits(source))  # columns to rows, in a third of torch's time
        return
    for piece, source_piece in zip(_pieces(target), _pieces(source), strict=True):
        piece.copy_(source_piece)
    infinity = _INFINITY_BITS.get(target.dtype)
    if infinity is None or torch.finfo(target.dtype).max >= torch.finfo(source.dtype).max:
        return
    if target.numel() and (_bits(target) & 0x7FFF).max() >= infinity:
        raise Unsupported(f"The adapter has weights beyond the range of {target.dtype}; serve it in a wider dtype.")


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as integers: numpy has no bfloat16."""
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Along the longest axis, each of fewer numbers than torch divides among threads."""
    if not tensor.numel():
        return (tensor,)
    length, axis = max((length, axis) for axis, length in enumerate(tensor.shape))
    return tensor.split(max(1, (_NUM_DIVIDED - 1) * length // tensor.numel()), axis)


def _read_manifest(directory: Path, digest: str) -> Manifest:
    """The manifest of a published adapter. Raises NotFound, and Malformed when it is damaged."""
    try:
        return msgspec.json.decode((directory / MANIFEST_FILE).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise NotFound(f"The store has no adapter {digest}.") from None
    except UNREADABLE:
        raise Malformed(f"Adapter {digest} is damaged on disk; delete it and upload it again.") from None


def _tensor(mapped: np.memmap, header: dict[str, Tensor], name: str) -> torch.Tensor:
    """A view of the mapped file; the caller copies before the map goes."""
    entry = header.get(name)
    if entry is None:
        raise Malformed(f"Tensor {name!r} is missing on disk; delete the adapter and upload it again.")
    data = np.ndarray(entry.shape, _NUMPY[entry.dtype], buffer=mapped.data, offset=entry.start)
    tensor = torch.from_numpy(data)
    return tensor.view(torch.bfloat16) if entry.dtype == "BF16" else tensor
