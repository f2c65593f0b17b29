"""How arrays reach a device: one copy, from pinned memory that no earlier copy is still reading.

The accelerator's events are played by ones that write down when they are asked for what; the copies are real, between
two places of host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from service.engine.staging import Staging

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


def arrays(step: int, length: int = 5) -> dict[str, np.ndarray]:
    return {
        "ints": np.arange(length, dtype=np.int64) + step,
        "flags": np.array([True, False, step % 2 == 0]),
        "matrix": np.full((2, 3), step, np.int32),
        "none": np.empty((0, 4), np.float32),
        "across": np.arange(6, dtype=np.float32).reshape(2, 3).T + step,
    }


def test_arrays_reach_a_cpu_without_a_copy() -> None:
    array = np.array([1, 2, 3], np.int32)
    tensor = Staging(CPU).upload({"x": array})["x"]
    array[0] = 7
    assert tensor.tolist() == [7, 2, 3]


@pytest.mark.parametrize("length", [5, 100_000])
def test_arrays_arrive_as_they_were_when_handed_over(length: int) -> None:
    staging = Staging(CPU, RecordingRuntime())
    arrived = []
    for step in range(5):
        handed = arrays(step, length)
        arrived.append(staging.upload(handed))
        for array in handed.values():
            array[:] = 0
    for step, tensors in enumerate(arrived):
        for name, array in arrays(step, length).items():
            assert tensors[name].dtype == torch.from_numpy(array).dtype, name
            np.testing.assert_array_equal(tensors[name].numpy(), array)


def test_all_arrays_of_a_step_lie_in_one_copy() -> None:
    tensors = Staging(CPU, RecordingRuntime()).upload(arrays(0))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values() if tensor.numel())


def test_memory_is_rewritten_only_when_its_own_copy_has_run() -> None:
    runtime = RecordingRuntime()
    staging = Staging(CPU, runtime)
    for step in range(4):
        staging.upload(arrays(step))
    assert runtime.log == [
        ("record", 0), ("record", 1), ("wait", 0), ("record", 2), ("wait", 1), ("record", 3),
    ]  # fmt: skip


def test_what_a_copy_reads_is_whole_until_it_has_run() -> None:
    """A copy that runs as late as it may, when it is waited for, still finds what was handed over for it."""
    runtime = RecordingRuntime()
    staging = Staging(CPU, runtime)
    sources: list[np.ndarray] = []

    def read_late(event: int) -> None:
        expected = np.arange(5) + event
        assert any(np.array_equal(source[:40].view(np.int64), expected) for source in sources), event

    runtime.waiting = read_late
    for step in range(6):
        staging.upload(arrays(step))
        sources[:] = [buffer._bytes.numpy() for buffer in staging._buffers]
