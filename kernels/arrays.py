"""Arrays that travel to a device together: declared once, as fields of a class, and laid out one after the other.

    @dataclass(frozen=True, slots=True)
    class Lines(Generic[Array]):
        starts: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.num_lines + 1,), LAST))
        places: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.num_lines,), -1))

`Lines[HostArray]` is what the host writes, `Lines[torch.Tensor]` what the device reads, laid out alike in two buffers
for the same sizes. What the ops read adds host values to it: `class LineMaps(Lines[torch.Tensor])`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy as np
import torch

Array = TypeVar("Array")
Arrays = TypeVar("Arrays")

ALIGNMENT_BYTES = 64  # each array begins on its own line


class _Repeated(Enum):
    LAST = "last"


LAST = _Repeated.LAST
"""Padding that is the last value of the array again."""

_KEY = "array"  # of a field's metadata
PaddingValue = int | _Repeated
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """The declaration of one array field.

    dtype    of numpy; `np.floating`: the device's choice, see `number_dtype`
    shape    from the sizes that a group is laid out for; None where these have no such array. It grows with each size
    padding  the value behind the given ones, on each axis on which they are fewer
    """

    dtype: type[Any]
    shape: Callable[[Any], Shape | None]
    padding: PaddingValue = 0


def declared(dtype: type[Any], shape: Callable[[Any], Shape | None], padding: PaddingValue = 0) -> dict[str, Declared]:
    """The metadata of such a field, see `Declared`."""
    return {_KEY: Declared(dtype, shape, padding)}


class HostArray:
    """A declared array in host memory, to be written."""

    __slots__ = ("_padding", "_view")

    def __init__(self, view: np.ndarray, padding: PaddingValue) -> None:
        self._view = view
        self._padding = padding

    @property
    def shape(self) -> Shape:
        return self._view.shape

    def put(self, values: np.ndarray | Sequence[Any]) -> None:
        """The values, and padding behind them. ValueError if there are more than there is room for."""
        corner, values = self._view, np.asarray(values)
        if not values.size:
            corner[...] = 0 if isinstance(self._padding, _Repeated) else self._padding
            return
        if values.shape != corner.shape:
            padding = values[-1] if isinstance(self._padding, _Repeated) else self._padding
            for axis, num in enumerate(values.shape):
                corner[(slice(None),) * axis + (slice(num, None),)] = padding
                corner = corner[(slice(None),) * axis + (slice(num),)]
        corner[...] = values


class Layout(Generic[Array]):
    """Hands out the arrays of groups, one behind the other; `end` is the byte behind the last of them."""

    def __init__(
        self, view: Callable[[Declared, type[Any], Shape, int], Array], number: type[np.floating], start: int
    ) -> None:
        """view    makes an array from its declaration, dtype, shape and first byte
        number  for `np.floating`
        start   a multiple of ALIGNMENT_BYTES
        """
        self._view = view
        self._number = number
        self.end = start

    def add(self, group: type[Arrays], sizes: Any) -> Arrays:
        """The arrays of a class of declared fields."""
        plain: Any = getattr(group, "__origin__", group)  # a generic class may be given with its argument
        arrays: Arrays = plain(**{name: self._array(each, sizes) for name, each in _declarations(plain).items()})
        return arrays

    def _array(self, declared: Declared, sizes: Any) -> Array | None:
        shape = declared.shape(sizes)
        if shape is None:
            return None
        dtype = self._number if declared.dtype is np.floating else declared.dtype
        array = self._view(declared, dtype, shape, self.end)
        self.end += -(-_num_bytes(dtype, shape) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return array


def in_host(buffer: np.ndarray, number: type[np.floating], start: int = 0) -> Layout[HostArray]:
    """Arrays in a buffer of bytes, to be written."""

    def view(declared: Declared, dtype: type[Any], shape: Shape, first: int) -> HostArray:
        return HostArray(_bytes_of(buffer, dtype, shape, first).view(dtype).reshape(shape), declared.padding)

    return Layout(view, number, start)


def in_tensor(buffer: torch.Tensor, number: type[np.floating], start: int = 0) -> Layout[torch.Tensor]:
    """Arrays in a buffer of bytes on any device, to be read."""

    def view(_declared: Declared, dtype: Any, shape: Shape, first: int) -> torch.Tensor:
        return _bytes_of(buffer, dtype, shape, first).view(_torch_dtype(dtype)).view(shape)

    return Layout(view, number, start)


def in_nothing(number: type[np.floating]) -> Layout[None]:
    """No arrays, to learn where they would end."""
    return Layout(lambda *_: None, number, 0)


def by_name(arrays: object, group: Any) -> dict[str, Any]:
    """The arrays that a group declares, for a class that adds to them."""
    return {name: getattr(arrays, name) for name in _declarations(group)}


def number_dtype(device: torch.device) -> type[np.floating]:
    """In which numbers of any precision go to a device: accelerators may lack float64, or be slow at it."""
    return np.float64 if device.type == "cpu" else np.float32


@functools.cache
def _declarations(group: Any) -> dict[str, Declared]:
    """By the names of the fields, in their order."""
    return {field.name: field.metadata[_KEY] for field in fields(group) if _KEY in field.metadata}


@functools.cache
def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _num_bytes(dtype: type[Any], shape: Shape) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


def _bytes_of(buffer: Any, dtype: type[Any], shape: Shape, first: int) -> Any:
    """The part of a buffer of bytes in which such an array lies."""
    end = first + _num_bytes(dtype, shape)
    assert end <= len(buffer), "a step is larger than the largest that the buffers were made for"
    return buffer[first:end]
