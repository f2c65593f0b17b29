"""Tensors composed of blocks of a file's tensors, with zeros around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from adapters.files.safetensors_header import CHUNK_BYTES, ELEMENT_BYTES, Tensor, read_chunks, widened


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


def chunks(path: Path, tensor: Tensor) -> Iterator[bytes]:
    """The tensor's bytes in pieces; `path` holds it, or its blocks."""
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
