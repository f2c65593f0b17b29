"""How a step's inputs reach a device: one copy, from pinned memory that no earlier copy is still reading.

The accelerator's events are played by ones that write down when they are asked for what; the copies are real, between
two places of host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from service.engine.maps import ChunkInput
from service.engine.step_inputs import InputLimits, StepInputs
from service.engine.step_sizes import StepSizes
from service.models.batch import StepBatch

CPU = torch.device("cpu")


class RecordingRuntime:
    """Events with numbers, and what was asked of them in order. `waiting` is called at each wait, with the number."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.num_events = 0
        self.waiting: Any = lambda _event: None

    def Event(self) -> RecordingEvent:
        self.num_events += 1
        return RecordingEvent(self, self.num_events - 1)


class RecordingEvent:
    def __init__(self, runtime: RecordingRuntime, number: int) -> None:
        self._runtime, self._number = runtime, number

    def record(self) -> None:
        self._runtime.log.append(("record", self._number))

    def synchronize(self) -> None:
        self._runtime.log.append(("wait", self._number))
        self._runtime.waiting(self._number)


LIMITS = InputLimits(
    token_budget=64,
    max_sequences=8,
    max_blocks=4,
    max_logits_rows=8,
    block_size=4,
    num_groups=1,
    has_conv=False,
    has_length_limits=False,
    device=CPU,
)
TABLE = np.arange(8, dtype=np.int32).reshape(2, 4)
SIZES = StepSizes(8, 8, None, table_blocks=4, all_decode=True, has_lora=False)


def fill(
    inputs: StepInputs, step: int, sampler: Sequence[np.ndarray] = ()
) -> tuple[StepBatch, tuple[torch.Tensor, ...]]:
    """A step of one token, whose value is the step's number."""
    return inputs.fill([ChunkInput([step], 5, 1, 1)], TABLE, [(4, 5)], SIZES, sampler)


def sampler_arrays(step: int, length: int = 5) -> list[np.ndarray]:
    return [
        np.arange(length, dtype=np.int64) + step,
        np.array([True, False, step % 2 == 0]),
        np.full((2, 3), step, np.int32),
        np.empty((0, 4), np.float32),
        np.arange(6, dtype=np.float32).reshape(2, 3).T + step,
    ]


def test_arrays_of_the_sampler_reach_a_cpu_without_a_copy() -> None:
    array = np.array([1, 2, 3], np.int32)
    (tensor,) = fill(StepInputs(LIMITS), 0, [array])[1]
    array[0] = 7
    assert tensor.tolist() == [7, 2, 3]


@pytest.mark.parametrize("length", [5, 100_000, 1_000_000])
def test_inputs_arrive_as_they_were_when_handed_over(length: int) -> None:
    """The longest arrays of the sampler are larger than the room for them behind the maps."""
    inputs = StepInputs(LIMITS, RecordingRuntime())
    for step in range(5):
        handed = sampler_arrays(step, length)
        batch, sampler = fill(inputs, step, handed)
        for array in handed:
            array[:] = 0
        assert batch.token_ids.tolist() == [step, *[0] * 7]
        for tensor, array in zip(sampler, sampler_arrays(step, length), strict=True):
            assert tensor.dtype == torch.from_numpy(array).dtype
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_what_has_no_room_behind_the_maps_has_memory_that_stays() -> None:
    """It moves only to grow, and the maps never do."""
    inputs, places = StepInputs(LIMITS, RecordingRuntime()), []
    for step, length in enumerate((700_000, 5, 900_000, 700_000, 3_000_000, 800_000)):
        batch, (first, *_) = fill(inputs, step, sampler_arrays(step, length))
        assert first.tolist()[-1] == length - 1 + step
        places.append((batch.token_ids.data_ptr(), first.data_ptr()))
    maps, first = zip(*places, strict=True)
    assert len(set(maps)) == 1
    large, small, *others, grown, after = first
    assert others == [large] * 2 and grown == after
    assert len({large, small, grown}) == 3


def test_the_inputs_of_a_step_lie_in_one_copy_and_never_move() -> None:
    inputs = StepInputs(LIMITS, RecordingRuntime())
    places = []
    for step in range(3):
        batch, sampler = fill(inputs, step, sampler_arrays(step, 5 + step))
        tensors = [batch.token_ids, batch.positions, batch.attention.block_table, *sampler]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}) == 1
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors if tensor.numel())
        places.append([tensor.data_ptr() for tensor in tensors[:3]])
    assert places[0] == places[1] == places[2]


def test_memory_is_rewritten_only_when_its_own_copy_has_run() -> None:
    runtime = RecordingRuntime()
    inputs = StepInputs(LIMITS, runtime)
    for step in range(4):
        fill(inputs, step)
    assert runtime.log == [
        ("record", 0), ("record", 1), ("wait", 0), ("record", 2), ("wait", 1), ("record", 3),
    ]  # fmt: skip
