"""LoRA ops against float64, along the axes that users move: popularity of adapters, ranks, widths, lengths, dtypes.

`pytest tests/ops/lora/test_lora.py --device cuda` runs the same tests on a GPU.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora import ops, reference
from kernels.lora.maps import LoraMaps
from kernels.platform import implementation
from tests.support.ops.lora_cases import Case, Step, make_maps, make_step, poison_workspaces, popularity
from tests.support.tiers import examples
from tests.tolerances import OP

POPULARITIES = ("distinct", "uniform", "zipf", "identical")


def expected_linear(step: Step, *, overwrite: bool = False) -> torch.Tensor:
    """Float64, token by token, straight from the equation: shares no code with the implementations."""
    maps, stack = step.maps, step.stack
    result = step.out.double().cpu()
    a = [t.double().cpu() for t in stack.a]
    b = [t.double().cpu() for t in stack.b]
    x = step.x.to(stack.a[0].dtype).double().cpu()
    for token, index in enumerate(maps.token_segment.tolist()):
        if index < 0:
            continue
        segment = maps.segments[index]
        first_row = segment.first_rows[stack.group]
        for s, column in enumerate(stack.slice_starts):
            rank = stack.host_ranks[s][segment.place]
            delta = torch.zeros(b[s].shape[1], dtype=torch.float64)
            if rank:
                rows = slice(first_row, first_row + rank)
                delta = stack.host_scalings[s][segment.place] * (x[token] @ a[s][rows].t()) @ b[s][rows]
            columns = slice(column, column + b[s].shape[1])
            result[token, columns] = delta if overwrite else result[token, columns] + delta
    return result


def assert_right(out: torch.Tensor, expected: torch.Tensor, step: Step, before: torch.Tensor) -> None:
    # h is rounded to the rows' type, where that is narrower, on its way into a matrix product.
    absolute, relative = max(OP[out.dtype], OP[step.stack.a[0].dtype])
    torch.testing.assert_close(out.double().cpu(), expected, atol=absolute, rtol=relative)
    base = (step.maps.token_segment < 0).cpu()
    assert torch.equal(out.cpu()[base], before.cpu()[base]), "rows of base tokens changed"


def check_linear(case: Case, device: str, *, overwrite: bool = False) -> None:
    step = make_step(case, device=device)
    expected = expected_linear(step, overwrite=overwrite)
    out = step.out.clone()
    if overwrite:
        covered = step.maps.token_segment >= 0
        out[covered] = float("nan")
    module = implementation("lora", out.device)
    if hasattr(module, "reserve_workspace"):
        module.reserve_workspace(step.stack, max(1, step.maps.num_tokens))
        poison_workspaces(module)
    ops.lora_linear(step.x, out, step.stack, step.maps, overwrite=overwrite)
    assert_right(out, expected, step, step.out)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = random.Random(draw(st.integers(0, 2**32)))
    num_adapters = draw(st.integers(0, 9))
    num_slices = draw(st.integers(1, 3))
    largest_rank = draw(st.sampled_from([4, 16, 40, 130, 256]))
    lengths = (
        popularity(draw(st.sampled_from(POPULARITIES)), draw(st.integers(0, 40)), num_adapters, rng)
        if num_adapters
        else ()
    )
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Case(
        in_features=draw(st.sampled_from([8, 64, 129, 200])),
        widths=tuple(draw(st.sampled_from([8, 24, 64, 130])) for _ in range(num_slices)),
        # Rank 0: the adapter does not target the slice.
        ranks=tuple(
            tuple(rng.choice([0, rng.randint(1, largest_rank), largest_rank]) for _ in lengths)
            for _ in range(num_slices)
        ),
        lengths=lengths,
        num_base_tokens=draw(st.integers(0, 3)),
        dtype=dtype,
        row_dtype=draw(st.sampled_from([dtype, torch.float32, torch.bfloat16])),
        seed=rng.randrange(2**32),
        interleaved=draw(st.booleans()),
    )


@settings(max_examples=examples(120), deadline=None)
@given(case=cases(), overwrite=st.booleans())
def test_linear_equals_float64(case: Case, overwrite: bool, device: str) -> None:
    check_linear(case, device, overwrite=overwrite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", POPULARITIES)
def test_popularity_at_decode_and_prefill_sizes(name: str, dtype: torch.dtype, device: str) -> None:
    for num_tokens in (8, 150):
        lengths = popularity(name, num_tokens, 8, random.Random(num_tokens))
        ranks = tuple((16, 8, 64, 1, 16, 256, 3, 16) for _ in range(2))
        check_linear(Case(96, (72, 40), ranks, lengths, num_base_tokens=2, dtype=dtype, seed=num_tokens), device)


@settings(max_examples=examples(40), deadline=None)
@given(case=cases())
def test_shrink_then_expand_equals_float64(case: Case, device: str) -> None:
    step = make_step(case, device=device)
    expected = expected_linear(step)
    out = step.out.clone()
    h = ops.lora_shrink(step.x, step.stack, step.maps)
    assert h.shape == (len(case.widths), step.maps.num_tokens, ops.shrink_width(step.stack))
    assert h.dtype == torch.float32
    ops.lora_expand(h, out, step.stack, step.maps)
    assert_right(out, expected, step, step.out)


def test_shrink_equals_the_reference(device: str) -> None:
    case = Case(100, (16, 16), ((16, 5, 0), (3, 20, 9)), (3, 1, 4), num_base_tokens=1)
    step = make_step(case, device=device)
    h = ops.lora_shrink(step.x, step.stack, step.maps)
    expected = reference.lora_shrink(step.x, step.stack, step.maps, out=torch.zeros_like(h))
    for segment in step.maps.segments:
        for s in range(2):
            rows, rank = slice(segment.start, segment.end), step.stack.host_ranks[s][segment.place]
            torch.testing.assert_close(h[s, rows, :rank], expected[s, rows, :rank], atol=2e-5, rtol=2e-5)


@settings(max_examples=examples(40), deadline=None)
@given(case=cases(), seed=st.integers(0, 1000), overwrite=st.booleans())
def test_row_index_equals_tokens_in_order(case: Case, seed: int, overwrite: bool, device: str) -> None:
    step = make_step(case, device=device)
    order = torch.randperm(step.maps.num_tokens + 2, generator=torch.Generator().manual_seed(seed))[
        : step.maps.num_tokens
    ]
    row_index = order.to(device, torch.int32)
    x = torch.full((step.maps.num_tokens + 2, case.in_features), float("nan"), dtype=case.dtype, device=device)
    out = torch.full((step.maps.num_tokens + 2, step.out.shape[1]), 7.0, dtype=case.dtype, device=device)
    x[order], out[order] = step.x, step.out
    ops.lora_linear(x, out, step.stack, step.maps, row_index=row_index, overwrite=overwrite)
    assert_right(out[order], expected_linear(step, overwrite=overwrite), step, step.out)
    unnamed = torch.ones(len(out), dtype=torch.bool)
    unnamed[order] = False
    assert bool((out[unnamed.to(device)] == 7.0).all())


def test_largest_step(device: str) -> None:
    """16,384 tokens: offsets, grids and tiles where they are largest."""
    lengths = (9000, 1, 7000, 380)
    ranks = ((16, 8, 3, 20), (0, 16, 5, 16))
    check_linear(Case(64, (24, 8), ranks, lengths, num_base_tokens=3, dtype=torch.bfloat16), device)


@pytest.mark.parametrize("overwrite", [False, True])
def test_embedding_of_tokens_out_of_order_equals_float64(overwrite: bool, device: str) -> None:
    step = make_step(Case(50, (24,), ((16, 130, 0),), (4, 1, 2), num_base_tokens=2), device=device)
    order = torch.tensor([5, 0, 9, 3, 1, 8, 2, 6, 7], dtype=torch.int32, device=device)  # nobody names row 4
    token_ids = torch.tensor([0, 49, 7, 7, 3, 2, 1, 5, 5, 11], device=device)
    one_hot = torch.nn.functional.one_hot(token_ids[order.long()], 50).to(step.x.dtype)
    expected = expected_linear(Step(one_hot, step.out, step.stack, step.maps), overwrite=overwrite)
    out = torch.full((10, 24), 7.0, device=device)
    out[order.long()] = step.out
    ops.lora_embedding(token_ids, out, step.stack, step.maps, overwrite=overwrite, row_index=order)
    assert_right(out[order.long()], expected, step, step.out)
    assert bool((out[4] == 7.0).all())


@pytest.mark.parametrize("overwrite", [False, True])
def test_embedding_equals_float64(overwrite: bool, device: str) -> None:
    case = Case(50, (24,), ((16, 3, 0),), (4, 1, 2), num_base_tokens=2)  # 50 = vocabulary
    step = make_step(case, device=device)
    token_ids = torch.tensor([0, 49, 7, 7, 3, 2, 1, 5, 5], device=device)
    one_hot = torch.nn.functional.one_hot(token_ids, 50).to(step.x.dtype)
    expected = expected_linear(Step(one_hot, step.out, step.stack, step.maps), overwrite=overwrite)
    out = step.out.clone()
    ops.lora_embedding(token_ids, out, step.stack, step.maps, overwrite=overwrite)
    assert_right(out, expected, step, step.out)


def test_hand_worked_step(device: str) -> None:
    """Two adapters and one base token, small enough to follow on paper."""
    step = make_step(Case(2, (2,), ((1, 1),), (1, 2), num_base_tokens=1), device=device, shuffle_places=False)
    first = [segment.first_rows[0] for segment in step.maps.segments]
    a, b = step.stack.a[0], step.stack.b[0]
    a[first[0]], b[first[0]] = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 0.0])
    a[first[1]], b[first[1]] = torch.tensor([0.0, 1.0]), torch.tensor([1.0, -1.0])
    step.stack.host_scalings[0][:] = [0.5, 2.0]
    step.stack.scalings.copy_(torch.tensor([[0.5, 2.0]]))
    x = torch.tensor([[1.0, 1.0], [5.0, 3.0], [0.0, 1.0], [9.0, 9.0]], device=device)
    out = torch.ones(4, 2, device=device)
    ops.lora_linear(x, out, step.stack, step.maps)
    # (1 + 2) * 0.5 * [10, 0];  3 * 2 * [1, -1];  1 * 2 * [1, -1];  the base token stays.
    assert out.tolist() == [[16.0, 1.0], [7.0, -5.0], [3.0, -1.0], [1.0, 1.0]]


def test_maps_hand_checked() -> None:
    maps = make_maps([2, 0, 3], places=[4, 1, 0], first_rows=[32, 0, 16], num_tokens=7, pad_to=4)
    assert [(s.start, s.end, s.place, s.first_rows) for s in maps.segments] == [(0, 2, 4, (32,)), (2, 5, 0, (16,))]
    assert maps.segment_starts.tolist() == [0, 2, 5, 5, 5]
    assert maps.places.tolist() == [4, 0, -1, -1]
    assert maps.first_rows.tolist() == [[32, 16, -1, -1]]
    assert maps.token_segment.tolist() == [0, 0, 1, 1, 1, -1, -1]
    assert maps.num_segments.tolist() == [2]


def test_adapter_outside_the_group_is_skipped(device: str) -> None:
    step = make_step(Case(16, (8,), ((4, 0),), (2, 2)), device=device)
    assert step.maps.segments[1].first_rows == (-1,)
    out = step.out.clone()
    ops.lora_linear(step.x, out, step.stack, step.maps)
    assert torch.equal(out[2:], step.out[2:])
    assert not torch.equal(out[:2], step.out[:2])


def test_slices_between_targets_are_untouched(device: str) -> None:
    """Columns that no slice covers belong to someone else."""
    step = make_step(Case(16, (8, 8), ((4,), (4,)), (3,)), device=device)
    stack = step.stack
    wide = torch.full((3, 40), 5.0, device=device)
    object.__setattr__(stack, "slice_starts", (4, 20))
    ops.lora_linear(step.x, wide, stack, step.maps)
    for columns in (slice(0, 4), slice(12, 20), slice(28, 40)):
        assert bool((wide[:, columns] == 5.0).all())
    assert bool((wide[:, 4:12] != 5.0).all())


def test_strided_input_and_output(device: str) -> None:
    step = make_step(Case(64, (32,), ((16, 16),), (2, 3)), device=device)
    x = torch.randn(5, 200, device=device)[:, 40:104]
    x.copy_(step.x)
    out = torch.randn(5, 100, device=device)[:, 10:42]
    out.copy_(step.out)
    ops.lora_linear(x, out, step.stack, step.maps)
    assert_right(out, expected_linear(step), step, step.out)


def test_calls_are_counted_and_empty_steps_do_nothing(device: str) -> None:
    step = make_step(Case(16, (8,), ((4,),), (0,), num_base_tokens=3), device=device)
    out = step.out.clone()
    before = ops.call_count()
    ops.lora_linear(step.x, out, step.stack, step.maps)
    assert torch.equal(out, step.out)
    assert ops.call_count() == before + 1


def test_results_repeat_bit_for_bit(device: str) -> None:
    step = make_step(Case(300, (200, 40), ((16, 64, 8), (16, 64, 8)), (1, 5, 90), dtype=torch.bfloat16), device=device)
    results = []
    for _ in range(3):
        out = step.out.clone()
        ops.lora_linear(step.x, out, step.stack, step.maps)
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: (s.x[:, :-1], s.out), "input width"),
        (lambda s: (s.x[:-1], s.out), "cover"),
        (lambda s: (s.x, s.out[:, :-1]), "beyond the output"),
        (lambda s: (s.x.long(), s.out), "dtype"),
        (lambda s: (s.x, s.out.t().contiguous().t()), "unit stride"),
    ],
    ids=["width", "tokens", "columns", "dtype", "stride"],
)
def test_wrong_arguments_are_named(change: object, message: str, device: str) -> None:
    step = make_step(Case(16, (8,), ((4, 4),), (2, 2)), device=device)
    x, out = change(step)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        ops.lora_linear(x, out, step.stack, step.maps)


def test_narrow_h_is_named(device: str) -> None:
    """An expand of more ranks than h has columns would read the next token's."""
    step = make_step(Case(16, (8,), ((40, 4),), (2, 2)), device=device)
    for width, is_right in ((16, False), (32, False), (48, True)):
        h = torch.zeros(1, step.maps.num_tokens, width, device=device)
        with contextlib.nullcontext() if is_right else pytest.raises(AssertionError, match="narrower"):
            ops.lora_expand(h, step.out, step.stack, step.maps)
        with contextlib.nullcontext() if is_right else pytest.raises(AssertionError, match="narrower"):
            ops.lora_shrink(step.x, step.stack, step.maps, out=h)


def test_stale_plan_is_not_reused(device: str) -> None:
    """Ranks and scalings may change under one maps object (a place is given to another adapter): the op must notice."""
    step = make_step(Case(32, (16,), ((8, 8),), (2, 2)), device=device)
    ops.lora_linear(step.x, step.out.clone(), step.stack, step.maps)
    place = step.maps.segments[0].place
    step.stack.host_ranks[0][place] = 3
    step.stack.ranks[0, place] = 3
    out = step.out.clone()
    ops.lora_linear(step.x, out, step.stack, step.maps)
    assert_right(out, expected_linear(step), step, step.out)


def test_maps_are_plain_data() -> None:
    assert LoraMaps.__dataclass_params__.frozen  # type: ignore[attr-defined]
