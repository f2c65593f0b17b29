"""The Ascend LoRA kernels in triton-ascend's interpreter, through the public ops, against float64 on random steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kernels.lora import ops, triton_ascend
from kernels.lora.ascend import tiles
from kernels.platform import BackendError, detect, installed
from tests.ops.lora.test_lora import assert_right, cases, check_linear, expected_linear
from tests.support.ops.lora_cases import Case, make_maps, make_step
from tests.support.tiers import examples

NUM_VECTOR_CORES = 4
UNIFIED_BUFFER_BYTES = 192 * 1024
# The interpreter is too slow for shrinking a failing step.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.fixture(autouse=True)
def _pretend_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_ascend, "chip_sizes", lambda _device: (NUM_VECTOR_CORES, UNIFIED_BUFFER_BYTES))
    with installed(detect("cpu").with_fallback("lora", "triton_ascend", None)):
        yield


@settings(max_examples=examples(25), deadline=None, phases=PHASES)
@given(case=cases(), overwrite=st.booleans())
def test_few_tokens_equal_float64(case: Case, overwrite: bool) -> None:
    check_linear(case, "cpu", overwrite=overwrite)


@settings(max_examples=10, deadline=None, phases=PHASES)
@given(case=cases(), overwrite=st.booleans())
def test_many_tokens_equal_float64(case: Case, overwrite: bool) -> None:
    if torch.bfloat16 in (case.dtype, case.row_dtype):
        # This interpreter multiplies bfloat16 matrices as integers; the gate runs them as compiled.
        case = dataclasses.replace(case, dtype=torch.float16, row_dtype=torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "FEW_TOKENS", 0)
        check_linear(case, "cpu", overwrite=overwrite)


@pytest.mark.parametrize("few_tokens", [0, 64], ids=["cube", "vector"])
def test_shrink_then_expand_equals_float64(few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "FEW_TOKENS", few_tokens)
    step = make_step(Case(128, (40, 8), ((16, 5, 0), (3, 20, 9)), (3, 1, 4), num_base_tokens=1))
    out = step.out.clone()
    h = ops.lora_shrink(step.x, step.stack, step.maps)
    ops.lora_expand(h, out, step.stack, step.maps)
    assert_right(out, expected_linear(step), step, step.out)


def test_tokens_out_of_order_equal_tokens_in_order() -> None:
    step = make_step(Case(64, (24,), ((16, 7),), (3, 4), num_base_tokens=2))
    order = torch.randperm(step.maps.num_tokens, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x, out, expected = torch.empty_like(step.x), torch.empty_like(step.out), step.out.clone()
    x[order.long()], out[order.long()] = step.x, step.out
    ops.lora_linear(x, out, step.stack, step.maps, row_index=order)
    ops.lora_linear(step.x, expected, step.stack, step.maps)
    assert torch.equal(out[order.long()], expected)


def test_embedding_equals_one_hot_linear() -> None:
    step = make_step(Case(50, (24,), ((16, 7, 0),), (3, 4, 2), num_base_tokens=2))
    ids = torch.randint(50, (step.maps.num_tokens,), generator=torch.Generator().manual_seed(0))
    out, expected = step.out.clone(), step.out.clone()
    ops.lora_embedding(ids, out, step.stack, step.maps)
    one_hot = torch.nn.functional.one_hot(ids, 50).float()
    ops.lora_linear(one_hot, expected, step.stack, step.maps)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_embedding_of_tokens_out_of_order_equals_tokens_in_order() -> None:
    step = make_step(Case(50, (24,), ((16, 130, 0),), (3, 4, 2), num_base_tokens=2))
    generator = torch.Generator().manual_seed(0)
    ids, order = torch.randint(50, (11,), generator=generator), torch.randperm(11, generator=generator)
    out, expected = torch.empty_like(step.out), step.out.clone()
    out[order] = step.out
    ops.lora_embedding(ids[order.argsort()], out, step.stack, step.maps, row_index=order.int())
    ops.lora_embedding(ids, expected, step.stack, step.maps)
    assert torch.equal(out[order], expected)


def variant(launch: triton_ascend.LoraLaunch) -> tuple[object, ...]:
    """What a compiled kernel depends on, since sizes, maps and addresses are exempt from specialisation."""
    kinds = {
        name: value.dtype if isinstance(value, torch.Tensor) else value if name.isupper() else value >= 2**31
        for name, value in launch.arguments.items()
    }
    return launch.kernel, *sorted((name, str(kind)) for name, kind in kinds.items())


def test_nothing_is_compiled_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ascend, "chip_sizes", lambda _device: (40, UNIFIED_BUFFER_BYTES))
    asked: set[tuple[object, ...]] = set()
    monkeypatch.setattr(triton_ascend.LoraLaunch, "run", lambda self: asked.add(variant(self)))
    rng, max_tokens, ranks = random.Random(0), 700, (16, 5, 200, 0)
    linears = [
        make_step(Case(in_features, widths, (ranks,) * len(widths), (1,) * 4)).stack
        for in_features, widths in ((1024, (2048, 72)), (520, (1030,)))
    ]
    embedding = make_step(Case(777, (96,), (ranks,), (1,) * 4)).stack
    ops.warm_up(linears, max_tokens, torch.float32, embeddings=[embedding])
    warm = set(asked)
    for _ in range(150):
        lengths = [rng.choice([0, 1, 1, rng.randint(1, 170)]) for _ in ranks]
        maps = make_maps(lengths, [0, 1, 2, 3], [0, 16, 32, 240], sum(lengths) + 1, pad_to=64)
        for stack in linears:
            out = torch.zeros(maps.num_tokens, sum(b.shape[1] for b in stack.b))
            ops.lora_linear(torch.zeros(maps.num_tokens, stack.a[0].shape[1]), out, stack, maps)
        ids = torch.zeros(maps.num_tokens, dtype=torch.int64)
        ops.lora_embedding(ids, torch.zeros(maps.num_tokens, 96), embedding, maps)
    assert asked == warm
    assert len(warm) >= 6


def test_spare_segments_are_skipped() -> None:
    case = Case(64, (24,), ((16, 7),), (3, 4), num_base_tokens=2)
    plain, spare = make_step(case), make_step(case, pad_to=9)
    for step in (plain, spare):
        ops.lora_linear(step.x, step.out, step.stack, step.maps)
    assert torch.equal(plain.out, spare.out)


def test_a_chip_too_small_for_every_table_is_refused() -> None:
    with pytest.raises(BackendError, match="no tiles for an NPU with 65536 bytes"):
        tiles.choose(8, 4096, 40, 65536)


def test_regime_and_grid_follow_from_sizes_alone() -> None:
    sizes = [(1, 4096), (64, 4096), (65, 4096), (4096, 4096), (4096, 1000)]
    regimes = [tiles.choose(tokens, features, 40, UNIFIED_BUFFER_BYTES) for tokens, features in sizes]
    assert [(regime.name, regime.num_cores) for regime in regimes] == [
        ("few", 40), ("few", 40), ("many", 20), ("many", 20), ("few", 40),
    ]  # fmt: skip
    # Many tokens need no split.
    assert regimes[3].num_splits(4096, 4096, 1) == 1


# Inputs and output widths of the projections of an 8B model: attention's inputs and output, the MLP's.
PROJECTIONS_8B = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (12288, 12288)), (12288, (4096,)))


@pytest.mark.parametrize(("num_tokens", "num_cores", "fewest"), [(32, 40, 32), (64, 40, 32), (256, 20, 16)])
def test_every_projection_occupies_the_cores(num_tokens: int, num_cores: int, fewest: int) -> None:
    for in_features, widths in PROJECTIONS_8B:
        regime = tiles.choose(num_tokens, in_features, 40, UNIFIED_BUFFER_BYTES)
        assert regime.num_cores == num_cores
        num_tiles = -(-num_tokens // regime.tiles.shrink_tokens)
        items_of_part = num_tiles * len(widths) * regime.num_splits(in_features, num_tokens, len(widths))
        assert items_of_part >= fewest, "shrink of the ranks that every adapter has"
        _block, chunk = regime.columns(sum(widths), num_tokens)
        num_tiles = -(-num_tokens // regime.tiles.expand_tokens)
        assert num_tiles * sum(-(-width // chunk) for width in widths) >= fewest, "expand"


@pytest.mark.parametrize(("num_tokens", "in_features"), [(1, 4096), (8, 12288), (64, 4096), (256, 4096)])
def test_rank_64_has_four_times_the_items(num_tokens: int, in_features: int) -> None:
    """A shrink of one slice: as many work items with something to do as it has blocks of ranks."""
    items = {}
    for rank in (16, 64):
        step = make_step(Case(in_features, (64,), ((rank,),), (num_tokens,)))
        regime = tiles.choose(num_tokens, in_features, 40, UNIFIED_BUFFER_BYTES)
        h = torch.empty(triton_ascend.partials_shape(in_features, num_tokens, 1, 64, regime))
        arguments = triton_ascend.plan_shrink(step.x, h, step.stack, step.maps, regime).arguments
        items[rank] = sum(part * arguments["R"] < rank for part in range(arguments["num_parts"])) * h.shape[2]
    assert items[64] == 4 * items[16]


def test_few_tokens_have_few_partial_sums() -> None:
    """So few splits for up to 8 tokens, by hand, that each chunk of columns reads little beside its block of B."""
    for num_tokens in (1, 8):
        regime = tiles.choose(num_tokens, 4096, 40, UNIFIED_BUFFER_BYTES)
        assert [regime.num_splits(4096, num_tokens, slices) for slices in (1, 2, 3)] == [11, 11, 11]
    regime = tiles.choose(1, 4096, 40, UNIFIED_BUFFER_BYTES)
    for widths, num_chunks in [((4096, 1024, 1024), 22 + 6 + 6), ((4096,), 32), ((2048,), 32), ((14336, 14336), 112)]:
        _block, chunk = regime.columns(sum(widths), 1)
        assert sum(-(-width // chunk) for width in widths) == num_chunks
