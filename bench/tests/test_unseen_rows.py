"""Rows that the benchmark of LoRA draws, and the products that it compares them with."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.kernels.lora import ROWS, make_maps, make_set
from bench.kernels.lora_unseen import HARD_ROWS, NUM_UNSEEN, grouped_by_adapter, unseen_rows
from kernels.lora import reference


def test_a_seed_draws_the_same_rows_everywhere_and_none_that_was_tuned_on() -> None:
    rows = unseen_rows(7)
    assert rows == unseen_rows(7) != unseen_rows(8)
    assert len({row.name for row in rows}) == NUM_UNSEEN
    assert any(row.is_prefill and row.num_adapters == 1 for row in HARD_ROWS)
    assert not {replace(row, name="", peer_microseconds=None) for row in (*rows, *HARD_ROWS)} & {
        replace(row, name="", peer_microseconds=None) for row in ROWS
    }
    assert sum(row.is_prefill for row in rows) == NUM_UNSEEN // 2


def test_products_by_adapter_are_the_op() -> None:
    torch.manual_seed(0)
    row = replace(unseen_rows(7)[0], in_features=48, widths=(32, 16), rank=8, num_tokens=20, num_adapters=3)
    x, out, stack = make_set(row, "cpu")
    maps = make_maps(row, "cpu")
    stack = replace(stack, a=tuple(a.double() for a in stack.a), b=tuple(b.double() for b in stack.b))
    expected, found = out.double(), out.double()
    reference.lora_linear(x.double(), expected, stack, maps)
    grouped_by_adapter(x.double(), found, stack, maps)
    assert not torch.equal(expected, out.double())
    torch.testing.assert_close(found, expected)
