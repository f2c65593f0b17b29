"""The inputs of a step: buffers that never move, filled on the host and brought to the device by one copy.

On a device there is one buffer there, which captured steps read, and two pinned ones on the host, used in turn, each
with an event that says when its latest copy has run: the host prepares a step while the device still fetches the one
before, and waits only if it is two steps ahead. The copy runs on the stream of the steps, hence after the step before
it has read the buffer. On a CPU there is one buffer, which the step reads where the host has written it.

Behind the maps, whose places follow from the sizes of the step, travel the arrays of the sampler, of any length, which
no captured step reads. What has no room there has a buffer of its own, which grows and stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from kernels.lora.maps import LoraMaps, Segment
from kernels.lora.side import SideLines
from service.engine import maps
from service.engine.maps import ChunkInput
from service.engine.step_sizes import TOKEN_SIZES, StepSizes
from service.models.batch import AttentionMaps, ConvMaps, StepBatch


class Event(Protocol):
    """What has been asked of the device so far; of torch.cuda and torch.npu."""

    def record(self) -> object: ...

    def synchronize(self) -> object: ...


class Runtime(Protocol):
    """The part of torch.cuda and torch.npu that is needed here."""

    def Event(self) -> Event: ...


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What the inputs of all steps of an engine have in common.

    token_budget, max_sequences, max_blocks  the largest step, and the longest sequence in blocks
    max_logits_rows    the most rows of logits that a step yields
    num_groups         of LoRA rows and of what adapters have beside them; see `RowPlan.groups`
    side_groups        of these, where each stands among them
    """

    token_budget: int
    max_sequences: int
    max_blocks: int
    max_logits_rows: int
    block_size: int
    num_groups: int
    has_conv: bool
    has_length_limits: bool
    device: torch.device
    side_groups: Mapping[str, int] = field(default_factory=dict)


_Shapes = dict[str, tuple[type[Any], tuple[int, ...]]]
_ALIGNMENT_BYTES = 64  # each array begins on its own line
_SAMPLER_BYTES = 4 << 20  # behind the maps
_MAX_KNOWN_SIZES = 512


class StepInputs:
    """See the module's docstring."""

    def __init__(self, limits: InputLimits, runtime: Runtime | None = None) -> None:
        """runtime  of the device; None: torch's, which on a CPU needs none"""
        self._limits = limits
        self._runtime: Any = runtime
        if runtime is None and limits.device.type != "cpu":
            self._runtime = torch.get_device_module(limits.device)
        num_sequences = max(limits.max_sequences, min(limits.token_budget, limits.max_logits_rows))
        side = tuple((group, 1) for group in limits.side_groups)
        largest = StepSizes(
            limits.token_budget, num_sequences, limits.max_logits_rows, limits.max_blocks, False, True, side=side
        )
        num_bytes = _end_of(self._shapes(largest)) + _SAMPLER_BYTES
        num_host_buffers = 1 if self._runtime is None else 2
        self._host = [self._host_buffer(num_bytes) for _ in range(num_host_buffers)]
        self._host_arrays = [buffer.numpy() for buffer in self._host]
        self._apart: list[torch.Tensor | None] = [None] * num_host_buffers
        self._device_apart = torch.empty(0, dtype=torch.uint8)
        self._copied: list[Event | None] = [None] * num_host_buffers
        self._device = self._host[0]
        if self._runtime is not None:
            self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=limits.device)
        self._turn = 0
        self._known: dict[StepSizes, _Places] = {}

    def fill(
        self,
        chunks: Sequence[ChunkInput],
        block_table: np.ndarray,
        block_tuples: Sequence[tuple[int, ...]],
        sizes: StepSizes,
        sampler: Sequence[np.ndarray] = (),
    ) -> tuple[StepBatch, tuple[torch.Tensor, ...]]:
        """The batch of `chunks`, which stand in adapter order already, on the device and padded to `sizes`; and the
        arrays of the sampler there, in their order.

        block_table   int32 [slots, blocks], by slot; block_tuples are the chunks' own blocks

        Both hold until the next call; on a device the batch's tensors are the same for the same sizes.
        """
        places = self._places(sizes)
        host = self._writable()
        arrays = places.host[self._turn]
        starts = maps.fill_tokens(arrays, chunks, block_table, self._limits.block_size)
        if self._limits.has_conv:
            maps.fill_conv(arrays, chunks)
        if self._limits.has_length_limits:
            maps.fill_length_limits(arrays, chunks)
        segments = maps.segments_of(chunks, [len(chunk.token_ids) for chunk in chunks])
        row_segments = segments
        if sizes.has_lora:
            maps.fill_lora(arrays, "tokens", segments)
            side_groups = {group: self._limits.side_groups[group] for group, _ in sizes.side}
            maps.fill_side(arrays, "tokens", segments, side_groups)
        if sizes.num_rows is not None:
            maps.fill_logits_rows(arrays, chunks, starts)
            row_segments = maps.segments_of(chunks, [chunk.num_logits for chunk in chunks])
            if sizes.has_lora:
                maps.fill_lora(arrays, "rows", row_segments)
                maps.fill_side(arrays, "rows", row_segments, side_groups)
        sent = self._send(host, places.end, sampler)
        return self._batch(places.device, chunks, starts, block_tuples, segments, row_segments, sizes), sent

    def _batch(
        self,
        tensors: dict[str, torch.Tensor],
        chunks: Sequence[ChunkInput],
        starts: list[int],
        block_tuples: Sequence[tuple[int, ...]],
        segments: tuple[Segment, ...],
        row_segments: tuple[Segment, ...],
        sizes: StepSizes,
    ) -> StepBatch:
        lora = _lora_maps("tokens", segments, sizes.num_tokens, tensors, sizes.side) if sizes.has_lora else None
        rows_lora = lora
        if sizes.num_rows is not None and sizes.has_lora:
            rows_lora = _lora_maps("rows", row_segments, sizes.num_rows, tensors, sizes.side)
        num_missing = sizes.num_sequences - len(chunks)
        attention = AttentionMaps(
            query_starts=(*starts, *starts[-1:] * num_missing),
            kv_lens=(*(chunk.end for chunk in chunks), *(0,) * num_missing),
            block_tables=(*block_tuples, *((),) * num_missing),
            query_start_loc=tensors["query_start_loc"],
            kv_lens_device=tensors["kv_lens"],
            block_table=tensors["block_table"],
            slot_mapping=tensors["slot_mapping"],
            is_decode=sizes.all_decode,
        )
        conv = None
        if self._limits.has_conv:
            conv = ConvMaps(
                query_starts=attention.query_starts,
                query_start_loc=attention.query_start_loc,
                state_indices=tensors["state_indices"],
                has_initial_state=tensors["has_initial_state"],
                all_decode=sizes.all_decode,
            )
        return StepBatch(
            token_ids=tensors["token_ids"],
            token_slots=tensors["token_slots"],
            positions=tensors["positions"],
            rope_limits=tensors.get("length_limits"),
            lora=lora,
            attention=attention,
            conv=conv,
            logits_rows=tensors.get("logits_rows"),
            logits_lora=rows_lora,
            window_rows=sizes.window_rows,
        )

    def _shapes(self, sizes: StepSizes) -> _Shapes:
        """What travels, in its order."""
        num_tokens, num_sequences, limits = sizes.num_tokens, sizes.num_sequences, self._limits
        shapes: _Shapes = {
            "token_ids": (np.int64, (num_tokens,)),
            "token_slots": (np.int64, (num_tokens,)),
            "positions": (np.int64, (num_tokens,)),
            "slot_mapping": (np.int64, (num_tokens,)),
            "query_start_loc": (np.int32, (num_sequences + 1,)),
            "kv_lens": (np.int32, (num_sequences,)),
            "block_table": (np.int32, (num_sequences, sizes.table_blocks)),
        }
        if limits.has_conv:
            shapes["state_indices"] = (np.int32, (num_sequences,))
            shapes["has_initial_state"] = (np.bool_, (num_sequences,))
        if limits.has_length_limits:
            shapes["length_limits"] = (np.float32, (num_tokens,))
        if sizes.num_rows is not None:
            shapes["logits_rows"] = (np.int64, (sizes.num_rows,))
        if sizes.has_lora:
            lengths = {"tokens": num_tokens} | ({} if sizes.num_rows is None else {"rows": sizes.num_rows})
            for prefix, length in lengths.items():
                shapes |= _lora_shapes(prefix, length, limits)
                shapes |= {f"{prefix}/{group}": (np.int64, (length,)) for group, _ in sizes.side}
        return shapes

    def _places(self, sizes: StepSizes) -> _Places:
        """Where the arrays of a step of these sizes lie."""
        known = self._known.get(sizes)
        if known is None:
            if len(self._known) == _MAX_KNOWN_SIZES:
                self._known.clear()
            shapes = self._shapes(sizes)
            host = [_views(buffer, shapes) for buffer in self._host_arrays]
            known = self._known[sizes] = _Places(host, _tensors(self._device, shapes), _end_of(shapes))
        return known

    def _writable(self) -> torch.Tensor:
        """A host buffer that no copy reads any more."""
        self._turn = (self._turn + 1) % len(self._host)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._host[self._turn]

    def _send(self, host: torch.Tensor, end: int, sampler: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        """Bring the first `end` bytes to the device, and the sampler's arrays; returns these as they are there. Arrays
        of nothing stay where they are."""
        if self._runtime is None:
            return tuple(torch.from_numpy(array) for array in sampler)
        starts, last = _starts(sampler, end)
        source, target = host, self._device
        if last > len(host):
            starts, num_bytes = _starts(sampler, 0)
            source, target = self._apart_of(num_bytes)
            target[:num_bytes].copy_(_written(source, sampler, starts)[:num_bytes], non_blocking=True)
        else:
            _written(host, sampler, starts)
            end = last
        self._device[:end].copy_(host[:end], non_blocking=True)
        event = self._runtime.Event()
        event.record()
        self._copied[self._turn] = event
        return tuple(_tensor_at(target, start, array) for start, array in zip(starts, sampler, strict=True))

    def _apart_of(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer on the host, and the one on the device, for arrays that have no room behind the maps."""
        if num_bytes > len(self._device_apart):
            num_bytes = 1 << (num_bytes - 1).bit_length()
            self._device_apart = torch.zeros(num_bytes, dtype=torch.uint8, device=self._limits.device)
            self._apart = [None] * len(self._apart)
        host = self._apart[self._turn]
        if host is None:
            host = self._apart[self._turn] = self._host_buffer(len(self._device_apart))
        return host, self._device_apart

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._limits.device.type != "cpu")


@dataclass(frozen=True, slots=True)
class _Places:
    """The arrays of a step: views of each host buffer, views of the device's, and where they end, in bytes."""

    host: list[dict[str, np.ndarray]]
    device: dict[str, torch.Tensor]
    end: int


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _num_bytes(dtype: type[Any], shape: tuple[int, ...]) -> int:
    return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))


def _end_of(shapes: _Shapes) -> int:
    """The byte behind the arrays."""
    return sum(_aligned(_num_bytes(dtype, shape)) for dtype, shape in shapes.values())


def _views(buffer: np.ndarray, shapes: _Shapes) -> dict[str, np.ndarray]:
    """Arrays that lie in a buffer of bytes one after the other."""
    views: dict[str, np.ndarray] = {}
    start = 0
    for name, (dtype, shape) in shapes.items():
        num_bytes = _num_bytes(dtype, shape)
        views[name] = buffer[start : start + num_bytes].view(dtype).reshape(shape)
        start += _aligned(num_bytes)
    return views


def _tensors(buffer: torch.Tensor, shapes: _Shapes) -> dict[str, torch.Tensor]:
    """The same as tensors."""
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for name, (dtype, shape) in shapes.items():
        num_bytes = _num_bytes(dtype, shape)
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        tensors[name] = buffer[start : start + num_bytes].view(torch_dtype).view(shape)
        start += _aligned(num_bytes)
    return tensors


def _starts(arrays: Sequence[np.ndarray], start: int) -> tuple[list[int], int]:
    """The bytes where arrays begin that lie one after the other, and the one behind them."""
    starts = []
    for array in arrays:
        starts.append(start)
        start += _aligned(array.nbytes)
    return starts, start


def _written(buffer: torch.Tensor, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> torch.Tensor:
    """The buffer of bytes, with the arrays at these bytes."""
    memory = buffer.numpy()
    for array, start in zip(arrays, starts, strict=True):
        if array.size:
            memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    return buffer


def _tensor_at(buffer: torch.Tensor, start: int, array: np.ndarray) -> torch.Tensor:
    """Where an array of this dtype and shape lies in a buffer of bytes."""
    if not array.size:
        return torch.from_numpy(array)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return buffer[start : start + array.nbytes].view(dtype).view(array.shape)


def _lora_shapes(prefix: str, num_tokens: int, limits: InputLimits) -> _Shapes:
    """All maps hold as many segments, so that kernels are compiled for one length."""
    num_segments = limits.max_sequences
    return {
        f"{prefix}/segment_starts": (np.int32, (num_segments + 1,)),
        f"{prefix}/places": (np.int32, (num_segments,)),
        f"{prefix}/first_rows": (np.int32, (limits.num_groups, num_segments)),
        f"{prefix}/token_segment": (np.int32, (num_tokens,)),
        f"{prefix}/num_segments": (np.int32, (1,)),
    }


def _lora_maps(
    prefix: str,
    segments: tuple[Segment, ...],
    num_tokens: int,
    tensors: dict[str, torch.Tensor],
    side: tuple[tuple[str, int], ...],
) -> LoraMaps:
    lines = None
    if side:
        each = {group: tensors[f"{prefix}/{group}"] for group, _ in side}
        lines = SideLines(num_heads=dict(side).get("saved_head", 0), **each)
    return LoraMaps(
        segments=segments,
        num_tokens=num_tokens,
        segment_starts=tensors[f"{prefix}/segment_starts"],
        places=tensors[f"{prefix}/places"],
        first_rows=tensors[f"{prefix}/first_rows"],
        token_segment=tensors[f"{prefix}/token_segment"],
        num_segments=tensors[f"{prefix}/num_segments"],
        side=lines,
        runs_once=num_tokens > TOKEN_SIZES[-1],
    )
