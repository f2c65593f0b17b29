"""Sums of adapters: their digests, and their rows beside those of adapters by themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from adapters.layout import BaseLayout, Experts, ProjectionSpec, Slice
from adapters.memory.host_tier import HostTier
from adapters.memory.row_pool import RowPool
from adapters.memory.slab import AdapterSum, HostAdapter, HostSlice, make_sum
from adapters.store.store import AdapterStore, StoreLimits
from adapters.sums import MAX_PARTS, digest_of, parts_of, rows_of
from tests.adapters.memory.test_row_pool import assert_holds, budget_for, make_host_adapter
from tests.support.adapter_files import small_layout, upload_small
from tests.support.engine.fake_stream import FakeStream
from tests.support.npu.triton_interpreter import kernels_wished_for

A, B = "a" * 64, "b" * 64
NUM_EXPERTS = 3


def test_equal_sums_have_one_digest_in_any_order() -> None:
    assert digest_of([(A, 0.5), (B, 2.0)]) == digest_of([(B, 2.0), (A, 0.5)]) == f"{A}*0.5+{B}*2.0"
    assert digest_of([(A, 0.1), (B, 1.0), (A, 0.2)]) == digest_of([(A, 0.2), (A, 0.1), (B, 1.0)])
    assert digest_of([(A, 0.5), (B, 2.0)]) != digest_of([(A, 0.5), (B, 2.0000000000000004)])


def test_a_part_of_weight_1_is_the_adapter_and_none_the_base() -> None:
    assert digest_of([(A, 1.0)]) == digest_of([(A, 0.25), (A, 0.75)]) == digest_of([(B, 0.0), (A, 1)]) == A
    assert digest_of([]) is digest_of([(A, 0.0)]) is digest_of([(A, 0.5), (A, -0.5)]) is None
    assert digest_of([(A, -1.0)]) == f"{A}*-1.0"


def test_a_digest_tells_its_parts() -> None:
    weights = [0.1, -1e-17, 100.0, 1 / 3]
    parts = tuple((f"{index:064x}", weight) for index, weight in enumerate(weights))
    digest = digest_of(parts)
    assert digest is not None
    assert parts_of(digest) == parts
    assert parts_of(A) == ((A, 1.0),)


def layout() -> BaseLayout:
    """Two layers of three groups, experts among them."""
    projections: list[ProjectionSpec] = []
    experts: list[Experts] = []
    for layer in range(2):
        qkv = tuple(Slice(f"{layer}.{name}", width) for name, width in (("q", 8), ("k", 3)))
        projections += [
            ProjectionSpec(f"{layer}.qk", layer, "attention", "linear", 8, qkv),
            ProjectionSpec(f"{layer}.o", layer, "mlp", "linear", 4, (Slice(f"{layer}.o", 8),)),
        ]
        gate_up = tuple(Slice(f"{layer}.{name}", 5) for name in ("gate", "up"))
        projections += [
            ProjectionSpec(f"{layer}.gate_up", layer, "experts", "experts", 8, gate_up),
            ProjectionSpec(f"{layer}.down", layer, "experts", "experts", 5, (Slice(f"{layer}.down", 8),)),
        ]
        experts.append(Experts(f"{layer}.experts", f"{layer}.gate", NUM_EXPERTS, f"{layer}.gate_up", f"{layer}.down"))
    return BaseLayout("sums", 2, "", tuple(projections), experts=tuple(experts))


LAYOUT = layout()
MODULES = {piece.module: one for one in LAYOUT.projections for piece in one.slices}


def deltas(held: HostSlice, num_experts: int, scaling: float) -> torch.Tensor:
    """float64 [experts, out, in]"""
    a, b = (side.double().unflatten(0, (num_experts, -1)) for side in (held.a, held.b))
    return scaling * b.transpose(1, 2) @ a


def assert_holds_sum(
    pool: RowPool, layout: BaseLayout, digest: str, parts: Sequence[tuple[HostAdapter, float]]
) -> None:
    """The rows of the device multiply to the weighted sum of the parts' products, with zeros behind them."""
    place = pool.place_of(digest)
    assert place is not None
    for projection in layout.projections:
        stack, num_experts = pool.stack(projection.name), layout.num_experts_of(projection)
        num_rows = sum(one.rows.get(projection.group, 0) for one, _ in parts)
        first = pool.first_rows(place)[stack.group]
        end = first + pool.plan.aligned(num_rows)
        assert (first >= 0) == (num_rows > 0)
        for index, module in enumerate(piece.module for piece in projection.slices):
            rank, scaling = int(stack.ranks[index, place]), float(stack.scalings[index, place])
            assert rank == stack.host_ranks[index][place]
            assert scaling == pytest.approx(stack.host_scalings[index][place])
            held = [(one.slices[module], weight) for one, weight in parts if module in one.slices]
            assert rank == (num_rows if held else 0)
            sides = (stack.a[index], stack.b[index])
            assert all((rows[first + rank : end] == 0).all() for rows in sides if num_rows)
            if held:
                a, b = (rows[first : first + rank] for rows in sides)
                found = deltas(HostSlice(a, b, rank, scaling, 0, 0), num_experts, scaling)
                wanted = sum(deltas(one, num_experts, weight * one.scaling) for one, weight in held)
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["direct", "buffer", "small-buffer", pytest.param("kernel", marks=pytest.mark.wide)])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[RowPool]:
    """Rows that hold NaN; loaded directly, and as GPUs load them, through a buffer, by their kernel too."""
    is_faked = request.param != "direct" and device == "cpu"
    with kernels_wished_for(["row_scatter"] if request.param == "kernel" else [], monkeypatch):
        copies, size = FakeStream() if is_faked else None, 1 if request.param == "small-buffer" else 1 << 20
        budget = 2 * budget_for(LAYOUT, 96, 16)
        pool = RowPool(LAYOUT, budget, device=device, copies=copies, buffer_bytes=size)
        for projection in LAYOUT.projections:
            stack = pool.stack(projection.name)
            for rows in (*stack.a, *stack.b):
                rows.fill_(float("nan"))
        yield pool


def ranks(chooser: random.Random) -> dict[str, int]:
    """The shares of some modules: each its own, the experts' of all of a layer's experts."""
    chosen = {module: chooser.choice((0, 1, 4, 7)) for module in MODULES}
    return {module: rank * LAYOUT.num_experts_of(MODULES[module]) for module, rank in chosen.items() if rank}


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_sums_multiply_to_the_sum(pool: RowPool, seed: int) -> None:
    """Parts of other modules and ranks, some of which have no rows in a group, before and behind adapters."""
    chooser = random.Random(seed)
    adapters = [make_host_adapter(LAYOUT, letter * 64, ranks(chooser)) for letter in "abc"]
    assert pool.load(adapters[0].digest, adapters[0])
    for weights in ((1.0, 1.0, 1.0), (0.5, -2.0, 0.1), (3.0,), (1e-3, 7.0)):
        parts = list(zip(adapters, weights, strict=False))
        digest = digest_of((one.digest, weight) for one, weight in parts)
        assert digest is not None
        whole = make_sum(LAYOUT, digest, parts)
        assert pool.load(digest, whole)
        assert_holds_sum(pool, LAYOUT, whole.digest, parts)
        assert_holds(pool, LAYOUT, adapters[0])
        pool.drop(digest)


def test_one_part_is_as_exact_as_the_adapter(pool: RowPool) -> None:
    """Its weight is the scaling's, and no number of its rows changes."""
    one = make_host_adapter(LAYOUT, A, ranks(random.Random(1)))
    whole = make_sum(LAYOUT, f"{A}*0.3", [(one, 0.3)])
    assert not any(held.ratios for held in whole.slices.values())
    assert pool.load(whole.digest, whole)
    for module, held in one.slices.items():
        assert whole.slices[module].scaling == 0.3 * held.scaling


def test_weights_beside_scalings_of_zero_are_no_nan(pool: RowPool) -> None:
    one = make_host_adapter(LAYOUT, A, {"0.o": 4})
    none = make_host_adapter(LAYOUT, B, {"0.o": 4})
    for adapter in (one, none):
        object.__setattr__(adapter.slices["0.o"], "scaling", 0.0)
    parts = [(one, 5e-324), (none, 2.0)]
    whole = make_sum(LAYOUT, f"{A}*5e-324+{B}*2.0", parts)
    assert pool.load(whole.digest, whole)
    assert_holds_sum(pool, LAYOUT, whole.digest, parts)


# ---- in host memory


def test_a_sum_is_in_memory_when_its_parts_are(tmp_path: Path) -> None:
    stored = small_layout()
    store = AdapterStore(tmp_path, stored, StoreLimits(free_disk_floor_bytes=0), base_name="base")
    digests = [upload_small(store, stored, name, seed=seed)[0].digest for seed, name in enumerate("ab")]
    digest = digest_of((one, 0.5) for one in digests)
    assert digest is not None
    tier = HostTier(tmp_path, stored, 1 << 20)
    assert tier.kept(digest) is None and not tier.is_kept(digest)
    tier.get(digests[0])
    assert not tier.is_kept(digest)
    whole = tier.get(digest)
    used_bytes = tier.used_bytes
    assert isinstance(whole, AdapterSum)
    assert tier.is_kept(digest) and tier.num_kept == len(digests)
    assert used_bytes == sum(one.num_bytes for one in whole.parts), "a sum has taken memory of its own"
    assert whole.rows == rows_of(store.manifest(one) for one in digests)
    again = tier.kept(digest)
    assert isinstance(again, AdapterSum)
    assert all(one is other for one, other in zip(again.parts, whole.parts, strict=True)), "a part was read again"
    tier.drop(digests[1])
    assert tier.kept(digest) is None
    tier.check_integrity()
    store.close()


def test_the_most_parts_make_a_digest_that_headers_can_carry() -> None:
    digest = digest_of((f"{index:064x}", 1 / 3 * -1e-17) for index in range(MAX_PARTS))
    assert digest is not None
    assert len(digest) < 1000
