"""How the CPU's LoRA ops divide a step into products: what shares a batch, and what it reads in place."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.lora import cpu, cpu_plan, ops
from kernels.lora.cpu_plan import Solo, _divided, make_plan
from kernels.lora.maps import Segment
from tests.ops.test_lora import POPULARITIES, assert_right, expected_linear
from tests.support.lora_cases import Case, Step, make_maps, make_step, popularity

WIDE = 4096  # columns of a row of A and of B together, of which 16 ranks are what one batch costs


def members(first_rows: list[int], *, rank: int = 16, lengths: list[int] | None = None) -> list[Solo]:
    """Adjacent segments of one token each, or of `lengths`."""
    found, start = [], 0
    for row, length in zip(first_rows, lengths or [1] * len(first_rows), strict=True):
        found.append(Solo(start, start + length, row, rank, 1.0))
        start += length
    return found


def first_rows(batches: list[list[Solo]]) -> list[list[int]]:
    return [[one.first_row for one in batch] for batch in batches]


def test_evenly_spaced_rows_are_one_batch() -> None:
    assert first_rows(_divided(members([16, 48, 80, 112]), WIDE)) == [[16, 48, 80, 112]]


def test_a_gap_divides_a_batch_of_wide_rows() -> None:
    assert first_rows(_divided(members([0, 16, 48, 64, 80]), WIDE)) == [[0, 16], [48, 64, 80]]


def test_rows_that_go_back_divide_a_batch() -> None:
    assert first_rows(_divided(members([32, 48, 0, 16]), WIDE)) == [[32, 48], [0, 16]]


def test_narrow_rows_are_gathered() -> None:
    assert first_rows(_divided(members([0, 16, 48, 64, 80]), 256)) == [[0, 16, 48, 64, 80]]


def test_a_division_pays_for_the_batches_that_it_adds() -> None:
    rows = [0, 16, 48]  # 384 KiB of 2048 columns, for one batch more than there would be
    assert first_rows(_divided(members(rows), 2048)) == [[0, 16], [48]]
    assert first_rows(_divided(members(rows), 1024)) == [rows]


def test_tokens_that_stand_apart_divide_a_batch_once_copying_them_costs_more() -> None:
    near, far = members([0, 16], lengths=[8, 8]), members([32, 48], lengths=[8, 8])
    far = [Solo(one.start + 100, one.end + 100, one.first_row, one.rank, 1.0) for one in far]
    assert first_rows(_divided([*near, *far], 4096)) == [[0, 16], [32, 48]]
    assert first_rows(_divided([*near, *far], 1024)) == [[0, 16, 32, 48]]


def test_unequal_ranks_divide_a_batch_of_wide_rows() -> None:
    one, other = members([0, 16])
    other = Solo(other.start, other.end, other.first_row, 8, 1.0)
    assert first_rows(_divided([one, other], WIDE)) == [[0], [16]]


@pytest.mark.parametrize("num_columns", [64, WIDE, 64 * WIDE])
def test_every_segment_has_its_product(num_columns: int) -> None:
    """Under any mix: each targeted segment is in one solo or batch, each other one is named as untargeted."""
    rng = random.Random(num_columns)
    for _ in range(200):
        segments, start = [], 0
        for place in range(rng.randint(1, 12)):
            start += rng.choice([0, 0, 3])
            length = rng.choice([1, 1, 2, 8, 9, 100])
            segments.append(Segment(start, start + length, place, (rng.choice([-1, 16 * place, 16 * (20 - place)]),)))
            start += length
        ranks = [rng.choice([0, 8, 16, 16, 40, 300]) for _ in segments]
        plan = make_plan(tuple(segments), 0, ranks, [0.5] * len(segments), num_columns)
        covered = [list(range(one.start, one.end)) for one in plan.solos]
        for batch in plan.batches:
            if batch.members is not None:
                covered.append(batch.members[0].tolist())
            else:
                covered.append(list(range(batch.start, batch.end)))
        covered += [list(range(*bounds)) for bounds in plan.untargeted]
        tokens = [token for segment in segments for token in range(segment.start, segment.end)]
        assert sorted(token for some in covered for token in some) == tokens


@pytest.mark.parametrize("bytes_per_batch", [0, cpu_plan._BYTES_PER_BATCH, 2**60], ids=["divided", "as is", "gathered"])
@pytest.mark.parametrize("name", POPULARITIES)
def test_however_divided_it_equals_float64(name: str, bytes_per_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_plan, "_BYTES_PER_BATCH", bytes_per_batch)
    for num_tokens in (5, 20, 90):
        lengths = popularity(name, num_tokens, 9, random.Random(num_tokens))
        ranks = tuple((16, 16, 16, 8, 16, 0, 40, 16, 300) for _ in range(2))
        for overwrite in (False, True):
            step = make_step(Case(96, (72, 40), ranks, lengths, num_base_tokens=2, seed=num_tokens))
            out = step.out.clone()
            if overwrite:
                out[step.maps.token_segment >= 0] = float("nan")
            ops.lora_linear(step.x, out, step.stack, step.maps, overwrite=overwrite)
            assert_right(out, expected_linear(step, overwrite=overwrite), step, step.out)


def test_kept_views_are_bounded_and_right_after_they_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_MAX_KEPT_VIEWS", 2)
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


def test_rows_of_rank_4_are_not_read_as_if_they_were_16() -> None:
    """Among adapters of rank 16 at uneven distances, whose rows are gathered."""
    ranks = [4, 16, 4, 16, 4, 16]
    first_rows = [0, 4, 24, 28, 52, 56]
    segments = tuple(Segment(at, at + 1, at, (first_row,)) for at, first_row in enumerate(first_rows))
    plan = make_plan(segments, 0, ranks, [1.0] * 6, 512)
    assert sorted(one.rank for one in (*plan.solos, *plan.batches)) == [4, 16]
    assert sum(batch.num_segments * batch.rank for batch in plan.batches) == sum(ranks)
