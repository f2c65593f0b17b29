"""The side budget: what is named as enough for an adapter is enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.layout import Group
from adapters.row_plan import MAX_LINES, MAX_TABLES, non_lora_bytes_for, non_lora_unit_bytes, plan_non_lora, plan_rows
from tests.support.adapter_files import small_layout

SIZES = st.integers(1, 1 << 33)


def units(line_bytes: int, table_bytes: int) -> dict[Group, int]:
    return {"vectors": line_bytes, "norms": 0, "saved_embedding": table_bytes, "saved_head": 0}


@given(SIZES, SIZES, st.integers(0, MAX_LINES), st.integers(0, MAX_TABLES), st.integers(0, 1 << 33))
def test_a_budget_for_lines_and_tables_holds_them_and_so_does_each_larger_one(
    line_bytes: int, table_bytes: int, num_lines: int, num_tables: int, more_bytes: int
) -> None:
    num_bytes = non_lora_bytes_for(line_bytes, table_bytes, num_lines=num_lines, num_tables=num_tables)
    plan = plan_non_lora(units(line_bytes, table_bytes), num_bytes + more_bytes)
    assert plan["vectors"] >= num_lines
    assert plan["saved_head"] >= num_tables


@pytest.mark.parametrize(
    "rows", [{"vectors": 1}, {"norms": 1}, {"saved_head": 1}, {"vectors": 1, "saved_embedding": 1, "saved_head": 1}]
)
def test_a_refusal_names_a_budget_that_takes_the_adapter(rows: dict[str, int]) -> None:
    layout = small_layout()
    small = plan_rows(layout, 1 << 20, element_bytes=2, side_bytes=1)
    group = small.group_too_small(rows)
    assert group is not None
    words = small.refusal(group, rows).split()
    enough = plan_rows(layout, 1 << 20, element_bytes=2, side_bytes=int(words[words.index("--adapter-side-bytes") + 2]))
    assert enough.group_too_small(rows) is None


def test_lines_are_had_without_tables() -> None:
    of_layout = non_lora_unit_bytes(small_layout(), 2)
    line_bytes = of_layout["vectors"] + of_layout["norms"]
    table_bytes = of_layout["saved_embedding"] + of_layout["saved_head"]
    plan = plan_non_lora(of_layout, non_lora_bytes_for(line_bytes, table_bytes, num_lines=3))
    assert plan["vectors"] >= 3
