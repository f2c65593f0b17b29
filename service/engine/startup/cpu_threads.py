"""How many CPU threads a matrix product gets: found by timing decode steps at the start.

Each thread of a product waits for the slowest, and on a core that another process has, that one waits for its turn:
beside busy neighbours fewer threads are many times as fast. How busy a machine is shows in no number that holds in a
container too, so steps are timed.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from service.engine.ipc.messages import Sampling, Submit

if TYPE_CHECKING:
    from service.engine.engine import Engine

log = logging.getLogger(__name__)

# Timed steps of one number of threads, beside one that starts the threads.
NUM_STEPS = 9
# No more steps of a number once they have taken so long; a first step as long as the second figure stands alone.
LIMIT_SECONDS, LONE_SECONDS = 0.15, 1.0
# More threads must be faster by this much: the API process wants to run, too.
MIN_GAIN = 1.05
# Sequences of a timed step, as of a server with some work; and most steps of a sequence before it begins anew.
NUM_SEQUENCES, MAX_STEPS = 8, 128


def candidates(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent < most]
    return [*powers, most]


def choose_num_threads(
    most: int, set_num_threads: Callable[[int], None], step: Callable[[], None], clock: Callable[[], float]
) -> int:
    """Time `step` with 1, 2, 4 ... `most` threads, and leave the number set that was fastest.

    From few to many, since too many can take a hundred times as long, and only as long as more are faster. A number's
    time is the median of its steps; a step as long as all steps of the best number before is proof enough.
    """
    best, best_seconds = 1, float("inf")
    for number in candidates(most):
        set_num_threads(number)
        seconds = _time(step, clock, best_seconds * NUM_STEPS)
        log.debug("a decode step with %d threads: %.2f ms", number, seconds * 1e3)
        if seconds * MIN_GAIN > best_seconds:
            break
        best, best_seconds = number, seconds
    set_num_threads(best)
    return best


def _time(step: Callable[[], None], clock: Callable[[], float], enough_seconds: float) -> float:
    """Median seconds of a step. The first one starts the threads: it counts only where there is time for no other."""
    seconds: list[float] = []
    started = clock()
    while len(seconds) <= NUM_STEPS:
        before = clock()
        step()
        seconds.append(clock() - before)
        is_first = len(seconds) == 1
        if clock() - started >= (LONE_SECONDS if is_first else LIMIT_SECONDS):
            break
        if not is_first and seconds[-1] >= enough_seconds:
            break
    return statistics.median(seconds[1:] or seconds)


class DecodeStep:
    """Calls are decode steps of a few base sequences; `end` forgets them. For an engine that nobody else steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_sequences = min(NUM_SEQUENCES, engine.config.max_sequences)
        capacity = engine.kv_capacity_tokens // self._num_sequences
        self._max_tokens = min(engine.capacity.max_model_len_tokens, capacity, MAX_STEPS) - 1

    def __call__(self) -> None:
        if self._engine.num_requests == 0:
            sampling = Sampling(max_tokens=max(self._max_tokens, 1), temperature=0.0, ignore_eos=True)
            for index in range(self._num_sequences):
                self._engine.submit(Submit(f"step-{index}", (0,), sampling))
            self._engine.step()
        self._engine.step()

    def end(self) -> None:
        for index in range(self._num_sequences):
            self._engine.abort(f"step-{index}")
        self._engine.forget_history()
