"""Rows of a load: the kernel writes what plain torch writes, byte by byte, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.row_scatter import ops, reference
from kernels.row_scatter.ops import MAX_STARTS, RowPiece, RowPieces, RowTensorSet

triton_cuda = pytest.importorskip("kernels.row_scatter.triton_cuda", reason="NOT RUN: Triton is not installed")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_ROWS = 80
# Shorter and longer than a program's block of 8192 bytes, at its end, and of a number of bytes that 16 does not divide.
WIDTHS = (1, 7, 24, 4096, 4104, 5003)


@dataclass
class Case:
    """The same pieces twice, of memory that nobody has written: `found` is the kernel's, `expected` the reference's."""

    found: RowPieces
    expected: RowPieces
    sources: tuple[torch.Tensor, ...]

    def check(self, starts: tuple[int, ...]) -> None:
        triton_cuda.scatter_rows(self.found, self.sources, starts)
        reference.scatter_rows(self.expected, self.sources, starts)
        for own, right in zip(self.found.pieces, self.expected.pieces, strict=True):
            assert torch.equal(bytes_of(own.target), bytes_of(right.target))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Equal where not a bit differs, of NaN too."""
    return tensor.contiguous().view(torch.uint8)


def make_case(
    targets: list[torch.Tensor], sizes: list[tuple[int, int]], which: list[int], *, has_table: bool = False
) -> Case:
    """sizes: rank and length of each; sources stand in one buffer, each at a multiple of 256 bytes, as in a slab."""
    if has_table:
        device = targets[0].device
        for dtype in (torch.int32, torch.float32):
            targets = [*targets, torch.full((11, 6), 7, dtype=dtype, device=device).t()]
        sizes, which = [*sizes, (1, 1), (1, 1)], [*which, max(which) + 1, max(which) + 1]
    pairs = zip(targets, sizes, which, strict=True)
    pieces = tuple(RowPiece(target, rank, length, start) for target, (rank, length), start in pairs)
    sources = sources_of(pieces)
    copies = tuple(RowPiece(_same(one.target), one.rank, one.length, one.start) for one in pieces)
    return Case(RowPieces(pieces), RowPieces(copies), sources)


def _same(target: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device).copy_(target)


def sources_of(pieces: tuple[RowPiece, ...]) -> tuple[torch.Tensor, ...]:
    held, ends = [one for one in pieces if one.rank], [0]
    for one in held:
        num_bytes = one.rank * one.target.shape[1] * one.target.element_size()
        ends.append(-(-(ends[-1] + num_bytes) // 256) * 256)
    buffer = torch.zeros(ends[-1], dtype=torch.uint8)
    # Numbers: of a NaN in a half the reference's copy on a GPU, which goes through float32, keeps no more than that.
    for one, start in zip(held, ends[:-1], strict=True):
        numbers = (torch.randn(one.rank * one.target.shape[1]) * 1000).to(one.target.dtype).view(torch.uint8)
        buffer[start : start + len(numbers)] = numbers
    buffer = buffer.to(pieces[0].target.device)
    return tuple(
        buffer[start : start + one.rank * one.target.shape[1] * one.target.element_size()]
        .view(one.target.dtype)
        .view(one.rank, -1)
        for one, start in zip(held, ends[:-1], strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("width", WIDTHS)
def test_ranks_are_copied_and_the_rest_of_the_range_is_zeroed(device: str, dtype: torch.dtype, width: int) -> None:
    """Two groups whose ranges begin elsewhere, one slice without a rank, and a column of either table."""
    targets = [torch.empty(NUM_ROWS, width, dtype=dtype, device=device) for _ in range(4)]
    case = make_case(targets, [(16, 16), (5, 16), (0, 4), (17, 32)], [0, 0, 0, 1], has_table=True)
    case.check((16, 32, 3))


@pytest.mark.parametrize("num_slices", [2, 3])
@pytest.mark.parametrize("width", [24, 5003])
def test_rows_behind_a_base_weight_stand_apart(device: str, num_slices: int, width: int) -> None:
    """Rows of A interleaved by slice, in memory whose first rows are the weight's."""
    weight = torch.empty(9 + NUM_ROWS * num_slices, width, dtype=torch.bfloat16, device=device)
    targets = [weight[9 + at :: num_slices] for at in range(num_slices)]
    case = make_case(targets, [(16, 16), (3, 16), (0, 16)][:num_slices], [0] * num_slices)
    before = bytes_of(weight[:9]).clone()
    case.check((48,))
    assert torch.equal(bytes_of(weight[:9]), before)


def test_one_set_of_tables_serves_all_loads_from_one_buffer(device: str) -> None:
    """Other contents of the buffer, and other rows: nothing is derived anew."""
    targets = [torch.empty(NUM_ROWS, 40, dtype=torch.bfloat16, device=device) for _ in range(2)]
    case = make_case(targets, [(8, 16), (16, 16)], [0, 1])
    triton_cuda.prepare(case.found, case.sources)
    kept = case.found.kept["tables"]
    for starts in ((0, 64), (64, 0), (16, 16)):
        for source in case.sources:
            source.copy_(torch.randn(source.shape))
        case.check(starts)
    assert case.found.kept["tables"] is kept


def test_other_sources_are_seen(device: str) -> None:
    """Of a host that is its own device, where each adapter has memory of its own."""
    case = make_case([torch.empty(NUM_ROWS, 40, device=device)], [(8, 16)], [0])
    case.check((0,))
    case.sources = sources_of(case.found.pieces)
    case.check((16,))


def test_all_starts_are_told_apart(device: str) -> None:
    targets = [torch.empty(NUM_ROWS, 8, device=device) for _ in range(MAX_STARTS)]
    make_case(targets, [(2, 4)] * MAX_STARTS, list(range(MAX_STARTS))).check((1, 70, 5, 12, 33, 50))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("low", "high", "num_rows"), [(0, 16, 16), (3, 60, 20), (7, 79, 1)])
def test_rows_change_places(device: str, dtype: torch.dtype, width: int, low: int, high: int, num_rows: int) -> None:
    """Of rows that stand apart and of rows that do not; those that are not meant keep every bit."""
    behind = torch.randn(9 + NUM_ROWS * 3, width, device=device).to(dtype)
    alone = torch.arange(NUM_ROWS, device=device)[:, None].expand(-1, width).to(dtype)  # no two rows are alike
    found, expected = (
        RowTensorSet((*(copy[9 + at :: 3] for at in range(3)), alone.clone()))
        for copy in (behind.clone(), behind.clone())
    )
    for is_second in (False, True):
        triton_cuda.swap_rows(found, low, high, num_rows)
        reference.swap_rows(expected, low, high, num_rows)
        for own, right in zip(found.tensors, expected.tensors, strict=True):
            assert torch.equal(bytes_of(own), bytes_of(right))
        assert torch.equal(bytes_of(found.tensors[3]), bytes_of(alone)) is is_second


@pytest.mark.parametrize(("low", "high", "num_rows"), [(0, 15, 16), (16, 0, 16), (-1, 20, 2), (0, 4, 0)])
def test_a_swap_of_ranges_with_common_rows_is_refused(low: int, high: int, num_rows: int) -> None:
    with pytest.raises(AssertionError, match="no row in common"):
        ops.swap_rows(RowTensorSet((torch.zeros(40, 4),)), low, high, num_rows)


def test_warm_up_compiles_all_that_calls_need(device: str) -> None:
    triton_cuda.CONTRACT.warm_up(torch.device(device))
    before = triton_cuda.compiled_count()
    for width, starts in ((24, (0, 1)), (5003, (16, 32)), (1, (1, 7))):
        targets = [torch.empty(NUM_ROWS, width, dtype=torch.bfloat16, device=device) for _ in range(2)]
        make_case(targets, [(16, 16), (3, 16)], [0, 1]).check(starts)
        triton_cuda.swap_rows(RowTensorSet(tuple(targets)), *starts, 1)
    assert triton_cuda.compiled_count() == before


@pytest.mark.parametrize(
    ("source", "length", "sentence"),
    [
        (torch.zeros(2, 5), 4, "rank, width"),
        (torch.zeros(4, 2).t(), 4, "contiguous"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), 4, "dtype"),
        (torch.zeros(2, 4), 1, "a piece of rows"),
    ],
)
def test_what_does_not_belong_together_is_refused(source: torch.Tensor, length: int, sentence: str) -> None:
    pieces = RowPieces((RowPiece(torch.zeros(8, 4), 2, length, 0),))
    with pytest.raises(AssertionError, match=sentence):
        ops.prepare(pieces, (source,))
