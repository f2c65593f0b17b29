"""Kernels that the gate must refuse: what works on a GPU and falls off a cliff on an NPU."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

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
def greedy_copy(x_ptr, h_ptr, M, K, BLOCK: tl.constexpr):
    """h = x, moved twice and with one row too many."""
    inputs = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), M + 1, tl.num_programs(0)):
        again = tl.load(x_ptr + row * K + inputs)
        tl.store(h_ptr + row * K + inputs, again)


@triton.jit
def huge_tile(x_ptr, h_ptr, BLOCK: tl.constexpr):
    """h = x, through tiles that do not fit the chip."""
    inputs = tl.arange(0, BLOCK)
    tl.store(h_ptr + inputs, tl.load(x_ptr + inputs) + 1.0)


def gather_case() -> Case:
    """The gathering shrink on data that it computes correctly."""

    def launch() -> Launch:
        x, a = torch.randn(20, 512).bfloat16(), torch.randn(16, 512).bfloat16()
        rows = torch.randperm(20, dtype=torch.int32)[:16]
        arguments = {
            "x_ptr": x, "a_ptr": a, "h_ptr": torch.full((16, 16), torch.nan), "rows_ptr": rows, "M": 16, "K": 512,
            "N": 16, "T": 16, "R": 16, "BLOCK": 64,
        }  # fmt: skip
        expected = x[rows.long()].float() @ a.float().t()
        minimum = 16 * 512 * 2 * 2 + 16 * 16 * 4
        return Launch(arguments, (1,), {"h_ptr": expected}, frozenset({"rows_ptr"}), 1, {}, minimum, (1e-3, 1e-3))

    return Case("gather_shrink", gather_shrink, {"16 tokens": launch})


def copy_case() -> Case:
    """The greedy copy: twice the bytes that its launch declares as the minimum."""

    def launch() -> Launch:
        # A row more than the kernel is told of, so that its extra row stays within the tensor.
        x = torch.randn(9, 256)
        arguments = {"x_ptr": x, "h_ptr": torch.zeros(9, 256), "M": 8, "K": 256, "BLOCK": 256}
        expected = torch.cat([x[:8], torch.zeros(1, 256)])
        return Launch(arguments, (2,), {"h_ptr": expected}, frozenset(), 8, {}, 8 * 256 * 4)

    return Case("greedy_copy", greedy_copy, {"8 rows": launch})


def huge_case() -> Case:
    """More on-chip memory than there is."""

    def launch() -> Launch:
        x = torch.randn(1 << 16)
        arguments = {"x_ptr": x, "h_ptr": torch.zeros(1 << 16), "BLOCK": 1 << 16}
        return Launch(arguments, (1,), {"h_ptr": x + 1}, frozenset(), 1)

    return Case("huge_tile", huge_tile, {"one tile": launch})
