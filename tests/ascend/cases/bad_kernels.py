"""Kernels that the gate must refuse, each for one rule, and one that it must let pass: see `pytest --gate-cases`."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from tests.ascend.gate.cases import Case, Launch


@triton.jit
def gather_shrink(
    x_ptr, a_ptr, h_ptr, rows_ptr, M, K, N: tl.constexpr, T: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr
):
    """h[m] = x[rows[m]] @ a.T as the kernel that the project grew from does it: rows gathered, columns wrapped."""
    offsets = tl.arange(0, T)
    rows = tl.load(rows_ptr + offsets % M)
    columns = tl.arange(0, R) % N
    inputs = tl.arange(0, BLOCK)
    x_tile = x_ptr + rows[:, None] * K + inputs[None, :]
    a_tile = a_ptr + inputs[:, None] + columns[None, :] * K
    h = tl.zeros((T, R), dtype=tl.float32)
    for _ in range(0, K, BLOCK):
        h += tl.dot(tl.load(x_tile), tl.load(a_tile))
        x_tile += BLOCK
        a_tile += BLOCK
    tl.store(
        h_ptr + offsets[:, None] * N + tl.arange(0, R)[None, :],
        h,
        mask=(offsets < M)[:, None] & (tl.arange(0, R) < N)[None, :],
    )


@triton.jit
def transposed_dot(x_ptr, a_ptr, h_ptr, a_stride, K: tl.constexpr, R: tl.constexpr):
    """h = x @ a.T with a transposed by its pointers: no loop to be seen, the library copies it element by element."""
    rows = tl.arange(0, R)
    inputs = tl.arange(0, K)
    x = tl.load(x_ptr + rows[:, None] * K + inputs[None, :])
    a = tl.load(a_ptr + inputs[:, None] + rows[None, :] * a_stride)
    tl.store(h_ptr + rows[:, None] * R + rows[None, :], tl.dot(x, a))


@triton.jit
def scatter(x_ptr, h_ptr, order_ptr, BLOCK: tl.constexpr):
    """h[order] = x, element by element."""
    inputs = tl.arange(0, BLOCK)
    tl.store(h_ptr + tl.load(order_ptr + inputs), tl.load(x_ptr + inputs))


@triton.jit(do_not_specialize=["M", "REPEATS", "EXTRA", "map_ptr"])
def copy_rows(x_ptr, h_ptr, map_ptr, M, REPEATS, EXTRA, NUM_MAPS: tl.constexpr, BLOCK: tl.constexpr):
    """h = x, REPEATS times over, EXTRA rows too far, after reading NUM_MAPS zeros for each row."""
    inputs = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), M + EXTRA, tl.num_programs(0)):
        offset = row * BLOCK
        for i in tl.static_range(NUM_MAPS):
            offset += tl.load(map_ptr + row * NUM_MAPS + i)
        for _ in range(REPEATS):
            tl.store(h_ptr + offset + inputs, tl.load(x_ptr + offset + inputs))


@triton.jit
def write_back(x_ptr, h_ptr, M, BLOCK: tl.constexpr):
    """h[row] += x[row]; writes the rest of the tile back as it was, which other programs may have changed meanwhile."""
    inputs = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        tile = h_ptr + tl.arange(0, 2)[:, None] * BLOCK + inputs[None, :] + row * BLOCK
        added = tl.load(x_ptr + row * BLOCK + inputs)[None, :]
        tl.store(tile, tl.load(tile) + tl.where(tl.arange(0, 2)[:, None] == 0, added, 0.0))


@triton.jit
def running_sum(x_ptr, h_ptr, BLOCK: tl.constexpr):
    """h[row + 1] = h[row] + x[row], right if programs run in order only."""
    inputs = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    before = tl.load(h_ptr + row * BLOCK + inputs)
    tl.store(h_ptr + (row + 1) * BLOCK + inputs, before + tl.load(x_ptr + row * BLOCK + inputs))


@triton.jit
def huge_tile(x_ptr, h_ptr, BLOCK: tl.constexpr):
    """h = x, through tiles that do not fit the chip."""
    inputs = tl.arange(0, BLOCK)
    tl.store(h_ptr + inputs, tl.load(x_ptr + inputs) + 1.0)


def _gather() -> Launch:
    x, a = torch.randn(20, 512).bfloat16(), torch.randn(16, 512).bfloat16()
    rows = torch.randperm(20, dtype=torch.int32)[:16]
    arguments = {
        "x_ptr": x, "a_ptr": a, "h_ptr": torch.full((16, 16), torch.nan), "rows_ptr": rows, "M": 16, "K": 512,
        "N": 16, "T": 16, "R": 16, "BLOCK": 64,
    }  # fmt: skip
    expected = x[rows.long()].float() @ a.float().t()
    return Launch(arguments, (1,), {"h_ptr": expected}, frozenset({"rows_ptr"}), tolerance=(1e-3, 1e-3))


def _transposed() -> Launch:
    x, a = torch.randn(16, 128).bfloat16(), torch.randn(16, 128).bfloat16()
    arguments = {"x_ptr": x, "a_ptr": a, "h_ptr": torch.full((16, 16), torch.nan), "a_stride": 128, "K": 128, "R": 16}
    expected = x.float() @ a.float().t()
    return Launch(arguments, (1,), {"h_ptr": expected}, frozenset(), tolerance=(1e-3, 1e-3))


def _scatter() -> Launch:
    x, order = torch.randn(256), torch.randperm(256, dtype=torch.int32)
    arguments = {"x_ptr": x, "h_ptr": torch.full((256,), torch.nan), "order_ptr": order, "BLOCK": 256}
    return Launch(arguments, (1,), {"h_ptr": torch.empty(256).index_copy(0, order.long(), x)}, frozenset())


def _copy(repeats: int = 1, extra: int = 0, num_maps: int = 1) -> Launch:
    # A row more than the kernel is told of, so that an extra row stays within the tensor.
    x = torch.randn(9, 256)
    maps = torch.zeros(9, num_maps, dtype=torch.int32)
    arguments = {
        "x_ptr": x, "h_ptr": torch.zeros(9, 256), "map_ptr": maps, "M": 8, "REPEATS": repeats, "EXTRA": extra,
        "NUM_MAPS": num_maps, "BLOCK": 256,
    }  # fmt: skip
    expected = torch.cat([x[:8], torch.zeros(1, 256)])
    return Launch(arguments, (2,), {"h_ptr": expected}, frozenset({"map_ptr"}), minimum_bytes=2 * 8 * 256 * 4)


def shorter(launch: Launch) -> Launch:
    """A launch whose x ends before the kernel does."""
    return replace(launch, arguments=dict(launch.arguments) | {"x_ptr": launch.tensor("x_ptr")[:7].clone()})


def _write_back() -> Launch:
    x, h = torch.randn(4, 256), torch.randn(5, 256)
    arguments = {"x_ptr": x, "h_ptr": h, "M": 4, "BLOCK": 256}
    return Launch(arguments, (2,), {"h_ptr": torch.cat([h[:4] + x, h[4:]])}, frozenset())


def _running_sum() -> Launch:
    x, h = torch.randn(4, 256), torch.zeros(5, 256)
    arguments = {"x_ptr": x, "h_ptr": h, "BLOCK": 256}
    return Launch(arguments, (4,), {"h_ptr": torch.cat([h[:1], x.cumsum(0)])}, frozenset())


def _huge() -> Launch:
    x = torch.randn(1 << 16)
    arguments = {"x_ptr": x, "h_ptr": torch.zeros(1 << 16), "BLOCK": 1 << 16}
    return Launch(arguments, (1,), {"h_ptr": x + 1}, frozenset())


MAX_US = {"launch": 1.0}


@dataclass(frozen=True)
class Bad:
    """A case, and what each gate test that must refuse it says; it passes the others."""

    case: Case
    refused: dict[str, str]


def _bad(
    name: str,
    kernel: Any,
    launch: Callable[[], Launch],
    refused: dict[str, str],
    crashes: str = "",
    max_us: Mapping[str, float] = MAX_US,
) -> Bad:
    return Bad(Case(name, kernel, {"launch": launch}, crashes=crashes, max_us=max_us), refused)


_COMPILES, _950 = "test_compiles_within_the_chip", "test_compiles_for_ascend950"
_ASSERTION = "an assertion of the compiler fails: PatternMatch.cpp:135, wrong number of replacement values"
_LOWERED, _FINAL = "test_lowered_code_computes_the_reference", "test_final_code_moves_little_and_is_right"

GOOD = Case("good_copy", copy_rows, {"launch": _copy}, max_us=MAX_US)
BAD = [
    _bad("gather", gather_shrink, _gather, {_COMPILES: "inside inner loops", _FINAL: "which are no maps"}, _ASSERTION),
    _bad("transposed", transposed_dot, _transposed, {_FINAL: "elements one by one"}, _ASSERTION),
    # Its single elements take their time, which is not judged where traffic is not.
    _bad("scatter", scatter, _scatter, {_COMPILES: "scalar stores"}, max_us={}),
    _bad("nine_maps", copy_rows, lambda: _copy(num_maps=9), {_FINAL: "9 scalar loads for one work item"}),
    _bad("twice", copy_rows, lambda: _copy(repeats=2), {_FINAL: "2.00 x the minimum"}),
    _bad("transfers", copy_rows, lambda: replace(_copy(), max_transfers=15), {_FINAL: "16 transfers; 15 are allowed"}),
    # Two cores, each with four rows of 1 KB (`test_timing.py`).
    _bad("slow", copy_rows, _copy, {_FINAL: "us by estimate; 0.5 are allowed"}, max_us={"launch": 0.5}),
    _bad("untimed", copy_rows, _copy, {_FINAL: "no bound in the case's max_us"}, max_us={}),
    _bad("row_too_far", copy_rows, lambda: _copy(extra=1), {_LOWERED: "h_ptr", _FINAL: "h_ptr"}),
    _bad("out_of_bounds", copy_rows, lambda: shorter(_copy()), {_LOWERED: "h_ptr", _FINAL: "out of bounds"}),
    # Programs one after another, as they run here, get the values right: in any order, and in one order.
    _bad("write_back", write_back, _write_back, {_FINAL: "a race"}),
    _bad("running_sum", running_sum, _running_sum, {_LOWERED: "h_ptr", _FINAL: "a race"}),
    _bad("huge", huge_tile, _huge, dict.fromkeys([_COMPILES, _950, _LOWERED, _FINAL], "overflow, requires")),
]
CASES = [GOOD, *(bad.case for bad in BAD)]
