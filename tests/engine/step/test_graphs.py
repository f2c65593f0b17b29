"""Which steps are captured, in what sizes, and what happens to the others."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from service.engine.model.graphs import (
    FAILED,
    LARGE,
    MANY_LOGITS,
    MEETINGS_WORTH_A_CAPTURE,
    TOO_MANY,
    UPDATE_FAILED,
    CapturedSteps,
)
from service.engine.model.padding import NPU_TOKEN_SIZES, TOKEN_SIZES, Padding, StepSizes, from_python_on_npu

PADDING = Padding(max_sequences=100, max_blocks=2000, block_size=16)
DECODE = StepSizes(5, 5, None, table_blocks=3, all_decode=True, has_lora=True)
MIXED = StepSizes(70, 3, 2, table_blocks=65, all_decode=False, has_lora=False)
BATCH: Any = None


class CountedGraphs:
    """Graphs that count. `fails`: captures raise."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = self.num_updates = 0
        self.fails = self.updates_fail = False

    def capture(self, work: Callable[[], None]) -> CountedGraphs:
        self.num_captures += 1
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        work()
        return self

    def update(self, _batch: Any) -> None:
        if self.updates_fail:
            raise RuntimeError("there are 2 operators, and 1 element")
        self.num_updates += 1

    def replay(self) -> None:
        self.num_replays += 1


def test_sizes_are_padded_to_the_next_that_is_captured() -> None:
    assert PADDING.captured(DECODE) == replace(DECODE, num_tokens=8, num_sequences=8, table_blocks=64)
    # A row of logits for each sequence that there can be; 1,040 tokens need the next width.
    assert PADDING.captured(MIXED) == StepSizes(96, 96, 96, table_blocks=1024, all_decode=False, has_lora=False)
    assert PADDING.captured(replace(MIXED, num_tokens=700)) == StepSizes(
        768, 100, 100, table_blocks=1024, all_decode=False, has_lora=False
    )
    assert PADDING.captured(replace(MIXED, table_blocks=1025)) == StepSizes(
        96, 96, 96, table_blocks=2000, all_decode=False, has_lora=False
    )


def test_padding_costs_at_most_an_eighth_above_eight_tokens_of_decode_steps() -> None:
    for num_tokens in range(9, 65):
        padded = PADDING.captured(replace(DECODE, num_tokens=num_tokens, num_sequences=num_tokens))
        assert padded is not None
        assert num_tokens <= padded.num_tokens < num_tokens + 8


def test_large_steps_and_those_of_many_logits_are_not_captured() -> None:
    assert PADDING.captured(replace(MIXED, num_tokens=TOKEN_SIZES[-1] + 1)) is None
    assert PADDING.captured(replace(MIXED, num_rows=101)) is None
    assert PADDING.wide(replace(MIXED, num_tokens=5000)).num_tokens == 5000


def test_what_is_captured_before_the_first_request_is_padded_as_steps_are() -> None:
    for num_window_rows in (0, 1000):
        first, later = PADDING.to_capture(token_budget=8192, has_lora=True, num_window_rows=num_window_rows)
        assert len({*first, *later}) == len(first) + len(later)
        assert all(PADDING.captured(one) == one for one in (*first, *later))
        assert {(one.has_lora, one.all_decode) for one in first} == set(product((False, True), repeat=2))
        assert len({one.table_blocks for one in first}) == 1 < len({one.table_blocks for one in later})
        assert any(one.window_rows and not one.all_decode for one in later) is bool(num_window_rows)
        for lora in (False, True):  # of the widths at which prompts go on behind long beginnings too
            mixed = {(one.num_tokens, one.table_blocks) for one in (*first, *later) if one.has_lora is lora}
            assert mixed >= set(product(TOKEN_SIZES, {one.table_blocks for one in later}))
        for num_tokens in {one.num_tokens for one in first}:
            early, late = (
                {one.window_rows for one in sizes if one.num_tokens == num_tokens and one.window_rows}
                for sizes in (first, later)
            )
            assert not early or early == {max(late)}, "the longest serves for all"
        numbers = sorted({one.num_tokens for one in first})
        missing = [index for index, number in enumerate(TOKEN_SIZES) if number not in numbers]
        assert (numbers[0], numbers[-1]) == (1, TOKEN_SIZES[-1])
        assert all(after - before > 1 for before, after in pairwise(missing)), "one between two that are captured"
        assert {one.num_tokens for one in (*first, *later)} == set(TOKEN_SIZES)
        assert later[0].num_tokens == TOKEN_SIZES[-2], "what lies between comes next"
    first, later = PADDING.to_capture(token_budget=8192, has_lora=False)
    assert not any(one.has_lora for one in (*first, *later))
    first, _ = PADDING.to_capture(token_budget=100, has_lora=True)
    assert max(one.num_tokens for one in first) == 128


@pytest.mark.parametrize("max_sequences", [1, 2, 5, 40, 90, 192, 256, 300])
def test_full_steps_are_captured_before_the_first_request(max_sequences: int) -> None:
    padding = replace(PADDING, max_sequences=max_sequences)
    first, later = padding.to_capture(token_budget=8192, has_lora=True)
    largest = max(one.num_tokens for one in (*first, *later) if one.all_decode)
    assert largest == padding.max_rows
    assert {one.has_lora for one in first if one.all_decode and one.num_tokens == largest} == {False, True}


def test_a_step_is_captured_when_its_sizes_are_met_first_and_replayed_from_then_on() -> None:
    graphs, work = CountedGraphs(), []
    steps = CapturedSteps(graphs, None, max_graphs=3)
    for _ in range(3):
        steps.run(BATCH, DECODE, True, lambda: work.append(1))
    steps.run(BATCH, MIXED, True, lambda: work.append(2))
    assert work == [1, 2]
    assert (graphs.num_captures, graphs.num_updates, graphs.num_replays) == (2, 4, 4)
    assert (steps.num_replayed, steps.num_graphs, dict(steps.eager)) == (4, 2, {})


def test_a_longer_window_serves_until_a_shorter_one_is_worth_its_capture() -> None:
    graphs = CountedGraphs()
    steps = CapturedSteps(graphs, None, max_graphs=9)
    short, longer, longest = (replace(DECODE, window_rows=rows) for rows in (16, 64, 1024))

    def step(sizes: StepSizes) -> StepSizes:
        chosen = steps.nearest(sizes, Padding.with_longer_windows(sizes))
        steps.run(BATCH, chosen, True, lambda: None)
        return chosen

    assert step(longest) == longest, "nothing else is there"
    assert [step(short) for _ in range(MEETINGS_WORTH_A_CAPTURE)] == [longest] * (MEETINGS_WORTH_A_CAPTURE - 1) + [
        short
    ]
    assert step(short) == short and step(longer) == longest
    assert step(replace(short, num_tokens=16)).num_tokens == 16, "of another number of tokens nothing is there"
    assert (graphs.num_captures, dict(steps.eager)) == (3, {})


def test_a_longer_window_serves_for_good_where_no_more_is_captured() -> None:
    """Memory is full, or a capture failed: a replay that reads more rows is quicker than a step that runs eagerly."""
    graphs = CountedGraphs()
    steps = CapturedSteps(graphs, None, max_graphs=1)
    short, longest = (replace(DECODE, window_rows=rows) for rows in (16, 1024))
    steps.run(BATCH, longest, True, lambda: None)
    for _ in range(2 * MEETINGS_WORTH_A_CAPTURE):
        steps.run(BATCH, steps.nearest(short, Padding.with_longer_windows(short)), True, lambda: None)
    assert (graphs.num_captures, dict(steps.eager)) == (1, {})
    assert steps.num_replayed == 2 * MEETINGS_WORTH_A_CAPTURE + 1


def test_the_others_run_and_say_why() -> None:
    work: list[int] = []
    steps = CapturedSteps(CountedGraphs(), None, max_graphs=3)
    steps.run(BATCH, MIXED, False, lambda: work.append(1))
    steps.run(BATCH, replace(MIXED, num_rows=9), False, lambda: work.append(2))
    off = CapturedSteps(None, "asked for", max_graphs=0)
    off.run(BATCH, DECODE, True, lambda: work.append(3))
    assert work == [1, 2, 3]
    assert dict(steps.eager) == {LARGE: 1, MANY_LOGITS: 1}
    assert dict(off.eager) == {"asked for": 1}
    assert steps.num_replayed == off.num_replayed == 0


def test_there_are_not_more_graphs_than_memory_was_kept_for() -> None:
    steps = CapturedSteps(CountedGraphs(), None, max_graphs=3)
    for index in range(3 + 2):
        steps.run(BATCH, replace(MIXED, table_blocks=index), True, lambda: None)
    assert steps.num_graphs == 3
    assert dict(steps.eager) == {TOO_MANY: 2}


def test_a_capture_that_fails_leaves_steps_that_run(caplog: pytest.LogCaptureFixture) -> None:
    graphs, work = CountedGraphs(), []
    steps = CapturedSteps(graphs, None, max_graphs=3)
    steps.run(BATCH, DECODE, True, lambda: work.append(1))
    graphs.fails = True
    for _ in range(2):
        steps.run(BATCH, MIXED, True, lambda: work.append(2))
    steps.run(BATCH, DECODE, True, lambda: work.append(3))
    assert work == [1, 2, 2]
    assert graphs.num_captures == 2, "it is not tried again"
    assert (steps.num_replayed, dict(steps.eager)) == (2, {FAILED: 2})
    assert caplog.text.count("no longer captured") == 1


def test_nothing_is_collected_while_a_step_is_captured() -> None:
    """A graph of an engine before, freed then, would end the capture."""
    steps, collects = CapturedSteps(CountedGraphs(), None, max_graphs=1), []
    steps.run(BATCH, DECODE, True, lambda: collects.append(gc.isenabled()))
    assert collects == [False] and gc.isenabled()


def test_an_update_that_fails_ends_the_replays(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of the step has run by then, so it runs eagerly, as all do from then on."""
    graphs, work = CountedGraphs(), []
    steps = CapturedSteps(graphs, None, max_graphs=3)
    steps.run(BATCH, DECODE, True, lambda: work.append(1))
    graphs.updates_fail = True
    for index in (2, 3):
        steps.run(BATCH, DECODE, True, lambda index=index: work.append(index))  # type: ignore[misc]
    assert work == [1, 2, 3]
    assert (steps.num_replayed, steps.num_graphs, dict(steps.eager)) == (1, 0, {UPDATE_FAILED: 2})
    assert not steps.serves(DECODE)
    assert caplog.text.count("no longer replayed") == 1


NPU_PADDING = replace(PADDING, is_npu=True)


def test_on_an_npu_decode_steps_that_are_launched_from_python_have_windows() -> None:
    """They save launches; a captured step makes none, and a window for each length would make graphs many."""
    step = replace(DECODE, has_lora=True, window_rows=40)
    assert from_python_on_npu(step) == replace(step, window_rows=64)
    assert NPU_PADDING.captured(step) == replace(NPU_PADDING.captured(DECODE) or DECODE, has_lora=True)
    without = replace(step, num_tokens=65), replace(step, all_decode=False), replace(step, window_rows=1025)
    for one in (*without, DECODE):
        assert from_python_on_npu(one) == replace(one, window_rows=0)


def test_on_an_npu_decode_steps_of_few_sizes_alone_are_padded() -> None:
    """Fused attention takes no empty sequences, and graphs take streams, of which there are few."""
    assert len(NPU_TOKEN_SIZES) == 7
    assert NPU_PADDING.captured(DECODE) == replace(DECODE, num_tokens=8, num_sequences=8, table_blocks=2000)
    for other in (MIXED, replace(DECODE, num_tokens=65, num_sequences=65), replace(DECODE, num_rows=5)):
        assert NPU_PADDING.captured(other) is None
    for max_sequences in (1, 3, 20, 64, 500):
        padding = replace(NPU_PADDING, max_sequences=max_sequences)
        sizes, later = padding.to_capture(token_budget=2048, has_lora=True)
        assert not later
        assert all(padding.captured(one) == one for one in sizes)
        assert len(set(sizes)) == len(sizes) <= 14
        most = min(max_sequences, 64)
        assert max(one.num_tokens for one in sizes) == most == padding.npu_token_sizes[-1]
        assert sizes[0].has_lora and not any(
            one.has_lora for one in padding.to_capture(token_budget=9, has_lora=False)[0]
        )
