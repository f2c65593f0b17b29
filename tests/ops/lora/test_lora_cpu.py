"""How the CPU's LoRA ops divide a step into products: what shares calls, and that nothing reads what is not its own."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch

from kernels.lora import cpu, cpu_plan, ops
from kernels.lora.cpu_plan import CpuPlan, make_plan, shares_of
from kernels.lora.maps import Segment
from tests.ops.lora.test_lora import POPULARITIES, assert_right, expected_linear
from tests.support.ops.lora_cases import Case, Step, make_maps, make_step, popularity

COLUMNS = 512  # of a row of A and of B together: 32 tokens of rank 16 are as much as may share
NAN = float("nan")


def plan_of(lengths: list[int], first_rows: list[int], ranks: list[int], *, gaps: list[int] | None = None) -> CpuPlan:
    """One segment each, in this order; before it as many tokens of nobody as `gaps` says."""
    segments, start = [], 0
    for place, (length, first_row) in enumerate(zip(lengths, first_rows, strict=True)):
        start += gaps[place] if gaps else 0
        segments.append(Segment(start, start + length, place, (first_row,)))
        start += length
    of_step = tuple(segments)
    shares = shares_of(of_step, ranks, COLUMNS)
    return make_plan(of_step, 0, ranks, [1.0] * len(ranks), shares=shares, num_rows=2048)


def pairs_of(plan: CpuPlan) -> list[list[int]]:
    """The rows of each token that shares."""
    assert plan.pairs is not None
    bounds = [*plan.pairs.offsets.tolist(), len(plan.pairs.rows)]
    rows = plan.pairs.rows.tolist()
    return [rows[first:end] for first, end in pairwise(bounds)]


def test_short_segments_share_whatever_their_ranks_lengths_and_rows() -> None:
    plan = plan_of([1, 2, 1], [40, 0, 16], [3, 2, 4])
    assert pairs_of(plan) == [[40, 41, 42], [0, 1], [0, 1], [16, 17, 18, 19]]
    assert not plan.solos
    assert plan.pairs is not None
    assert (plan.pairs.start, plan.pairs.end, plan.pairs.tokens) == (0, 4, None)


def test_tokens_of_others_in_between_are_left_out() -> None:
    pairs = plan_of([1, 2, 1], [0, 16, 8], [2, 2, 2], gaps=[0, 3, 1]).pairs
    assert pairs is not None
    assert pairs.tokens is not None
    assert pairs.tokens.tolist() == [0, 4, 5, 7]


@pytest.mark.parametrize(("length", "is_alone"), [(32, False), (33, True)])
def test_a_segment_of_much_work_has_products_of_its_own(length: int, is_alone: bool) -> None:
    plan = plan_of([1, length, 1, 1], [0, 16, 32, 48], [16] * 4)
    assert [one.start for one in plan.solos] == ([1] if is_alone else [])
    assert len(pairs_of(plan)) == (3 if is_alone else 3 + length)


def test_two_short_segments_have_products_of_their_own() -> None:
    plan = plan_of([1, 1, 33], [0, 16, 32], [16, 16, 16])
    assert plan.pairs is None
    assert sorted(one.start for one in plan.solos) == [0, 1, 2]


def test_no_more_rows_are_read_than_the_ranks_say() -> None:
    ranks = [4, 16, 4, 16, 4, 16]
    assert [len(rows) for rows in pairs_of(plan_of([1] * 6, [0, 4, 24, 28, 52, 56], ranks))] == ranks


@pytest.mark.parametrize("max_work", [0, cpu_plan.MAX_SHARED_WORK, 2**60], ids=["alone", "as is", "shared"])
def test_every_segment_has_its_product(max_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any mix: each token of a targeted segment is in one solo or once among the pairs, others are untargeted."""
    monkeypatch.setattr(cpu_plan, "MAX_SHARED_WORK", max_work)
    rng = random.Random(max_work)
    for _ in range(200):
        count = rng.randint(1, 12)
        lengths = [rng.choice([1, 1, 2, 8, 9, 100]) for _ in range(count)]
        first_rows = [rng.choice([-1, 16 * place, 16 * (20 - place)]) for place in range(count)]
        gaps = [rng.choice([0, 0, 3]) for _ in range(count)]
        ranks = [rng.choice([0, 8, 16, 16, 40, 300]) for _ in range(count)]
        plan = plan_of(lengths, first_rows, ranks, gaps=gaps)
        covered = [list(range(one.start, one.end)) for one in plan.solos]
        if plan.pairs is not None:
            everything = list(range(plan.pairs.start, plan.pairs.end))
            covered.append(everything if plan.pairs.tokens is None else plan.pairs.tokens.tolist())
            assert len(pairs_of(plan)) == len(covered[-1])
        covered += [list(range(*bounds)) for bounds in plan.untargeted]
        starts = [sum(lengths[:at]) + sum(gaps[: at + 1]) for at in range(count)]
        tokens = [start + at for start, length in zip(starts, lengths, strict=True) for at in range(length)]
        assert sorted(token for some in covered for token in some) == tokens


@pytest.mark.parametrize("max_work", [0, cpu_plan.MAX_SHARED_WORK, 2**60], ids=["alone", "as is", "shared"])
@pytest.mark.parametrize("name", POPULARITIES)
def test_however_divided_it_equals_float64(name: str, max_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_plan, "MAX_SHARED_WORK", max_work)
    for num_tokens in (5, 20, 90):
        lengths = popularity(name, num_tokens, 9, random.Random(num_tokens))
        ranks = tuple((16, 16, 16, 8, 16, 0, 40, 16, 300) for _ in range(2))
        for overwrite in (False, True):
            step = make_step(Case(96, (72, 40), ranks, lengths, num_base_tokens=2, seed=num_tokens))
            out = step.out.clone()
            if overwrite:
                out[step.maps.token_segment >= 0] = NAN
            ops.lora_linear(step.x, out, step.stack, step.maps, overwrite=overwrite)
            assert_right(out, expected_linear(step, overwrite=overwrite), step, step.out)


@pytest.mark.parametrize("length", [1, 2, 8])
@pytest.mark.parametrize("rank", [4, 16, 64])
@pytest.mark.parametrize(("in_features", "width"), [(256, 128), (256, 768), (100, 36), (7, 5)])
def test_rows_that_nobody_asked_for_are_not_read(in_features: int, width: int, rank: int, length: int) -> None:
    """A third of the places is asked for; the others, and what is past each rank, hold NaN. Ranks differ by one."""
    case = Case(in_features, (width,), (tuple(rank - at % 2 for at in range(12)),), (length,) * 12, seed=rank)
    step = make_step(case)
    chosen = step.maps.segments[::3]
    owned = torch.zeros(step.stack.a[0].shape[0], dtype=torch.bool)
    for one in chosen:
        owned[one.first_rows[0] : one.first_rows[0] + step.stack.host_ranks[0][one.place]] = True
    for rows in (step.stack.a[0], step.stack.b[0]):
        rows[~owned] = NAN
    num_tokens = length * len(chosen) + 1
    maps = make_maps(
        [length] * len(chosen), [one.place for one in chosen], [one.first_rows[0] for one in chosen], num_tokens
    )
    now = Step(step.x[:num_tokens], step.out[:num_tokens], step.stack, maps)
    out = now.out.clone()
    ops.lora_linear(now.x, out, now.stack, maps)
    assert_right(out, expected_linear(now), now, now.out)
    assert torch.isfinite(out).all()


def test_groups_in_which_the_rows_stand_alike_are_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups 0 and 1; in group 2 each adapter's rows begin 16 later."""
    step = make_step(Case(64, (32,), ((4, 8, 16, 300),), (1, 2, 1, 3), num_base_tokens=1))
    moved = replace(
        step.stack,
        group=2,
        a=tuple(rows.roll(16, 0) for rows in step.stack.a),
        b=tuple(rows.roll(16, 0) for rows in step.stack.b),
        kept={},
    )
    segments = tuple(
        replace(one, first_rows=(first_row, first_row, first_row + 16))
        for one in step.maps.segments
        for first_row in one.first_rows
    )
    maps = replace(step.maps, segments=segments)
    planned = Mock(wraps=make_plan)
    monkeypatch.setattr(cpu, "make_plan", planned)
    for stack in (step.stack, replace(step.stack, group=1, kept={}), moved, step.stack):
        out = step.out.clone()
        ops.lora_linear(step.x, out, stack, maps)
        assert_right(out, expected_linear(step), step, step.out)
    assert planned.call_count == 2


def test_an_adapter_without_finite_values_spoils_its_own_tokens_alone() -> None:
    """Not those of others, nor its own in the next slice, for which the same memory is used again."""
    step = make_step(Case(64, (32, 48), ((4, 4, 4), (4, 4, 4)), (1, 2, 1)))
    spoilt = step.maps.segments[1]
    step.stack.a[0][spoilt.first_rows[0]] = NAN
    out = step.out.clone()
    ops.lora_linear(step.x, out, step.stack, step.maps)
    assert out[1:3, :32].isnan().all()
    out[1:3, :32] = 0.0
    assert torch.isfinite(out).all()


def test_kept_views_are_bounded_and_right_after_they_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MAX_KEPT_VIEWS", 2)
    monkeypatch.setattr(cpu_plan, "MAX_SHARED_WORK", 0)
    step = make_step(Case(64, (32,), ((300, 300, 300, 300),), (1, 2, 3, 4)))
    for _ in range(2):
        out = step.out.clone()
        ops.lora_linear(step.x, out, step.stack, step.maps)
        assert_right(out, expected_linear(step), step, step.out)
        assert 1 <= len(step.stack.kept) <= 2
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_one_stack_read_their_own_rows(seed: int) -> None:
    """What is kept of a stack for later steps is found again by everything that tells two views apart."""
    rng = random.Random(seed)
    rank = (16,) * 7 + (8, 40, 300)
    step = make_step(Case(2100, (2000, 40), (rank, rank), (1,) * len(rank), seed=seed), shuffle_places=bool(seed))
    everyone = step.maps.segments
    for count in range(25):
        if count == 12:  # another adapter takes the range and the place of the last one
            for ranks in step.stack.host_ranks:
                ranks[everyone[-1].place] = 200
        chosen = sorted(rng.sample(everyone, rng.randint(1, len(everyone))), key=lambda segment: segment.start)
        lengths = [rng.choice([1, 1, 1, 2, 8, 9]) for _ in chosen]
        num_tokens = sum(lengths) + 1
        places, rows = [one.place for one in chosen], [one.first_rows[0] for one in chosen]
        maps = make_maps(lengths, places, rows, num_tokens)
        x, before = torch.randn(num_tokens, 2100), torch.randn(num_tokens, 2040)
        now = Step(x, before, step.stack, maps)
        out = before.clone()
        ops.lora_linear(x, out, step.stack, maps)
        assert_right(out, expected_linear(now), now, before)
