"""How an adapter comes to a device: a stream beside the steps, in an order that no step in flight can notice."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from adapters.memory.row_pool import RowPool
from adapters.memory.slab import ALIGNMENT_BYTES, Arena, Extras, ModuleShape, make_adapter, slab_bytes
from adapters.peft.bound_tensors import BIAS, LORA_BIAS, MAGNITUDE
from tests.adapters.memory.test_row_pool import assert_holds, budget_for, churn_layout, make_host_adapter
from tests.support.engine.fake_stream import FakeStream, Noted

LAYOUT = churn_layout()


def pool_of(stream: FakeStream, *, num_rows: int = 64, buffer_bytes: int = 1 << 20) -> RowPool:
    return RowPool(LAYOUT, budget_for(LAYOUT, num_rows, 16), copies=stream, buffer_bytes=buffer_bytes)


def test_a_load_asks_nothing_of_the_steps_stream_and_allocates_nothing() -> None:
    stream = FakeStream()
    pool = pool_of(stream)
    first, second = (make_host_adapter(LAYOUT, name, {"q": 16, "k": 16, "down": 16}) for name in "ab")
    assert pool.load("a", first)
    stream.events.clear()
    with Noted(stream):
        assert pool.load("b", second)
    assert stream.events == [
        "copies: copy_",  # the slab, as one
        "copies wait for steps",  # before rows are written that one in flight may use
        "copies: _foreach_copy_",
        "copies: _foreach_copy_",  # ranks and scalings
        "mark",
    ]
    assert_holds(pool, LAYOUT, second)


def test_what_is_past_a_rank_is_zeroed_at_once() -> None:
    stream = FakeStream()
    pool = pool_of(stream)
    adapter = make_host_adapter(LAYOUT, "a", {"q": 3, "k": 5})
    with Noted(stream):
        assert pool.load("a", adapter)
    assert stream.events.count("copies: _foreach_zero_") == 1
    assert not any("steps:" in event for event in stream.events)
    assert_holds(pool, LAYOUT, adapter)


class Base:
    """`adapters.memory.non_lora_pool.BaseFacts` of LAYOUT, without biases."""

    norm_offset = 0.0
    num_asked = 0  # for norms

    def bias(self, *_: Any, **__: Any) -> None:
        return None

    def norm_weight(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("there are no norms")

    def rows(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("there are no trained tokens")

    def delta_squares(self, *arguments: Any, **__: Any) -> torch.Tensor:
        self.num_asked += 1
        return torch.full((arguments[3].shape[1],), 4.0)


def test_what_is_no_row_comes_from_the_slab_too_and_in_the_copies_stream() -> None:
    stream, arena, base = FakeStream(), Arena(1 << 16, is_pinned=False), Base()
    pool = RowPool(LAYOUT, 1 << 14, copies=stream, buffer_bytes=600, side_bytes=1 << 12, base=base)
    shapes = [ModuleShape("q", 4, 2, 2, 3.0), ModuleShape("k", 2, 2, 1, 1.0)]
    vector = torch.Size([2]), torch.float32
    extras = Extras({("q", MAGNITUDE): vector, ("q", LORA_BIAS): vector, ("down", BIAS): vector}, {}, {"vectors": 1})
    slab = arena.allocate(slab_bytes(LAYOUT, shapes, torch.float32, extras))
    assert slab is not None
    adapter = make_adapter(LAYOUT, "a", shapes, torch.float32, slab, arena, extras)
    for key, own in adapter.extras.items():
        own.copy_(torch.tensor([6.0, 8.0] if key[1] == MAGNITUDE else [1.0, 2.0]))
    for held in adapter.slices.values():
        held.a.fill_(1)
        held.b.fill_(2)
    for own in adapter.extras.values():
        assert slab.data_ptr() <= own.data_ptr() < slab.data_ptr() + slab.nbytes
    # The second time from the scales that the first has left in host memory: norms are computed once.
    for _ in range(2):
        with Noted(stream):
            assert pool.load("a", adapter)
        assert stream.events[-1] == "mark"
        assert not any("steps:" in event for event in stream.events)
        assert_holds(pool, LAYOUT, adapter)
        assert pool.side is not None
        qk, down = pool.side.vectors["qk"], pool.side.vectors["down"]
        assert qk.scale[1].tolist() == [3.0, 4.0, 1.0]
        assert qk.shift[1].tolist() == [3.0, 6.0, 0.0]
        assert (down.scale[1].tolist(), down.shift[1].tolist()) == ([1.0, 1.0], [1.0, 2.0])
        assert base.num_asked == 1
        pool.drop("a")
        for vectors in (qk, down):
            vectors.scale[1].fill_(9)
            vectors.shift[1].fill_(9)


@pytest.mark.parametrize("buffer_bytes", [1, 600, 1100, 1 << 20])
def test_an_adapter_larger_than_the_buffer_comes_in_parts(buffer_bytes: int) -> None:
    stream = FakeStream()
    pool = pool_of(stream, buffer_bytes=buffer_bytes)
    for seed, ranks in enumerate(({"q": 16, "k": 4, "down": 9}, {"k": 33}, {"down": 1}, {"q": 20, "down": 17})):
        adapter = make_host_adapter(LAYOUT, f"d{seed}", ranks)
        pool.drop(f"d{seed - 1}")
        assert pool.load(adapter.digest, adapter)
        assert_holds(pool, LAYOUT, adapter)
        stream.num_reached = len(stream.marks)
        pool.check_integrity()


def test_steps_wait_for_a_copy_only_if_it_is_used_before_it_has_ended() -> None:
    stream = FakeStream()
    pool = pool_of(stream)
    marks = [pool.load(name, make_host_adapter(LAYOUT, name, {"q": 16})) for name in "ab"]
    assert [mark is not None and mark.is_completed() for mark in marks] == [False, False]
    stream.num_reached = 1
    stream.events.clear()
    for mark in marks:
        assert mark is not None
        pool.publish(mark)
    assert stream.events == ["steps wait for mark 1"]


def test_ranges_move_after_the_copies_under_way_and_before_those_to_come() -> None:
    """The newcomer's rows are where others were moved from, in the order of the steps."""
    stream = FakeStream()
    pool = pool_of(stream)
    adapters = {name: make_host_adapter(LAYOUT, name, {"q": 16}) for name in "abcd"}
    for name, adapter in adapters.items():
        assert pool.load(name, adapter)
    pool.drop("a")
    pool.drop("c")
    stream.events.clear()
    wide = make_host_adapter(LAYOUT, "wide", {"q": 32})
    with Noted(stream):
        assert pool.load("wide", wide)
    assert stream.events[0] == "steps wait for mark 3"
    assert stream.events[1].startswith("steps: ")
    assert max(at for at, event in enumerate(stream.events) if event.startswith("steps: ")) < stream.events.index(
        "copies wait for steps"
    )
    for adapter in (adapters["b"], adapters["d"], wide):
        assert_holds(pool, LAYOUT, adapter)


def test_rows_that_a_copy_will_write_stay_where_they_are_and_nobody_waits_for_it() -> None:
    """Those of a newcomer, and those of one that was given up while it came: they are free, and will be written."""
    stream = FakeStream()
    pool = pool_of(stream)
    adapters = {name: make_host_adapter(LAYOUT, name, {"q": 16}) for name in "abcd"}
    for name, adapter in adapters.items():
        assert pool.load(name, adapter)
    stream.num_reached = 1  # b, c and d are on their way
    pool.drop("b")
    pool.pin("d")
    stream.events.clear()
    assert not pool.bring_below(16, "d", max_adapters=8), "there will be more to do"
    assert pool.rows_end("d") == 64
    stream.num_reached = 2
    assert not pool.bring_below(32, "d", max_adapters=8)
    stream.num_reached = 4
    assert pool.bring_below(32, "d", max_adapters=8)
    assert pool.rows_end("d") == 32
    assert stream.events == []
    for name in "acd":
        assert_holds(pool, LAYOUT, adapters[name])


def test_the_host_memory_of_a_copy_is_kept_until_it_has_ended() -> None:
    stream, arena = FakeStream(), Arena(1 << 16, is_pinned=False)
    pool = pool_of(stream)
    shapes = [ModuleShape("q", 4, 2, 2, 1.0)]
    slab = arena.allocate(slab_bytes(LAYOUT, shapes, torch.float32))
    assert slab is not None
    adapter = make_adapter(LAYOUT, "a", shapes, torch.float32, slab, arena)
    mark = pool.load("a", adapter)
    assert mark is not None
    del adapter
    gc.collect()
    assert not freed(arena), "given back while it was read from"
    stream.num_reached = 1
    pool.publish(mark)
    gc.collect()
    assert freed(arena)


def freed(arena: Arena) -> bool:
    """Whether all of it can be had."""
    whole = arena.allocate(1 << 16)
    if whole is not None:
        arena.free(whole)
    return whole is not None


def test_an_arena_gives_what_fits_between_and_takes_everything_back() -> None:
    arena = Arena(8 * ALIGNMENT_BYTES, is_pinned=False)
    slabs = [arena.allocate(2 * ALIGNMENT_BYTES - 1) for _ in range(4)]
    assert arena.allocate(1) is None
    for at in (0, 2):
        slab = slabs[at]
        assert slab is not None
        arena.free(slab)
    assert arena.allocate(3 * ALIGNMENT_BYTES) is None, "no gap is so wide"
    between = arena.allocate(2 * ALIGNMENT_BYTES)
    assert between is not None
    assert slabs[0] is not None
    assert between.data_ptr() == slabs[0].data_ptr()
    arena.check_integrity()
