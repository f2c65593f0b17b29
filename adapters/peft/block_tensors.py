"""Tensors composed of a file's tensors: of blocks with zeros around them, or of matrices whose elements stand elsewhere
in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from adapters.files.safetensors_header import CHUNK_BYTES, ELEMENT_BYTES, Tensor, read_chunks, widened

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor of a file, placed at (row, column) of a larger one and multiplied by `factor`; a vector is a column."""

    tensor: Tensor
    row: int
    column: int
    factor: float


@dataclass(frozen=True, slots=True)
class Stacked(Tensor):
    """A tensor of `blocks`, in the order of their rows, of which each row belongs to one block at most. `start` and
    `end` are offsets in the tensor itself."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Elements of a tensor of a file as a matrix, by the place of the first one and the steps to the next row and
    column, in elements of the tensor.

    is_zero  none of them: zeros in the tensor's dtype
    """

    tensor: Tensor
    start: int
    shape: tuple[int, int]
    steps: tuple[int, int]
    is_zero: bool = False

    def rows(self, first: int, num: int) -> Matrix:
        """Some of its rows."""
        return replace(self, start=self.start + first * self.steps[0], shape=(num, self.shape[1]))

    def every_second(self, first: int, num: int) -> Matrix:
        """Each second of its rows."""
        return replace(self.rows(first, num), steps=(2 * self.steps[0], self.steps[1]))

    def columns(self, first: int, num: int) -> Matrix:
        """Some of its columns."""
        return replace(self, start=self.start + first * self.steps[1], shape=(self.shape[0], num))


@dataclass(frozen=True, slots=True)
class Arranged(Tensor):
    """Matrices of one shape, one below the other (`axis` 0) or beside it (1). `start` and `end` are offsets in the
    tensor itself."""

    matrices: tuple[Matrix, ...]
    axis: int


def arranged(matrices: Sequence[Matrix], *, axis: int) -> Arranged:
    """The tensor of these matrices: in their own dtype if they share one, else in float32."""
    dtypes = {matrix.tensor.dtype for matrix in matrices}
    dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
    rows, columns = matrices[0].shape
    shape = (rows * len(matrices), columns) if axis == 0 else (rows, columns * len(matrices))
    names = list(dict.fromkeys(matrix.tensor.name for matrix in matrices))
    name = _common_name(names) if len(names) < _MAX_NAMED else f"{names[0]}, ..., {names[-1]}"
    return Arranged(name, dtype, shape, 0, math.prod(shape) * ELEMENT_BYTES[dtype], tuple(matrices), axis)


def matrix_values(path: Path, matrix: Matrix, data: Any = None) -> Any:
    """A view of the file's bits, or of `data`, the whole file mapped, as unsigned integers [rows, columns]."""
    import numpy as np

    if data is None:
        data = np.memmap(path, np.uint8, "r")
    tensor, size = matrix.tensor, ELEMENT_BYTES[matrix.tensor.dtype]
    if matrix.is_zero:
        return np.zeros(matrix.shape, f"<u{size}")
    flat = data[tensor.start : tensor.end].view(f"<u{size}")[matrix.start :]
    return np.lib.stride_tricks.as_strided(flat, matrix.shape, tuple(step * size for step in matrix.steps))


def stacked(shape: tuple[int, ...], blocks: Sequence[Block]) -> Stacked:
    """The tensor of these blocks: in the blocks' own dtype if they share one and every factor is 1, else in float32, to
    which each is widened exactly."""
    dtypes = {block.tensor.dtype for block in blocks}
    dtype = dtypes.pop() if len(dtypes) == 1 and all(block.factor == 1 for block in blocks) else "F32"
    in_order = tuple(sorted(blocks, key=lambda block: block.row))
    return Stacked(
        _common_name([block.tensor.name for block in in_order]),
        dtype,
        shape,
        0,
        math.prod(shape) * ELEMENT_BYTES[dtype],
        in_order,
    )


def why_in_parts(tensor: Tensor) -> str | None:
    """The reason if the tensor holds nothing of a weight, as runs of several devices save them by mistake."""
    if 0 not in tensor.shape:
        return None
    return (
        f"it is empty (its shape is {tensor.shape}): DeepSpeed's ZeRO-3 or FSDP saved it without gathering the "
        "weights; gather them and save the adapter again"
    )


def chunks(path: Path, tensor: Tensor) -> Iterator[bytes]:
    """The tensor's bytes in pieces; `path` holds it, or its blocks."""
    if isinstance(tensor, Arranged):
        yield from _arranged_chunks(path, tensor)
        return
    if not isinstance(tensor, Stacked):
        yield from read_chunks(path, tensor)
        return
    num_columns = math.prod(tensor.shape[1:])
    num_rows = max(CHUNK_BYTES // (4 * num_columns), 1)  # of a piece
    end = 0
    for block in tensor.blocks:
        yield from _zeros(block.row - end, num_columns * ELEMENT_BYTES[tensor.dtype], num_rows)
        yield from _rows(path, tensor.dtype, block, num_columns, num_rows)
        end = block.row + block.tensor.shape[0]
    yield from _zeros(tensor.shape[0] - end, num_columns * ELEMENT_BYTES[tensor.dtype], num_rows)


def _arranged_chunks(path: Path, tensor: Arranged) -> Iterator[bytes]:
    import numpy as np

    data = np.memmap(path, np.uint8, "r")
    views = [(matrix.tensor.dtype, matrix_values(path, matrix, data)) for matrix in tensor.matrices]
    num_rows, num_columns = tensor.matrices[0].shape
    groups = [[view] for view in views] if tensor.axis == 0 else [views]
    at_once = max(CHUNK_BYTES // (4 * num_columns * len(groups[0])), 1)
    for group in groups:
        for first in range(0, num_rows, at_once):
            pieces = [view[first : first + at_once] for _, view in group]
            if tensor.dtype == "F32":
                pieces = [
                    widened(np.ascontiguousarray(piece).tobytes(), dtype).reshape(piece.shape)
                    for piece, (dtype, _) in zip(pieces, group, strict=True)
                ]
            yield np.concatenate(pieces, axis=1).tobytes()


def origin(tensor: Tensor, place: int) -> Tensor:
    """The file's tensor that the element at `place`, counted row after row, comes from; the whole tensor for a zero
    between blocks."""
    if not isinstance(tensor, Stacked):
        return tensor
    row = place // math.prod(tensor.shape[1:])
    return next((one.tensor for one in tensor.blocks if 0 <= row - one.row < one.tensor.shape[0]), tensor)


def _common_name(names: Sequence[str]) -> str:
    """For messages: a.{q,k}.b of a.q.b and a.k.b."""
    if len(names) == 1:
        return names[0]
    start = _beginning(names)
    rests = [name.removeprefix(start) for name in names]
    end = _beginning([rest[::-1] for rest in rests])[::-1]
    return f"{start}{{{','.join(rest.removesuffix(end) for rest in rests)}}}{end}"


def _beginning(names: Sequence[str]) -> str:
    """The common beginning of all names."""
    return "".join(letters[0] for letters in takewhile(lambda some: len(set(some)) == 1, zip(*names, strict=False)))


def _zeros(num_rows: int, row_bytes: int, at_once: int) -> Iterator[bytes]:
    for first in range(0, num_rows, at_once):
        yield bytes(min(at_once, num_rows - first) * row_bytes)


def _rows(path: Path, dtype: str, block: Block, num_columns: int, at_once: int) -> Iterator[bytes]:
    """All rows that the block has, of `num_columns` each."""
    import numpy as np

    width = math.prod(block.tensor.shape[1:])
    columns = slice(block.column, block.column + width)
    for data in read_chunks(path, block.tensor, at_once * width * ELEMENT_BYTES[block.tensor.dtype]):
        values = _values(data, dtype, block).reshape(-1, width)
        rows = np.zeros((len(values), num_columns), values.dtype)
        rows[:, columns] = values
        yield rows.tobytes()


def _values(data: bytes, dtype: str, block: Block) -> Any:
    """Bits as they are where nothing changes, or float32."""
    import numpy as np

    if (dtype, block.factor) == (block.tensor.dtype, 1):
        return np.frombuffer(data, f"<u{ELEMENT_BYTES[dtype]}")
    # Rounded once: a product of float32 and a double.
    return (widened(data, block.tensor.dtype).astype("<f8") * block.factor).astype("<f4")
