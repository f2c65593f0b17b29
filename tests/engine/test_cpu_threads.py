"""The number of CPU threads, chosen with made-up steps and a made-up clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from service.engine.process import LIMIT_SECONDS, LONE_SECONDS, candidates, choose_num_threads


class Machine:
    """Steps that take as long as `seconds(threads, number of the step)` says."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds
        self.now = 0.0
        self.num_threads = 0
        self.tried: list[int] = []
        self.num_steps = 0

    def set_num_threads(self, number: int) -> None:
        self.num_threads = number
        self.tried.append(number)

    def step(self) -> None:
        self.now += self._seconds(self.num_threads, self.num_steps)
        self.num_steps += 1

    def choose(self, most: int) -> int:
        chosen = choose_num_threads(most, self.set_num_threads, self.step, lambda: self.now)
        assert self.num_threads == chosen
        return chosen


def test_the_numbers_double_up_to_all() -> None:
    assert [candidates(most) for most in (1, 2, 3, 4, 6, 16)] == [
        *([1], [1, 2], [1, 2, 3], [1, 2, 4]),
        *([1, 2, 4, 6], [1, 2, 4, 8, 16]),
    ]


@pytest.mark.parametrize("most", [1, 2, 3, 8, 96])
def test_an_idle_machine_uses_all(most: int) -> None:
    assert Machine(lambda threads, _: 0.1 / threads).choose(most) == most


def test_no_more_threads_than_help() -> None:
    machine = Machine(lambda threads, _: 0.01 / min(threads, 4))
    assert machine.choose(64) == 4
    assert machine.tried == [1, 2, 4, 8, 4]
    assert Machine(lambda threads, _: 0.01 / (1 + 0.05 * threads)).choose(2) == 1  # 5 % is not worth a core


def test_beside_busy_neighbours_one_is_left() -> None:
    """A hundred times as slow, and two of those steps are all that it costs."""
    machine = Machine(lambda threads, _: 0.002 if threads == 1 else 0.2)
    assert machine.choose(2) == 1
    assert machine.now < 0.43


def test_single_slow_steps_decide_nothing() -> None:
    slow: Iterator[int] = iter(range(10**6))
    assert Machine(lambda threads, _: 0.015 if next(slow) % 3 == 1 else 0.002 / threads).choose(2) == 2


def test_the_step_that_starts_the_threads_does_not_count() -> None:
    def seconds(threads: int, step: int) -> float:
        is_first = step in (0, 10)
        return 2 * LIMIT_SECONDS if is_first else 0.004 / threads

    assert Machine(seconds).choose(2) == 2


def test_a_large_model_is_timed_once_for_each_number() -> None:
    machine = Machine(lambda threads, _: 8 * LONE_SECONDS / threads)
    assert machine.choose(8) == 8
    assert machine.num_steps == 4


def test_a_small_one_takes_a_bounded_time() -> None:
    machine = Machine(lambda threads, _: 0.02 / threads)
    machine.choose(4)
    assert machine.now <= 3 * (LIMIT_SECONDS + 0.02)
