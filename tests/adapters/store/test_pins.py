"""Pinned names: how many rows they may take, and that they survive restarts and moves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.errors import Conflict, NotFound
from adapters.files.name_versions import Change
from adapters.row_plan import RowPlan, plan_rows, row_bytes
from adapters.store.catalog import Pinned, refuse_excess
from adapters.store.name_index import Query
from adapters.store.store import AdapterStore, StoreLimits
from tests.support.adapter_files import put_version, small_layout, upload_small

LAYOUT = small_layout()


def plan_of(num_rows: int) -> RowPlan:
    """So many rows in each group of a layer, which `upload_small` takes one of for each of its rank."""
    budget_bytes = int(sum(row_bytes(LAYOUT, 4).values()) * num_rows * 1.5)
    plan = plan_rows(LAYOUT, budget_bytes, element_bytes=4, alignment=1)
    return RowPlan(dict.fromkeys(plan.rows, num_rows), plan.row_bytes, plan.num_places, 1, plan.table_bytes)


def opened(root: Path, num_rows: int = 20) -> AdapterStore:
    store = AdapterStore(root, LAYOUT, StoreLimits(free_disk_floor_bytes=0), base_name="base")
    store.row_plan = plan_of(num_rows)
    return store


def listed(store: AdapterStore) -> list[str]:
    assert [row.name for row in store.page(Query(100, is_pinned=False)) if row.is_pinned] == []
    return [row.name for row in store.page(Query(100, is_pinned=True)) if row.is_pinned]


def test_a_pin_follows_the_name_survives_a_restart_and_goes_with_the_name(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first, _ = upload_small(store, LAYOUT, "x", seed=1)
    upload_small(store, LAYOUT, "other", seed=2)
    assert store.pins().digests == ()
    store.set_pinned("x", True)
    store.set_pinned("x", True)
    assert (store.pins().digests, listed(store), store.get("x").is_pinned) == ((first.digest,), ["x"], True)
    store.close()
    store = opened(tmp_path)
    assert (store.pins().digests, listed(store)) == ((first.digest,), ["x"])
    second, _ = put_version(store, LAYOUT, "x", 3)
    assert store.pins().digests == (second.digest,)
    store.change_settings("x", Change(visibility="private"))
    store.rollback("x")
    assert store.pins().digests == (first.digest,)
    store.check_integrity()
    store.delete("x")
    upload_small(store, LAYOUT, "x", seed=1)
    assert (store.pins().digests, listed(store)) == ((), [])
    store.set_pinned("x", True)
    store.set_pinned("x", False)
    assert (store.pins().digests, listed(store)) == ((), [])
    store.check_integrity()
    with pytest.raises(NotFound):
        store.set_pinned("nobody", True)
    store.close()


def test_half_of_the_rows_may_be_pinned_and_a_content_counts_once(tmp_path: Path) -> None:
    store = opened(tmp_path, num_rows=17)
    for name, rank, seed in (("a", 4, 1), ("same", 4, 1), ("b", 4, 2), ("c", 1, 3), ("large", 9, 4)):
        upload_small(store, LAYOUT, name, rank=rank, seed=seed)
    for name in ("a", "same", "b"):
        store.set_pinned(name, True)
    assert len(store.pins().digests) == 2
    with pytest.raises(Conflict, match=r"9 attention rows .* of which 8 may be pinned; unpin others"):
        store.set_pinned("c", True)
    store.set_pinned("a", False)
    with pytest.raises(Conflict):  # `same` is still there
        store.set_pinned("c", True)
    store.set_pinned("b", False)
    store.set_pinned("c", True)
    store.set_pinned("same", False)
    with pytest.raises(Conflict):
        store.set_pinned("large", True)
    assert listed(store) == ["c"]
    store.check_integrity()
    store.close()


def test_pins_for_which_rows_have_become_too_few_are_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    records = {name: upload_small(store, LAYOUT, name, rank=4, seed=at)[0] for at, name in enumerate("ab")}
    for name in records:
        store.set_pinned(name, True)
    store.close()
    store = opened(tmp_path, num_rows=10)
    assert (store.pins().digests, store.pins().left_out) == ((records["a"].digest,), {"b"})
    store.set_pinned("a", False)
    assert (store.pins().digests, store.pins().left_out) == ((records["b"].digest,), set())
    put_version(store, LAYOUT, "b", 5)  # a name moves, whatever it takes
    store.close()


def test_a_name_s_file_from_before_there_were_pins_is_not_pinned(tmp_path: Path) -> None:
    store = opened(tmp_path)
    record, _ = upload_small(store, LAYOUT, "x")
    path = store.path_of(record.digest).parent.parent / "names" / "x"
    store.close()
    fields = json.loads(path.read_bytes())
    assert fields.pop("is_pinned") is False
    path.write_text(json.dumps(fields))
    store = opened(tmp_path)
    assert listed(store) == []
    store.check_integrity()
    store.close()


def test_a_pin_that_takes_too_much_of_the_side_budget_says_which_budget() -> None:
    plan = plan_rows(LAYOUT, 1 << 20, element_bytes=4, side_bytes=1 << 20)
    few = replace(plan, rows=plan.rows | {"saved_head": 3})
    heads = [Pinned(name, name * 64, {"attention": 4, "saved_head": 1}) for name in ("a", "b")]
    refuse_excess(heads[:1], few)
    with pytest.raises(
        Conflict, match=r"3 adapters with a whole head, of which 1 may be pinned, .* 2; .* --adapter-side-bytes"
    ):
        refuse_excess(heads, few)
