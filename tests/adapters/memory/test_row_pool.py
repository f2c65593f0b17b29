"""The row pool: nothing that fits beside the adapters in use is refused, and what is resident is what was loaded."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from adapters.errors import RowsExceeded
from adapters.layout import BaseLayout, ProjectionSpec, Slice
from adapters.memory.row_pool import RowPool
from adapters.memory.row_ranges import RangeAllocator
from adapters.memory.slab import HostAdapter, pack
from adapters.row_plan import plan_rows
from kernels.platform import detect
from tests.support.adapter_files import small_layout

PIECES = {"attention": ("q", "k"), "mlp": ("down",)}


def churn_layout() -> BaseLayout:
    """Two groups of one layer, narrow: the churn is about rows."""
    projections = (
        ProjectionSpec("qk", 0, "attention", "linear", 2, (Slice("q", 2), Slice("k", 1))),
        ProjectionSpec("down", 0, "mlp", "linear", 1, (Slice("down", 2),)),
    )
    return BaseLayout("churn", 1, "model.layers.", projections)


def budget_for(layout: BaseLayout, rows: int, alignment: int) -> int:
    """The smallest budget that gives every layer group `rows` rows."""
    budget = next(b for b in range(0, 1 << 22, 64) if _layer_rows(layout, b, alignment) >= rows)
    assert _layer_rows(layout, budget, alignment) == rows
    return budget


def _layer_rows(layout: BaseLayout, budget: int, alignment: int) -> int:
    rows = plan_rows(layout, budget, element_bytes=4, alignment=alignment).rows
    return min(rows[group] for group in rows if group != "embeddings")


def make_host_adapter(
    layout: BaseLayout, digest: str, ranks: dict[str, int], generator: torch.Generator | None = None
) -> HostAdapter:
    """Random rows; `ranks` by module path."""
    generator = generator or torch.Generator().manual_seed(hash(digest) % 2**31)
    weights = {}
    for projection in layout.projections:
        for piece in projection.slices:
            rank = ranks.get(piece.module, 0)
            if rank:
                a = torch.randn(rank, projection.in_features, generator=generator)
                b = torch.randn(rank, piece.out_features, generator=generator)
                weights[piece.module] = (a, b, rank / 7)
    return pack(layout, digest, weights, torch.float32)


def assert_holds(pool: RowPool, layout: BaseLayout, adapter: HostAdapter) -> None:
    """The device rows and tables are exactly the adapter's, with zeros past every rank."""
    place = pool.place_of(adapter.digest)
    assert place is not None
    for projection in layout.projections:
        stack = pool.stack(projection.name)
        first = pool.first_rows(place)[stack.group]
        length = pool.plan.aligned(adapter.rows.get(projection.group, 0))
        assert (first >= 0) == (length > 0)
        for index, piece in enumerate(projection.slices):
            held = adapter.slices.get(piece.module)
            rank = held.rank if held else 0
            scaling = torch.tensor(held.scaling if held else 0.0)
            assert stack.ranks[index, place] == stack.host_ranks[index][place] == rank
            assert stack.scalings[index, place] == scaling
            assert torch.tensor(stack.host_scalings[index][place]) == scaling
            for rows, wanted in ((stack.a[index], held and held.a), (stack.b[index], held and held.b)):
                if rank:
                    assert torch.equal(rows[first : first + rank], wanted)
                assert (rows[first + rank : first + length] == 0).all() if length else True


@dataclass
class Churn:
    """A pool, a population of adapters, and what the test knows to be pinned."""

    pool: RowPool
    population: dict[str, HostAdapter]
    pins: dict[str, int]

    def in_use(self, group: str) -> int:
        return sum(self.pool.plan.aligned(self.population[d].rows.get(group, 0)) for d, n in self.pins.items() if n)

    def must_fit(self, adapter: HostAdapter) -> bool:
        """By counting alone: the rows in use and the new ones together are no more than there are."""
        return self.pins.get(adapter.digest, 0) > 0 or all(
            self.in_use(group) + self.pool.plan.aligned(rank) <= self.pool.plan.rows[group]
            for group, rank in adapter.rows.items()
        )


@pytest.mark.parametrize("alignment", [1, 16])
def test_churn_never_refuses_what_fits_beside_the_adapters_in_use(alignment: int) -> None:
    layout, chooser = churn_layout(), random.Random(alignment)
    pool = RowPool(layout, budget_for(layout, 1024, alignment), alignment=alignment)
    population = {}
    for index in range(150):
        groups = chooser.choice((("attention",), ("mlp",), ("attention", "mlp")))
        ranks = {piece: chooser.randint(4, 256) for group in groups for piece in PIECES[group]}
        population[f"d{index}"] = make_host_adapter(layout, f"d{index}", ranks)
    churn = Churn(pool, population, {})
    num_refused = 0
    for step in range(10_000):
        num_refused += not _one_operation(churn, chooser, layout, verify_all=step % 200 == 0)
        pool.check_integrity()
    usage = pool.usage()
    # The churn was hard: everything that the pool can do did happen.
    assert num_refused > 100
    assert usage.num_moves > 100
    assert usage.num_evictions > 100


def _one_operation(churn: Churn, chooser: random.Random, layout: BaseLayout, *, verify_all: bool) -> bool:
    """False when a load was refused, which the oracle agreed to."""
    pool = churn.pool
    digest = chooser.choice(list(churn.population))
    adapter = churn.population[digest]
    action = chooser.random()
    if action < 0.7:
        before, free_before = set(pool.resident()), _free(pool)
        fits = pool.load(digest, adapter) is not None
        assert fits == (digest in before or churn.must_fit(adapter)), (digest, adapter.rows, churn.pins)
        assert {d for d, n in churn.pins.items() if n} <= set(pool.resident())
        if not fits:
            assert set(pool.resident()) == before
            return False
        if digest not in before:
            assert_holds(pool, layout, adapter)
            enough = all(free_before[g] >= pool.plan.aligned(rank) for g, rank in adapter.rows.items())
            if enough and not any(churn.pins.values()):
                assert before <= set(pool.resident()), "evicted although only fragmentation was in the way"
        if chooser.random() < 0.4:
            pool.pin(digest)
            churn.pins[digest] = churn.pins.get(digest, 0) + 1
    elif action < 0.95:
        pinned = [d for d, n in churn.pins.items() if n]
        if pinned:
            chosen = chooser.choice(pinned)
            pool.unpin(chosen)
            churn.pins[chosen] -= 1
    elif not churn.pins.get(digest, 0):
        pool.drop(digest)
        assert pool.place_of(digest) is None
    if verify_all:
        for resident in pool.resident():
            assert_holds(pool, layout, churn.population[resident])
    return True


def _free(pool: RowPool) -> dict[str, int]:
    used = pool.allocation.rows_used()
    return {group: pool.plan.rows[group] - used[group] for group in used}


def test_equal_adapters_leave_in_order_of_last_use() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    for name in "abcd":
        assert pool.load(name, make_host_adapter(layout, name, {"q": 16}))
    pool.load("a", make_host_adapter(layout, "a", {"q": 16}))
    assert pool.resident() == ("b", "c", "d", "a")
    assert pool.load("e", make_host_adapter(layout, "e", {"q": 16}))
    assert pool.resident() == ("c", "d", "a", "e")
    assert pool.usage().num_evictions == 1


def test_a_large_adapter_that_was_not_used_for_longest_leaves_before_small_ones() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    for name, rank in (("large", 32), ("small", 16), ("newest", 16)):
        assert pool.load(name, make_host_adapter(layout, name, {"q": rank}))
    assert pool.load("a", make_host_adapter(layout, "a", {"q": 16}))
    assert pool.resident() == ("small", "newest", "a")


def test_a_wide_gap_costs_the_neighbours_that_were_not_used_for_longest() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    for name in "abcd":
        assert pool.load(name, make_host_adapter(layout, name, {"q": 16}))
    for name in "bcad":  # of the neighbours ab, bc and cd, bc were last used before the others
        pool.load(name, make_host_adapter(layout, name, {"q": 16}))
    assert pool.load("wide", make_host_adapter(layout, "wide", {"q": 32}))
    assert pool.resident() == ("a", "d", "wide")


def test_idle_ranges_slide_together_before_anything_is_evicted() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    adapters = {name: make_host_adapter(layout, name, {"q": 16, "k": 3}) for name in "abcd"}
    for name, adapter in adapters.items():
        pool.load(name, adapter)
    pool.drop("a")
    pool.drop("c")
    wide = make_host_adapter(layout, "wide", {"q": 20, "k": 32})
    assert pool.load("wide", wide)
    assert set(pool.resident()) == {"b", "d", "wide"}
    assert pool.usage().num_evictions == 0
    for adapter in (adapters["b"], adapters["d"], wide):
        assert_holds(pool, layout, adapter)


def test_pinned_ranges_stay_where_they_are_while_idle_ones_can_make_room() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    adapters = {name: make_host_adapter(layout, name, {"q": 16}) for name in "abcd"}
    for name, adapter in adapters.items():
        pool.load(name, adapter)
    pool.pin("b")
    before = pool.first_rows(pool.place_of("b"))
    pool.drop("a")
    pool.drop("c")  # free: 0-16 and 32-48, with b between them and idle d at the end
    assert pool.load("wide", make_host_adapter(layout, "wide", {"q": 32}))
    assert pool.first_rows(pool.place_of("b")) == before
    assert set(pool.resident()) == {"b", "wide"}


def test_pinned_ranges_in_the_way_slide_as_a_last_resort_and_keep_their_places() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    adapters = {name: make_host_adapter(layout, name, {"q": 16}) for name in "abcd"}
    for name, adapter in adapters.items():
        pool.load(name, adapter)
        pool.pin(name)
    places = {name: pool.place_of(name) for name in "bd"}
    for name in "ac":
        pool.unpin(name)
        pool.drop(name)
    wide = make_host_adapter(layout, "wide", {"q": 32})
    assert pool.load("wide", wide)
    assert {name: pool.place_of(name) for name in "bd"} == places
    for adapter in (adapters["b"], adapters["d"], wide):
        assert_holds(pool, layout, adapter)
    assert not pool.load("more", make_host_adapter(layout, "more", {"q": 33}))
    assert set(pool.resident()) == {"b", "d", "wide"}


def test_without_evictions_only_free_rows_are_taken_sliding_idle_ranges_at_most() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    adapters = {name: make_host_adapter(layout, name, {"q": 16}) for name in "abcd"}
    for name, adapter in adapters.items():
        assert pool.load(name, adapter, may_evict=False)
    wide = make_host_adapter(layout, "wide", {"q": 32, "down": 16})
    assert not pool.load("wide", wide, may_evict=False)
    assert set(pool.resident()) == set("abcd")
    pool.drop("a")
    pool.drop("c")  # free: 0-16 and 32-48, with b between them
    pool.pin("b")
    pool.pin("d")
    assert not pool.load("wide", wide, may_evict=False), "it moved rows in use"
    assert pool.usage().num_moves == 0
    pool.unpin("b")
    assert pool.load("wide", wide, may_evict=False)
    assert set(pool.resident()) == {"b", "d", "wide"}
    assert not pool.load("e", make_host_adapter(layout, "e", {"q": 1}), may_evict=False)
    assert (pool.usage().num_moves, pool.usage().num_evictions) == (1, 0)
    pool.check_integrity()
    for adapter in (adapters["b"], adapters["d"], wide):
        assert_holds(pool, layout, adapter)


def test_what_fits_beside_some_is_told_by_group_whoever_else_is_in_use() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    for name, ranks in (("a", {"q": 32}), ("b", {"q": 3, "down": 48}), ("c", {"q": 16})):
        assert pool.load(name, make_host_adapter(layout, name, ranks))
        pool.pin(name)
    adapter = make_host_adapter(layout, "d", {"k": 20, "down": 16})  # 32 rows and 16
    assert not pool.load("d", adapter)
    assert not pool.has_room(adapter.rows)
    assert pool.fits_beside(adapter.rows, ())
    assert pool.fits_beside(adapter.rows, ("a",))
    assert pool.fits_beside(adapter.rows, ("b", "c"))
    assert not pool.fits_beside(adapter.rows, ("a", "b"))
    assert not pool.fits_beside(make_host_adapter(layout, "e", {"down": 17}).rows, ("b",))
    pool.unpin("a")
    assert pool.has_room(adapter.rows)


def test_a_full_pool_is_not_searched_for_rows_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is quadratic in the residents, and each upload would make it."""
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    for name in "abcd":
        assert pool.load(name, make_host_adapter(layout, name, {"q": 16}))
    monkeypatch.setattr(RangeAllocator, "moves_for", None)
    assert not pool.load("e", make_host_adapter(layout, "e", {"q": 16}), may_evict=False)


def test_an_adapter_takes_rows_only_in_the_groups_it_targets() -> None:
    layout = small_layout()
    pool = RowPool(layout, 200_000, alignment=4)
    adapter = make_host_adapter(layout, "x", {"model.layers.1.mlp.down_proj": 5, "lm_head": 3})
    assert pool.load("x", adapter)
    rows = dict(zip(layout.groups, pool.first_rows(pool.place_of("x")), strict=True))
    assert rows["attention"] == rows["operator"] == -1
    assert rows["mlp"] >= 0
    assert rows["embeddings"] >= 0
    assert pool.usage().rows_used == 8 + 4
    assert_holds(pool, layout, adapter)


def test_what_can_never_fit_is_refused_with_both_sizes() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    with pytest.raises(RowsExceeded, match=r"80 attention rows.*holds 64"):
        pool.load("x", make_host_adapter(layout, "x", {"q": 65}))


def test_what_could_never_fit_is_told_with_both_sizes() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    size = pool.plan.row_bytes["attention"]
    with pytest.raises(RowsExceeded) as refused:
        pool.load("x", make_host_adapter(layout, "x", {"q": 65}))
    assert f"({80 * size} bytes)" in str(refused.value)
    assert f"({64 * size} bytes)" in str(refused.value)


def test_a_rank_that_the_kernels_do_not_take_is_refused_though_it_would_fit() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 512, 16), max_rank=256)
    with pytest.raises(RowsExceeded, match=r"rank 257.*up to 256"):
        pool.load("x", make_host_adapter(layout, "x", {"q": 16, "k": 257}))
    assert pool.resident() == ()
    assert pool.load("y", make_host_adapter(layout, "y", {"q": 256}))
    pool.check_integrity()


def test_tables_are_seen_through_a_stack_made_before_the_load() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 64, 16))
    stack = pool.stack("qk")
    pool.load("x", make_host_adapter(layout, "x", {"k": 2}))
    place = pool.place_of("x")
    assert stack is pool.stack("qk")
    assert stack.ranks[:, place].tolist() == [0, 2]
    pool.drop("x")
    pool.load("y", make_host_adapter(layout, "y", {"q": 3}))
    assert pool.place_of("y") == place
    assert stack.ranks[:, place].tolist() == [3, 0]
    assert [ranks[place] for ranks in stack.host_ranks] == [3, 0]


@pytest.mark.parametrize("budget", [0, 1, 999, 10_000, 123_456, 1_000_000])
@pytest.mark.parametrize("alignment", [1, 16])
def test_the_plan_never_exceeds_its_budget(budget: int, alignment: int) -> None:
    layout = small_layout()
    plan = plan_rows(layout, budget, element_bytes=2, alignment=alignment)
    assert plan.total_bytes <= budget
    pool = RowPool(layout, budget, dtype=torch.bfloat16, alignment=alignment)
    stacks = [pool.stack(projection.name) for projection in layout.projections]
    tensors = [tensor for stack in stacks for tensor in (*stack.a, *stack.b, stack.ranks, stack.scalings)]
    assert sum(tensor.nbytes for tensor in tensors) == plan.total_bytes
    assert plan.rows["attention"] == plan.rows["mlp"] == plan.rows["operator"] >= plan.rows["embeddings"]


def test_embeddings_get_as_many_rows_as_the_layers_but_at_most_an_eighth_of_the_budget() -> None:
    budget = 1 << 20
    wide = plan_rows(small_layout(), budget, element_bytes=4, alignment=1)
    assert 0.05 * budget < wide.rows["embeddings"] * wide.row_bytes["embeddings"] <= budget / 8
    assert wide.rows["embeddings"] < wide.rows["mlp"]
    deep = plan_rows(small_layout(num_layers=20), budget, element_bytes=4, alignment=1)
    assert deep.rows["embeddings"] == deep.rows["mlp"]


def test_most_of_a_budget_is_used() -> None:
    plan = plan_rows(small_layout(), 1_000_000, element_bytes=4)
    assert plan.total_bytes > 900_000


def test_a_load_takes_the_lowest_gap_so_that_few_adapters_stand_in_a_short_prefix() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 128, 16))
    for name, rank in (("a", 32), ("b", 16), ("c", 16), ("d", 16)):
        pool.load(name, make_host_adapter(layout, name, {"q": rank}))
    pool.drop("a")
    pool.drop("c")
    assert pool.load("e", make_host_adapter(layout, "e", {"q": 16}))  # c's gap would be just as large
    assert pool.first_rows(pool.place_of("e"))[0] == 0
    assert pool.load("f", make_host_adapter(layout, "f", {"q": 32}))
    assert pool.first_rows(pool.place_of("f"))[0] == 80
    pool.check_integrity()


def test_the_rows_of_some_residents_end_where_the_last_of_any_group_does() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 128, 16))
    for name, ranks in (("a", {"q": 3}), ("b", {"down": 40}), ("c", {"k": 17, "down": 1}), ("d", {})):
        pool.load(name, make_host_adapter(layout, name, ranks))
    assert pool.rows_end([]) == pool.rows_end(["d"]) == 0
    assert pool.rows_end(["a", "d"]) == 16
    assert pool.rows_end(["b"]) == 48
    assert pool.rows_end(["a", "c"]) == 64
    pool.drop("b")
    assert pool.rows_end(["c"]) == 64


def test_who_runs_changes_places_with_who_is_worth_least() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 96, 16))
    adapters = {name: make_host_adapter(layout, name, {"q": 16, "down": 9}) for name in "abcdef"}
    for name, adapter in adapters.items():
        assert pool.load(name, adapter)
    for name in "ad":
        pool.pin(name)
    pool.pin("b")
    pool.unpin("b")  # used last, so that c is worth less
    assert (pool.rows_needed("ad"), pool.rows_end("ad")) == (32, 64)
    assert pool.bring_below(32, "ad", max_adapters=8), "nothing is left to do"
    assert pool.rows_end("ad") == 32 and pool.rows_end("b") == 64
    pool.check_integrity()
    pool.pin("f")
    assert pool.bring_below(48, "adf", max_adapters=8)
    assert pool.rows_end("adf") == 48 and pool.rows_end("c") == 96
    pool.check_integrity()
    for adapter in adapters.values():
        assert_holds(pool, layout, adapter)


def test_pinned_residents_stay_where_they_are_and_no_more_move_than_may() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 96, 16))
    adapters = {name: make_host_adapter(layout, name, {"q": 16}) for name in "abcdef"}
    for name, adapter in adapters.items():
        assert pool.load(name, adapter)
        if name != "b":
            pool.pin(name)
    assert pool.bring_below(32, "ef", max_adapters=8), "no more can be done"
    assert [pool.rows_end(name) for name in "abcdef"] == [16, 80, 48, 64, 32, 96]
    for name in "acd":
        pool.unpin(name)
    pool.hold("a", True)  # the operator's has rows, whichever
    assert not pool.bring_below(64, "ef", max_adapters=0)
    assert pool.bring_below(32, "ef", max_adapters=1)
    assert pool.rows_end("ef") == 32 and pool.rows_end("a") == 96
    for adapter in adapters.values():
        assert_holds(pool, layout, adapter)
    pool.check_integrity()


def test_ranges_of_any_lengths_change_places_where_no_other_is_cut() -> None:
    """Random pools: what is brought below is below, who is pinned has not moved, and nobody lost a row."""
    layout, chooser = churn_layout(), random.Random(5)
    num_brought = num_refused = 0
    for _ in range(150):
        pool = RowPool(layout, budget_for(layout, 160, 16))
        adapters = {}
        for index in range(12):
            ranks = {piece: chooser.choice((0, 9, 16, 30, 48)) for piece in ("q", "down")}
            adapter = make_host_adapter(layout, f"d{index}", ranks)
            if pool.load(adapter.digest, adapter, may_evict=False):
                adapters[adapter.digest] = adapter
        for digest in chooser.sample(sorted(adapters), len(adapters) // 3):
            pool.drop(digest)
            del adapters[digest]
        pinned = chooser.sample(sorted(adapters), len(adapters) // 2)
        for digest in pinned:
            pool.pin(digest)
        moving = pinned[: max(1, len(pinned) // 2)]
        before = {digest: pool.first_rows(pool.place_of(digest)) for digest in pinned}
        end_row = max(16, pool.rows_needed(moving))
        assert pool.bring_below(end_row, moving, max_adapters=8)
        if pool.rows_end(moving) > end_row:
            num_refused += 1
        else:
            num_brought += 1
        for digest in set(pinned) - set(moving):
            assert pool.first_rows(pool.place_of(digest)) == before[digest]
        pool.check_integrity()
        for adapter in adapters.values():
            assert_holds(pool, layout, adapter)
    assert min(num_brought, num_refused) > 20


def test_a_narrow_range_comes_low_with_its_neighbours_where_only_wide_ones_may_leave() -> None:
    layout = churn_layout()
    pool = RowPool(layout, budget_for(layout, 96, 16))
    for name, rank in (("wide", 32), ("a", 16), ("b", 16), ("c", 16)):
        assert pool.load(name, make_host_adapter(layout, name, {"q": rank}))
    pool.pin("a")
    pool.pin("c")  # 64-80, beside 16 free rows
    assert pool.bring_below(32, ["c"], max_adapters=1)
    assert pool.rows_end(["c"]) == 16 and pool.rows_end(["wide"]) == 96
    pool.check_integrity()


def test_rows_may_stand_behind_the_base_weights_and_serve_as_any_others() -> None:
    """Interleaved by slice in memory that others made, moves and zeros included."""
    layout = churn_layout()
    buffers: dict[str, torch.Tensor] = {}

    def rows_behind(name: str, num_rows: int, num_slices: int) -> torch.Tensor | None:
        if name == "down":
            return None
        in_features = next(one.in_features for one in layout.projections if one.name == name)
        buffers[name] = torch.full((num_rows * num_slices, in_features), torch.nan)
        return buffers[name]

    pool = RowPool(layout, budget_for(layout, 48, 16), rows_behind=rows_behind)
    assert list(buffers) == ["qk"]
    adapters = {name: make_host_adapter(layout, name, {"q": 5, "k": 16, "down": 3}) for name in "abc"}
    for name in "abc":
        assert pool.load(name, adapters[name])
    pool.drop("a")
    pool.drop("c")
    wide = make_host_adapter(layout, "wide", {"q": 30})
    assert pool.load("wide", wide)  # moves b
    assert pool.usage().num_moves == 1
    assert_holds(pool, layout, adapters["b"])
    assert_holds(pool, layout, wide)
    first = pool.first_rows(pool.place_of("wide"))[0]
    interleaved = buffers["qk"].view(-1, 2, 2)[first : first + 30]
    assert torch.equal(interleaved[:, 0], wide.slices["q"].a)
    assert not interleaved[:, 1].any()


def test_on_a_cpu_rank_4_takes_a_quarter_of_the_bytes_of_rank_16() -> None:
    layout = churn_layout()
    alignment = detect("cpu").row_alignment
    pool = RowPool(layout, budget_for(layout, 64, alignment), alignment=alignment)
    used = []
    for rank in (4, 16):
        assert pool.load(f"r{rank}", make_host_adapter(layout, f"r{rank}", {"q": rank, "down": rank}))
        used.append(pool.usage().bytes_used)
    assert used[1] - used[0] == 4 * used[0]
