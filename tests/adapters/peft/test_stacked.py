"""Tensors of blocks are what numpy makes of them, whatever the blocks' dtypes, and read in however small pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapters.files.safetensors_header import read_header, widened
from adapters.peft import block_tensors as module
from adapters.peft.block_tensors import Block, Stacked, chunks, stacked
from tests.support.adapter_files import safetensors_bytes

NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def blocks_in(path: Path, dtypes: tuple[str, str], factors: tuple[float, float]) -> tuple[list[Block], np.ndarray]:
    """[5, 2] at (2, 1), and [4, 3] at (8, 3), of a matrix [13, 7], and the matrix."""
    generator, wanted = np.random.default_rng(1), np.zeros((13, 7), "<f4")
    values = {f"{i}": generator.standard_normal(shape).astype("<f4") for i, shape in enumerate(((5, 2), (4, 3)))}
    held = {
        name: (one.view("<u4") >> 16).astype("<u2") if dtype == "BF16" else one.astype(NUMPY[dtype])
        for (name, one), dtype in zip(values.items(), dtypes, strict=True)
    }
    path.write_bytes(safetensors_bytes(held))
    tensors, blocks = read_header(path), []
    for name, (row, column), factor in zip(held, ((2, 1), (8, 3)), factors, strict=True):
        exact = widened(held[name].tobytes(), tensors[name].dtype).reshape(held[name].shape)
        num_rows, num_columns = exact.shape
        wanted[row : row + num_rows, column : column + num_columns] = (exact * np.float64(factor)).astype("<f4")
        blocks.append(Block(tensors[name], row, column, factor))
    return blocks[::-1], wanted


def values_of(path: Path, tensor: Stacked) -> np.ndarray:
    return np.asarray(widened(b"".join(chunks(path, tensor)), tensor.dtype)).reshape(tensor.shape)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 18])
@pytest.mark.parametrize(
    ("dtypes", "factors", "dtype"),
    [
        (("F32", "F32"), (1, 1), "F32"),
        (("F16", "F16"), (1, 1), "F16"),
        (("BF16", "BF16"), (1, 1), "BF16"),
        (("BF16", "BF16"), (1, 1 / 3), "F32"),
        (("F16", "BF16"), (1, 1), "F32"),
        (("F32", "F16"), (-0.7, 1), "F32"),
    ],
)
def test_blocks_and_zeros_around_them(
    dtypes: tuple[str, str],
    factors: tuple[float, float],
    dtype: str,
    chunk_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "blocks.safetensors"
    blocks, wanted = blocks_in(path, dtypes, factors)
    made = stacked((13, 7), blocks)
    assert made.dtype == dtype
    assert made.num_bytes == sum(len(chunk) for chunk in chunks(path, made))
    np.testing.assert_array_equal(values_of(path, made), wanted)


def test_vectors_are_columns(tmp_path: Path) -> None:
    path = tmp_path / "vectors.safetensors"
    path.write_bytes(safetensors_bytes({"one": np.arange(3, dtype="<f4"), "two": np.arange(2, dtype="<f4") + 9}))
    tensors = read_header(path)
    made = stacked((8,), [Block(tensors["one"], 0, 0, 1), Block(tensors["two"], 5, 0, 0.5)])
    np.testing.assert_array_equal(values_of(path, made), np.array([0, 1, 2, 0, 0, 4.5, 5, 0], "<f4"))
