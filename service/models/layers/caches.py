"""Caches of sequences between steps, as the model's mixers declare them: paged keys and values, and lines of state."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from adapters.memory.device_upload import CopyEvent, CopyStream
from kernels.paged_attention import cache_layout
from kernels.platform import in_use
from service.models.spec.config_json import ModelError
from service.models.spec.mixer_specs import MixerState
from service.models.spec.model_spec import AttentionSpec, ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """Keys and values of one attention layer, each [num_blocks, block_size, kv_heads, head_dim]; block 0 is null.

    They lie in memory as attention wants them on this device (`kernels/paged_attention/cache_layout.py`).
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ConvStates:
    """States of one convolution layer, [num_lines, width - 1, hidden]; line 0 is null."""

    lines: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeltaStates:
    """States of one gated delta net or Mamba-2 layer; line 0 is null in both.

    lines     [num_lines, width - 1, channels], of its convolution
    matrices  float32 [num_lines, value_heads, key_dim, value_dim], or [num_lines, heads, state_size, head_dim]
    """

    lines: torch.Tensor
    matrices: torch.Tensor


LayerCache = KvCache | ConvStates | DeltaStates
# By what a mixer's states are called.
_BY_NAMES = {tuple(field.name for field in fields(kind)): kind for kind in (KvCache, ConvStates, DeltaStates)}


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """One cache per layer, in order; the same one in layers that share theirs."""

    layers: tuple[LayerCache, ...]

    @property
    def each(self) -> list[LayerCache]:
        """Each cache once."""
        return list({id(cache): cache for cache in self.layers}.values())

    def copy_blocks(self, blocks: torch.Tensor) -> None:
        """Copy keys and values of the blocks blocks[0] to blocks[1], int64 [2, n] on the device, none written twice."""
        for cache in self.each:
            if isinstance(cache, KvCache):
                for tensor in (cache.k, cache.v):
                    tensor.index_copy_(0, blocks[1], tensor.index_select(0, blocks[0]))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, each once."""
        return [getattr(cache, name) for cache in self.each for name in cache.__slots__]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


# Blocks that are copied to host memory in a step, or from there at a time.
COPIED_BLOCKS = 32
_ALIGNMENT_BYTES = 64


class _HostRows:
    """Rows of host memory, uint8 [row_bytes] each, and a buffer of a few rows on the device: each has one place, a
    block or a line, of all these caches."""

    def __init__(self, caches: Sequence[torch.Tensor], most: int) -> None:
        self._caches = caches
        self._most = most
        self._starts: list[int] = []
        self.row_bytes = 0
        for cache in caches:
            self._starts.append(self.row_bytes)
            self.row_bytes += -(-cache[0].nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._parts: list[torch.Tensor] = []  # each [rows, row_bytes]
        self._is_pinned = caches[0].device.type != "cpu" if caches else False
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> int:
        """Use so much memory at most; the number of rows. What is pinned is taken in parts, since torch rounds it up to
        a power of two."""
        powers = [1 << bit for bit in reversed(range(num_bytes.bit_length())) if num_bytes >> bit & 1]
        for size in powers if self._is_pinned else [num_bytes]:
            if num_rows := size // self.row_bytes if self.row_bytes else 0:
                memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
                self._parts.append(memory[: num_rows * self.row_bytes].view(num_rows, self.row_bytes))
        num_rows = sum(map(len, self._parts))
        if num_rows:
            shape = (min(self._most, num_rows), self.row_bytes)
            self._buffer = torch.empty(shape, dtype=torch.uint8, device=self._caches[0].device)
        return num_rows

    def _row(self, number: int) -> torch.Tensor:
        for part in self._parts:
            if number < len(part):
                return part[number]
            number -= len(part)
        raise AssertionError("no such row")

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        for places, rows in self._portions(pairs):
            for cache, piece in self._pieces(len(rows)):
                piece.copy_(cache.index_select(0, places))
            for index, row in enumerate(rows):
                self._row(row).copy_(self._buffer[index], non_blocking=True)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        for places, rows in self._portions(pairs):
            for index, row in enumerate(rows):
                self._buffer[index].copy_(self._row(row), non_blocking=True)
            for cache, piece in self._pieces(len(rows)):
                cache.index_copy_(0, places, piece)

    def _portions(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Places, int64 on the device, and rows, as many as the buffer takes. Pinned: pageable numbers would wait for
        all that the stream waits for."""
        for start in range(0, len(pairs), self._most):
            portion = pairs[start : start + self._most]
            places = torch.tensor([place for place, _ in portion], pin_memory=self._is_pinned)
            yield places.to(self._buffer.device, non_blocking=True), [row for _, row in portion]

    def _pieces(self, num: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each cache, and what the first rows of the buffer have of it, in its shape."""
        for cache, start in zip(self._caches, self._starts, strict=True):
            piece = self._buffer[:num, start : start + cache[0].nbytes]
            yield cache, piece.view(cache.dtype).view(num, *cache.shape[1:])


class HostCopies(Protocol):
    """The copies of `HostRowCopies`, as the engine asks for them."""

    num_rows: tuple[int, int]
    row_bytes: tuple[int, int]
    most_blocks: int

    def save(self, blocks: Sequence[tuple[int, int]], lines: Sequence[tuple[int, int]]) -> CopyEvent: ...
    def load(self, blocks: Sequence[tuple[int, int]], lines: Sequence[tuple[int, int]]) -> CopyEvent: ...
    def publish(self, mark: CopyEvent) -> None: ...


class HostRowCopies:
    """Host memory for blocks and lines that leave the device, pinned where there is one, and copies between the two,
    all on one stream beside the steps'. Not run on an NPU.

    num_bytes    of all rows; as large a part is for lines as they are of the caches' bytes
    num_rows, row_bytes  of blocks, and of lines
    """

    most_blocks = COPIED_BLOCKS

    def __init__(self, caches: Caches, num_bytes: int, stream: CopyStream) -> None:
        tensors = [(type(cache) is KvCache, getattr(cache, name)) for cache in caches.each for name in cache.__slots__]
        self._blocks = _HostRows([tensor for is_paged, tensor in tensors if is_paged], COPIED_BLOCKS)
        self._lines = _HostRows([tensor for is_paged, tensor in tensors if not is_paged], 1)
        self._stream = stream
        line_share = sum(tensor.nbytes for is_paged, tensor in tensors if not is_paged) / caches.num_bytes
        line_bytes = int(num_bytes * line_share)
        try:
            self.num_rows = self._blocks.allocate(num_bytes - line_bytes), self._lines.allocate(line_bytes)
        except RuntimeError as error:
            raise ModelError(
                f"{num_bytes} bytes of host memory for the prefix cache cannot be had: lower --prefix-host-bytes, "
                "or raise the limit of this process's memory (of locked memory beside a device: ulimit -l)"
            ) from error
        self.row_bytes = self._blocks.row_bytes, self._lines.row_bytes

    def save(self, blocks: Sequence[tuple[int, int]], lines: Sequence[tuple[int, int]]) -> CopyEvent:
        """Copy these blocks and lines to rows, as the steps launched so far leave them; each with its row."""
        self._stream.after_steps()
        with self._stream.begin():
            self._blocks.save(blocks)
            self._lines.save(lines)
        return self._stream.mark()

    def load(self, blocks: Sequence[tuple[int, int]], lines: Sequence[tuple[int, int]]) -> CopyEvent:
        """The other way; no step that is launched before `publish` uses these blocks and lines."""
        self._stream.after_steps()
        with self._stream.begin():
            self._blocks.load(blocks)
            self._lines.load(lines)
        return self._stream.mark()

    def publish(self, mark: CopyEvent) -> None:
        """Steps launched from now on wait for the copies before the event."""
        if not mark.is_completed():
            self._stream.before_steps(mark)


def allocate_caches(
    spec: ModelSpec, num_blocks: int, block_size: int, num_lines: int, dtype: torch.dtype, device: torch.device
) -> Caches:
    """Caches of all layers, not initialised: a sequence reads what it has written and nothing else.

    But for keys and values on an NPU, which begin as zeros: NaN that happened to lie in a block behind a sequence's end
    have been seen to reach the result of its fused attention.

    num_blocks, num_lines  the null block and the null line included; num_lines is unused without states
    block_size             tokens per block
    """

    def tensor(state: MixerState) -> torch.Tensor:
        is_paged = state.per == "token"
        make = torch.zeros if is_paged and device.type == "npu" else torch.empty
        of_shape = functools.partial(make, dtype=_dtype_of(state, dtype), device=device)
        if not is_paged:
            return of_shape((num_lines, *state.shape))
        shape = (num_blocks, block_size, *state.shape)
        return cache_layout.made(of_shape, shape, heads_first=in_use(device).kv_heads_first)

    def cache(states: tuple[MixerState, ...]) -> LayerCache:
        return _BY_NAMES[tuple(state.name for state in states)](*map(tensor, states))

    caches: list[LayerCache] = []
    for layer in spec.layers:
        shared = layer.mixer.cache_of if isinstance(layer.mixer, AttentionSpec) else None
        caches.append(cache(layer.mixer.states) if shared is None else caches[shared])
    return Caches(tuple(caches))


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that one cached token takes in all attention layers."""
    return _line_bytes(spec, "token", dtype)


def state_bytes_per_line(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of one line of state in all layers; 0 without layers that have states."""
    return _line_bytes(spec, "sequence", dtype)


def _line_bytes(spec: ModelSpec, per: str, dtype: torch.dtype) -> int:
    states = (state for layer in spec.layers for state in layer.mixer.states if state.per == per)
    return sum(math.prod(state.shape) * _dtype_of(state, dtype).itemsize for state in states)


def _dtype_of(state: MixerState, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if state.in_float32 else dtype
