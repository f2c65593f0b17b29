"""Memory of the simulated chip: global memory is the caller's tensors, on-chip memory is byte arrays.

A `MemRef` is a strided view with offsets in elements, as in MLIR. Booleans on the chip are packed eight to a byte.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.ascend.gate.mlir import split_top

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "ui8": torch.uint8,
}
ELEMENT_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {"i1": 0.125}


class SimulationError(RuntimeError):
    """The code did something the chip would not survive, or something the simulator does not know."""


@dataclass
class Storage:
    """Bytes with a name for messages; `owner` is the kernel parameter it belongs to ("" for on-chip memory)."""

    raw: torch.Tensor
    name: str
    owner: str = ""
    views: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def typed(self, kind: str, misalignment: int) -> torch.Tensor:
        """The bytes as elements of one type, beginning `misalignment` bytes in."""
        key = kind, misalignment
        if key not in self.views:
            size = DTYPES[kind].itemsize
            count = (self.raw.numel() - misalignment) // size
            self.views[key] = self.raw[misalignment : misalignment + count * size].view(DTYPES[kind])
        return self.views[key]


@dataclass
class MemRef:
    """Elements `offset + sum(index * stride)` of type `kind`, counted from byte `base` of the storage."""

    storage: Storage
    base: int
    kind: str
    offset: int
    sizes: list[int]
    strides: list[int]
    space: str

    def like(self, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> MemRef:
        """Another view of the same memory."""
        return MemRef(self.storage, self.base, self.kind, offset, list(sizes), list(strides), self.space)

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        return math.ceil(self.num_elements * ELEMENT_BYTES[self.kind])

    @property
    def empty(self) -> bool:
        return any(size <= 0 for size in self.sizes)

    @property
    def address(self) -> float:
        """First byte within the storage."""
        return self.base + self.offset * ELEMENT_BYTES[self.kind]

    def tensor(self) -> torch.Tensor:
        """The elements as a torch view. Raises SimulationError when any of them lies outside the storage."""
        size = DTYPES[self.kind].itemsize
        flat = self.storage.typed(self.kind, self.base % size)
        first = self.base // size + self.offset
        last = first + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        if first < 0 or last >= flat.numel():
            raise SimulationError(
                f"out of bounds: elements {first}..{last} of {self.storage.name}, which has {flat.numel()} {self.kind} "
                f"(sizes {self.sizes}, strides {self.strides}, {self.space})"
            )
        return torch.as_strided(flat, self.sizes, self.strides, first)

    def _bit_indices(self) -> torch.Tensor:
        return indices(tuple(self.sizes), tuple(self.strides)) + (self.base * 8 + self.offset)

    def read(self) -> torch.Tensor:
        """The elements; booleans are unpacked (a copy)."""
        if self.kind != "i1":
            return self.tensor()
        bits = self._bit_indices()
        return ((self.storage.raw[bits >> 3].to(torch.int64) >> (bits & 7)) & 1).bool()

    def write(self, values: torch.Tensor) -> None:
        """Replace the elements."""
        if self.kind != "i1":
            self.tensor().copy_(values)
            return
        bits = self._bit_indices().reshape(-1)
        if not bits.numel():
            return
        first, last = int(bits.min()) >> 3, int(bits.max()) >> 3
        if first < 0 or last >= self.storage.raw.numel():
            raise SimulationError(f"out of bounds: bytes {first}..{last} of {self.storage.name}")
        around = self.storage.raw[first : last + 1].numpy()
        unpacked = np.unpackbits(around, bitorder="little")
        unpacked[bits.numpy() - 8 * first] = values.broadcast_to(self.sizes).reshape(-1).numpy()
        around[:] = np.packbits(unpacked, bitorder="little")

    def _scalar(self, indices: Sequence[int]) -> tuple[torch.Tensor, int]:
        offset = self.offset + sum(index * stride for index, stride in zip(indices, self.strides, strict=True))
        size = DTYPES[self.kind].itemsize
        flat = self.storage.typed(self.kind, self.base % size)
        element = self.base // size + offset
        inside = all(0 <= index < extent for index, extent in zip(indices, self.sizes, strict=True))
        if not inside or not 0 <= element < flat.numel():
            raise SimulationError(f"scalar access out of bounds: element {element} of {self.storage.name}")
        return flat, element

    def _bit(self, indices: Sequence[int]) -> int:
        return self.base * 8 + self.offset + sum(i * stride for i, stride in zip(indices, self.strides, strict=True))

    def load(self, indices: Sequence[int]) -> float:
        """One element, read by the scalar unit. Raises SimulationError outside the storage."""
        if self.kind == "i1":
            bit = self._bit(indices)
            return (int(self.storage.raw[bit >> 3]) >> (bit & 7)) & 1
        flat, element = self._scalar(indices)
        return flat[element].item()

    def store(self, value: float, indices: Sequence[int]) -> None:
        """Write one element; a boolean at the beginning of a byte clears the rest of that byte, as on the chip."""
        if self.kind == "i1":
            bit = self._bit(indices)
            raw, mask = self.storage.raw, 1 << (bit & 7)
            before = 0 if mask == 1 else int(raw[bit >> 3])
            raw[bit >> 3] = before | mask if value else before & ~mask
            return
        flat, element = self._scalar(indices)
        flat[element] = value


@dataclass(frozen=True)
class MemRefType:
    """A parsed `memref<...>` type; None stands for a size that is only known at run time."""

    sizes: tuple[int | None, ...]
    kind: str
    space: str

    @property
    def num_bytes(self) -> int | None:
        """None if a size is not static."""
        total = 1
        for size in self.sizes:
            if size is None:
                return None
            total *= size
        return math.ceil(total * ELEMENT_BYTES[self.kind])


@functools.lru_cache(maxsize=4096)
def parse_type(text: str) -> MemRefType:
    """`memref<4x?xf32, strided<...>, #hivm.address_space<ub>>` -> MemRefType((4, None), "f32", "ub")."""
    shape, *rest = split_top(text[len("memref<") : -1])
    found = re.match(r"((?:(?:\?|\d+)x)*)(\w+)$", shape)
    assert found is not None, text
    sizes = tuple(None if size == "?" else int(size) for size in found.group(1).split("x") if size)
    spaces = [match.group(1) for part in rest if (match := re.search(r"address_space<(\w+)>", part))]
    return MemRefType(sizes, found.group(2), spaces[0] if spaces else "gm")


@functools.lru_cache(maxsize=256)
def indices(sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """int64 [sizes]: where each element lies, counted from the first."""
    index = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(sizes, strides, strict=True):
        index = index[..., None] + torch.arange(size) * stride
    return index


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
    """Row-major strides, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return strides[::-1]
