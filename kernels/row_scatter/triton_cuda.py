"""`kernels.row_scatter.ops` on NVIDIA GPUs: one launch, whatever the number of pieces.

    pieces    int64 [pieces, _NUM_FIELDS]: where each lies, in bytes; see `_fields`
    programs  int32 [programs, 3]: piece, row of it, block of the row

Both are built once for pieces and sources that stay where they are, as the rows and the buffer of a pool do, so that a
call hands over no more than the first rows. A swap has tables of its own kind:

    tensors   int64 [tensors, _NUM_SWAP_FIELDS]: see `_swap_fields`
    blocks    int32 [blocks, 2]: tensor, block of each of its rows
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kernels import triton_launch
from kernels.contract import Contract
from kernels.row_scatter.ops import MAX_STARTS, RowPiece, RowPieces, RowTensorSet

# Bytes of a row that a program copies: 64 for each thread of 4 warps. Rows of most projections are a multiple.
_BLOCK_BYTES = 8192
_NUM_WARPS = 4
_NUM_FIELDS = 8
_NUM_FIELDS_CONSTANT = tl.constexpr(_NUM_FIELDS)
_NUM_SWAP_FIELDS = 4
_NUM_SWAP_FIELDS_CONSTANT = tl.constexpr(_NUM_SWAP_FIELDS)
_WIDE_BYTES = 16


@triton.jit(do_not_specialize=["start_0", "start_1", "start_2", "start_3", "start_4", "start_5"])
def scatter_rows_kernel(
    pieces_ptr,  # int64 [pieces, _NUM_FIELDS]
    programs_ptr,  # int32 [programs, 3]
    start_0,
    start_1,
    start_2,
    start_3,
    start_4,
    start_5,
    BLOCK_BYTES: tl.constexpr,
):
    """Grid (programs,). Offsets are in bytes and 64 bits wide."""
    programs_ptr += tl.program_id(0).to(tl.int64) * 3
    fields_ptr = pieces_ptr + tl.load(programs_ptr).to(tl.int64) * _NUM_FIELDS_CONSTANT
    row = tl.load(programs_ptr + 1).to(tl.int64)
    first = tl.load(programs_ptr + 2) * BLOCK_BYTES
    which = tl.load(fields_ptr + 2)
    start = tl.where(which == 0, start_0, tl.where(which == 1, start_1, tl.where(which == 2, start_2, start_3)))
    start = tl.where(which == 4, start_4, tl.where(which == 5, start_5, start)).to(tl.int64)
    row_bytes = tl.load(fields_ptr + 5)
    source = tl.load(fields_ptr) + row * row_bytes
    target = tl.load(fields_ptr + 1) + start * tl.load(fields_ptr + 3) + row * tl.load(fields_ptr + 4)
    has_source = row < tl.load(fields_ptr + 6)
    if tl.load(fields_ptr + 7) != 0:
        # Said once more, since addresses out of a table are known to be multiples of nothing: 16 bytes a thread.
        wide_source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        wide_target_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
        num_words = (row_bytes // 16).to(tl.int32) * 4
        _write_block(wide_source_ptr, wide_target_ptr, first // 4, num_words, has_source, BLOCK_BYTES // 4)
    else:
        source_ptr = source.to(tl.pointer_type(tl.int16))
        target_ptr = target.to(tl.pointer_type(tl.int16))
        _write_block(source_ptr, target_ptr, first // 2, (row_bytes // 2).to(tl.int32), has_source, BLOCK_BYTES // 2)


@triton.jit
def _write_block(source_ptr, target_ptr, first, num_words, has_source, BLOCK: tl.constexpr):
    """Words [first, first + BLOCK) of a row of `num_words`: the source's, or zeros."""
    at = first + tl.arange(0, BLOCK)
    mask = at < num_words
    words = tl.load(source_ptr + at, mask=mask & has_source, other=0)
    tl.store(target_ptr + at, words, mask=mask)


@triton.jit(do_not_specialize=["low", "high"])
def swap_rows_kernel(
    tensors_ptr,  # int64 [tensors, _NUM_SWAP_FIELDS]
    blocks_ptr,  # int32 [blocks, 2]
    low,
    high,
    BLOCK_BYTES: tl.constexpr,
):
    """Grid (rows, blocks): a program holds a block of one row of either range before it writes both."""
    row = tl.program_id(0).to(tl.int64)
    blocks_ptr += tl.program_id(1).to(tl.int64) * 2
    fields_ptr = tensors_ptr + tl.load(blocks_ptr).to(tl.int64) * _NUM_SWAP_FIELDS_CONSTANT
    first = tl.load(blocks_ptr + 1) * BLOCK_BYTES
    address = tl.load(fields_ptr)
    to_row = tl.load(fields_ptr + 1)
    row_bytes = tl.load(fields_ptr + 2)
    low_row = address + (low + row) * to_row
    high_row = address + (high + row) * to_row
    if tl.load(fields_ptr + 3) != 0:
        wide_low_ptr = tl.multiple_of(low_row.to(tl.pointer_type(tl.int32)), 16)
        wide_high_ptr = tl.multiple_of(high_row.to(tl.pointer_type(tl.int32)), 16)
        _swap_block(wide_low_ptr, wide_high_ptr, first // 4, (row_bytes // 16).to(tl.int32) * 4, BLOCK_BYTES // 4)
    else:
        low_ptr = low_row.to(tl.pointer_type(tl.int16))
        high_ptr = high_row.to(tl.pointer_type(tl.int16))
        _swap_block(low_ptr, high_ptr, first // 2, (row_bytes // 2).to(tl.int32), BLOCK_BYTES // 2)


@triton.jit
def _swap_block(low_ptr, high_ptr, first, num_words, BLOCK: tl.constexpr):
    """Words [first, first + BLOCK) of two rows of `num_words`."""
    at = first + tl.arange(0, BLOCK)
    mask = at < num_words
    low = tl.load(low_ptr + at, mask=mask)
    high = tl.load(high_ptr + at, mask=mask)
    tl.store(low_ptr + at, high, mask=mask)
    tl.store(high_ptr + at, low, mask=mask)


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """See the module's docstring; `sources` are held, so that their addresses stay theirs."""

    sources: tuple[torch.Tensor, ...]
    pieces: torch.Tensor
    programs: torch.Tensor


def prepare(pieces: RowPieces, sources: tuple[torch.Tensor, ...]) -> None:
    """See `ops.prepare`."""
    device = pieces.pieces[0].target.device
    left = iter(sources)
    fields = [_fields(one, next(left) if one.rank else None) for one in pieces.pieces]
    programs = torch.from_numpy(_programs(pieces.pieces, np.array([one[5] for one in fields])))
    pieces.kept["tables"] = _Tables(sources, torch.tensor(fields, dtype=torch.int64).to(device), programs.to(device))


def scatter_rows(pieces: RowPieces, sources: tuple[torch.Tensor, ...], starts: Sequence[int]) -> None:
    """See `ops.scatter_rows`."""
    tables = pieces.kept.get("tables")
    if tables is None or tables.sources is not sources:
        prepare(pieces, sources)
        tables = pieces.kept["tables"]
    launch(tables.pieces, tables.programs, starts)


def launch(pieces: torch.Tensor, programs: torch.Tensor, starts: Sequence[int]) -> None:
    """Launch the kernel once; its tables lie on the device."""
    # Not launched dependently: what it waits for are events, and copies that no kernel makes.
    scatter_rows_kernel[len(programs),](
        pieces,
        programs,
        *starts,
        *(0,) * (MAX_STARTS - len(starts)),
        BLOCK_BYTES=_BLOCK_BYTES,
        num_warps=_NUM_WARPS,
        **triton_launch.launch_options(pieces.device, dependent=False),
    )


def swap_rows(tensors: RowTensorSet, low: int, high: int, num_rows: int) -> None:
    """See `ops.swap_rows`."""
    if not tensors.kept:
        device = tensors.tensors[0].device
        fields = [_swap_fields(one) for one in tensors.tensors]
        blocks = [(at, block) for at, one in enumerate(fields) for block in range(-(-one[2] // _BLOCK_BYTES))]
        tensors.kept["tensors"] = torch.tensor(fields, dtype=torch.int64).to(device)
        tensors.kept["blocks"] = torch.tensor(blocks, dtype=torch.int32).reshape(-1, 2).to(device)
    launch_swap(tensors.kept["tensors"], tensors.kept["blocks"], low, high, num_rows)


def launch_swap(tensors: torch.Tensor, blocks: torch.Tensor, low: int, high: int, num_rows: int) -> None:
    """Launch the kernel once; its tables lie on the device."""
    # Not launched dependently, as in `launch`: steps before and after it read the rows.
    swap_rows_kernel[num_rows, len(blocks)](
        tensors,
        blocks,
        low,
        high,
        BLOCK_BYTES=_BLOCK_BYTES,
        num_warps=_NUM_WARPS,
        **triton_launch.launch_options(tensors.device, dependent=False),
    )


def _swap_fields(tensor: torch.Tensor) -> list[int]:
    """Address of row 0, bytes from one row to the next, bytes of a row, and whether all are multiples of 16 bytes."""
    size = tensor.element_size()
    fields = [tensor.data_ptr(), tensor.stride(0) * size, tensor.shape[1] * size]
    return [*fields, int(all(one % _WIDE_BYTES == 0 for one in fields))]


def _fields(piece: RowPiece, source: torch.Tensor | None) -> list[int]:
    """Addresses of the source and of row 0, which start, bytes from one start to the next and from one row to the next,
    bytes of a row, rows that have a source, and whether all of these are multiples of 16 bytes."""
    target, size = piece.target, piece.target.element_size()
    address = 0 if source is None else source.data_ptr()
    to_start = to_row = target.stride(0) * size
    row_bytes, num_held = target.shape[1] * size, piece.rank
    if target.stride(1) != 1:  # one row of elements that stand apart: each is a row of its own
        to_row, row_bytes, num_held = target.stride(1) * size, size, piece.rank * target.shape[1]
    is_wide = all(one % _WIDE_BYTES == 0 for one in (address, target.data_ptr(), to_start, to_row, row_bytes))
    return [address, target.data_ptr(), piece.start, to_start, to_row, row_bytes, num_held, int(is_wide)]


def _programs(pieces: Sequence[RowPiece], row_bytes: np.ndarray) -> np.ndarray:
    """int32 [programs, 3], from the bytes of a row of each piece."""
    num_bytes = np.array([one.length * one.target.shape[1] * one.target.element_size() for one in pieces])
    num_blocks = -(-row_bytes // _BLOCK_BYTES)
    counts = num_bytes // np.maximum(row_bytes, 1) * num_blocks
    piece = np.repeat(np.arange(len(pieces)), counts)
    within = np.arange(len(piece)) - np.repeat(counts.cumsum() - counts, counts)
    return np.stack((piece, *np.divmod(within, num_blocks[piece])), axis=1).astype(np.int32)


def warm_up(device: torch.device) -> None:
    """See `ops.warm_up`. Nothing of what is copied is an argument of the kernel."""
    pieces = torch.zeros(1, _NUM_FIELDS, dtype=torch.int64, device=device)  # rows of 0 bytes
    launch(pieces, torch.zeros(1, 3, dtype=torch.int32, device=device), (0,))
    tensors = torch.zeros(1, _NUM_SWAP_FIELDS, dtype=torch.int64, device=device)
    launch_swap(tensors, torch.zeros(1, 2, dtype=torch.int32, device=device), 0, 1, 1)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(scatter_rows_kernel, swap_rows_kernel)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)
