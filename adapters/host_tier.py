"""Adapters in host memory, read from the store, in the dtype and orientation of the row pool."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from adapters.binding import TOKENS, WEIGHT
from adapters.errors import Malformed, NotFound, Unsupported
from adapters.format import Tensor, read_header
from adapters.layout import TABLE_GROUPS, BaseLayout, Group, Projection, Slice
from adapters.paths import EMBEDDING_SIDES, LINEAR_SIDES, MANIFEST_FILE, TENSOR_FILE, adapter_dir, stored_name
from adapters.records import UNREADABLE, Manifest

_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<i2")}


@dataclass(frozen=True, slots=True, eq=False)
class HostSlice:
    """LoRA weights of one slice: a [rank, in_features], b [rank, out_features] (lora_B transposed), contiguous."""

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """slices by module path; rows: the largest rank per projection group; num_bytes of host memory.

    extras  what it has beside rows, by module path and part (see `adapters.binding.BoundExtra`): float32 vectors, and
            the embedding and the head in the rows' dtype
    tokens  of the slices that are trained tokens, by module path: the ids, one for each rank. Their values stand where
            what they change the base by belongs; the base's are subtracted on the device
    """

    digest: str
    slices: dict[str, HostSlice]
    rows: dict[str, int]
    num_bytes: int
    extras: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """All that it holds."""
        return [*(tensor for s in self.slices.values() for tensor in (s.a, s.b)), *self.extras.values()]


class HostTier:
    """Least-recently-used cache of `HostAdapter`s within `budget_bytes`; 0 keeps nothing, every get reads the disk.

    Thread-safe. The budget counts what the tier keeps; an adapter handed out lives on while its user holds it.
    """

    def __init__(
        self, store_root: Path, layout: BaseLayout, budget_bytes: int, *, dtype: torch.dtype = torch.float32
    ) -> None:
        self._root = store_root
        self._layout = layout
        self._dtype = dtype
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, HostAdapter] = OrderedDict()
        self.budget_bytes = budget_bytes

    def kept(self, digest: str) -> HostAdapter | None:
        """The adapter, if it is in memory; costs no time."""
        with self._lock:
            kept = self._kept.get(digest)
            if kept is not None:
                self._kept.move_to_end(digest)
            return kept

    def get(self, digest: str) -> HostAdapter:
        """The adapter, from memory or disk. Raises NotFound when the store has no such digest, Malformed when its
        files are damaged, Unsupported when its weights overflow the engine's dtype."""
        kept = self.kept(digest)
        if kept is not None:
            return kept
        adapter = read_adapter(self._root, self._layout, digest, self._dtype)
        with self._lock:
            self._keep(adapter)
        return adapter

    def drop(self, digest: str) -> None:
        """Forget the adapter; unknown digests are ignored."""
        with self._lock:
            self._kept.pop(digest, None)

    def resident(self) -> tuple[str, ...]:
        """Digests kept, least recently used first."""
        with self._lock:
            return tuple(self._kept)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used()

    def check_integrity(self) -> None:
        """Kept bytes are within the budget and are what the tensors really take."""
        with self._lock:
            assert self._used() <= self.budget_bytes
            for digest, adapter in self._kept.items():
                assert adapter.digest == digest
                storages = [tensor.untyped_storage() for tensor in adapter.tensors()]
                assert sum(storage.nbytes() for storage in storages) == adapter.num_bytes, digest

    def _used(self) -> int:
        return sum(adapter.num_bytes for adapter in self._kept.values())

    def _keep(self, adapter: HostAdapter) -> None:
        if adapter.num_bytes > self.budget_bytes:
            return
        self._kept[adapter.digest] = adapter
        self._kept.move_to_end(adapter.digest)
        while self._used() > self.budget_bytes:
            self._kept.popitem(last=False)


def read_adapter(store_root: Path, layout: BaseLayout, digest: str, dtype: torch.dtype) -> HostAdapter:
    """Read a published adapter; errors as in `HostTier.get`."""
    directory = adapter_dir(store_root, layout, digest)
    manifest = _read_manifest(directory, digest)
    try:
        header = read_header(directory / TENSOR_FILE)
        mapped = np.memmap(directory / TENSOR_FILE, dtype=np.uint8, mode="c")  # private: torch wants it writable
    except FileNotFoundError:
        raise NotFound(f"The store has no adapter {digest}.") from None
    known = {piece.module: (projection, piece) for projection in layout.projections for piece in projection.slices}
    slices: dict[str, HostSlice] = {}
    extras: dict[tuple[str, str], torch.Tensor] = {}
    rows: dict[str, int] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    for report in manifest.modules:
        if report.token_ids:
            values = _own(_tensor(mapped, header, stored_name(report.module, TOKENS)), dtype)
            tokens[report.module] = report.token_ids
            slices[report.module] = _trained(values, report.token_ids, known[report.module][0])
            rows["embeddings"] = max(rows.get("embeddings", 0), len(report.token_ids))
            continue
        for part in report.parts:
            group = _group_of(report.module, part, known)
            tensor = _tensor(mapped, header, stored_name(report.module, part))
            extras[report.module, part] = _own(tensor, dtype if group in TABLE_GROUPS else torch.float32)
            rows[group] = 1
        if not report.rank:
            continue
        projection, piece = known[report.module]
        sides = EMBEDDING_SIDES if projection.kind == "embedding" else LINEAR_SIDES
        a, b = (_tensor(mapped, header, stored_name(report.module, side)) for side in sides)
        if a.shape != (report.rank, projection.in_features) or b.shape != (piece.out_features, report.rank):
            raise Malformed(f"Adapter {digest} is damaged on disk; delete it and upload it again.")
        rows[projection.group] = max(rows.get(projection.group, 0), report.rank)
        slices[report.module] = HostSlice(_own(a, dtype), _own(b.t(), dtype), report.rank, report.scaling)
    if rows != manifest.rows:
        raise Malformed(f"Adapter {digest} is damaged on disk; delete it and upload it again.")
    adapter = HostAdapter(digest, slices, rows, 0, extras, tokens)
    return replace(adapter, num_bytes=sum(tensor.nbytes for tensor in adapter.tensors()))


def _trained(values: torch.Tensor, token_ids: tuple[int, ...], projection: Projection) -> HostSlice:
    """Trained tokens as LoRA: one rank for each, which only its token meets. values [num_ids, hidden]"""
    vocab_size = projection.in_features if projection.kind == "embedding" else projection.slices[0].out_features
    meets = torch.zeros(len(token_ids), vocab_size, dtype=values.dtype)
    meets[torch.arange(len(token_ids)), torch.tensor(token_ids)] = 1
    sides = (meets, values) if projection.kind == "embedding" else (values, meets)
    return HostSlice(*sides, len(token_ids), 1.0)


def _group_of(module: str, part: str, known: Mapping[str, tuple[Projection, Slice]]) -> Group:
    """The side group that holds a part of this module."""
    if part != WEIGHT:
        return "vectors"
    if module not in known:
        return "norms"
    return "saved_embedding" if known[module][0].kind == "embedding" else "saved_head"


def _read_manifest(directory: Path, digest: str) -> Manifest:
    """What the store says of a published adapter. Raises NotFound, and Malformed when it is damaged."""
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


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy in `dtype`, of its own memory."""
    owned = torch.empty(tensor.shape, dtype=dtype)
    owned.copy_(tensor)
    if dtype != torch.float32 and not torch.isfinite(owned).all():
        raise Unsupported(f"The adapter has weights beyond the range of {dtype}; serve it in a wider dtype.")
    return owned
