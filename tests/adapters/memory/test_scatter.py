"""A load on a GPU: one copy and one launch, whatever the modules, rows behind base weights included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from adapters.layout import BaseLayout, Group, ProjectionSpec, Slice
from adapters.memory.row_pool import RowPool
from tests.adapters.memory.test_row_pool import assert_holds, budget_for, make_host_adapter
from tests.support.engine.fake_stream import FakeStream, Noted
from tests.support.npu.triton_interpreter import kernels_wished_for

triton_cuda = pytest.importorskip("kernels.row_scatter.triton_cuda", reason="NOT RUN: Triton is not installed")

RANKS = {"q": 16, "k": 3, "v": 8, "o": 16, "gate": 5, "up": 0, "down": 20}


def layout() -> BaseLayout:
    """A layer of all seven projections; some of the rows are of a multiple of 16 bytes."""

    def linear(name: str, group: Group, width: int, **widths: int) -> ProjectionSpec:
        return ProjectionSpec(
            name, 0, group, "linear", width, tuple(Slice(module, out) for module, out in widths.items())
        )

    projections = (
        linear("qkv", "attention", 8, q=8, k=3, v=3),
        linear("o", "attention", 4, o=8),
        linear("gate_up", "mlp", 8, gate=5, up=5),
        linear("down", "mlp", 5, down=8),
    )
    return BaseLayout("seven", 1, "model.layers.", projections)


LAYOUT = layout()


@pytest.fixture(autouse=True)
def _by_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with kernels_wished_for(["row_scatter"], monkeypatch):
        yield


@pytest.fixture
def stream(device: str, monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """That notes each launch of the kernel beside the operations of torch."""
    if device != "cpu":
        pytest.skip("NOT RUN: on a GPU tests/ops/test_row_scatter.py runs the kernel")
    stream, launch = FakeStream(), triton_cuda.launch

    def noted(*arguments: Any) -> None:
        stream.note("launch")
        with _disable_current_modes():  # the interpreter's own operations are none of the device's
            launch(*arguments)

    monkeypatch.setattr(triton_cuda, "launch", noted)
    return stream


def pool_of(stream: FakeStream, *, is_behind: bool = True, buffer_bytes: int = 1 << 20) -> RowPool:
    def rows_behind(_name: str, num_rows: int, num_slices: int) -> torch.Tensor:
        width = next(one.in_features for one in LAYOUT.projections if one.name == _name)
        return torch.empty(num_rows * num_slices, width)

    budget = budget_for(LAYOUT, 64, 16)
    behind = rows_behind if is_behind else None
    return RowPool(LAYOUT, budget, copies=stream, buffer_bytes=buffer_bytes, rows_behind=behind)


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_load_is_one_copy_and_one_launch(stream: FakeStream, is_behind: bool) -> None:
    """What is past a rank, slices that are not targeted, and ranks and scalings included."""
    pool = pool_of(stream, is_behind=is_behind)
    first, second = (make_host_adapter(LAYOUT, name, RANKS) for name in "ab")
    assert pool.load("a", first)
    stream.events.clear()
    with Noted(stream):
        assert pool.load("b", second)
    assert stream.events == ["copies: copy_", "copies wait for steps", "copies: launch", "mark"]
    for adapter in (first, second):
        assert_holds(pool, LAYOUT, adapter)


def test_what_loads_share_is_derived_before_the_first_waits_for_steps(stream: FakeStream) -> None:
    pool, adapter = pool_of(stream), make_host_adapter(LAYOUT, "a", RANKS)
    with Noted(stream):
        assert pool.load("a", adapter)
    waits = stream.events.index("copies wait for steps")
    assert stream.events[waits:] == ["copies wait for steps", "copies: launch", "mark"]
    assert not any(event.startswith("steps:") for event in stream.events)


@pytest.mark.parametrize("buffer_bytes", [1, 3000])
def test_parts_take_a_copy_and_a_launch_each(stream: FakeStream, buffer_bytes: int) -> None:
    """Adapters of other ranks through one buffer, in turn, and the first once more."""
    pool = pool_of(stream, buffer_bytes=buffer_bytes)
    for turn, ranks in enumerate((RANKS, {"down": 7, "k": 1}, RANKS)):
        adapter = make_host_adapter(LAYOUT, f"d{turn}", ranks)
        pool.drop(f"d{turn - 1}")
        stream.events.clear()
        assert pool.load(adapter.digest, adapter)
        assert_holds(pool, LAYOUT, adapter)
        num_parts = stream.events.count("copies wait for steps")
        assert num_parts > 1 or turn
        assert stream.events.count("copies: launch") == num_parts
        stream.num_reached = len(stream.marks)
        pool.check_integrity()


@pytest.mark.usefixtures("stream")
def test_each_adapter_may_have_memory_of_its_own() -> None:
    """On a host that is its own device there is no buffer."""
    pool = RowPool(LAYOUT, budget_for(LAYOUT, 64, 16))
    for name in "ab":
        adapter = make_host_adapter(LAYOUT, name, RANKS)
        assert pool.load(name, adapter)
        assert_holds(pool, LAYOUT, adapter)
