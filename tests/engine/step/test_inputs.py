"""How a step's inputs reach a device: one copy, from pinned memory that no earlier copy is still reading.

The accelerator's events are played by ones that write down when they are asked for what; the copies are real, between
two places of host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.sampling.maps import SamplingArrays, index_of, neutral_row
from kernels.sampling.sampling_request import Asked, GivenRow, RowSampling, ask
from service.engine.ipc.messages import MAX_ENDINGS, MAX_LOGIT_BIASES
from service.engine.model.padding import StepSizes
from service.engine.step.inputs import StepInputs
from service.engine.step.maps import ChunkInput, InputLimits, SamplerArrays
from service.models.step_batch import StepBatch

CPU = torch.device("cpu")
SAMPLING_NAMES = [field.name for field in fields(SamplingArrays)]


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


def asked_of(rows: Sequence[RowSampling], given: Sequence[GivenRow] = ()) -> Asked:
    return ask(rows, given, num_logits=8, vocab=2 * MAX_ENDINGS)


def row(step: int, num_biased: int = 0, num_barred: int = 0) -> RowSampling:
    """Wants what names the step."""
    return RowSampling(
        logits_row=7 - step % 7,  # never in order
        parameters=neutral_row(),
        seed=step,
        bias={step + token: float(step) for token in range(num_biased)},
        barred=range(step, step + num_barred),
        num_top=0,
    )


def fill(
    inputs: StepInputs, step: int, asked: Asked | None = None, sizes: StepSizes = SIZES
) -> tuple[StepBatch, SamplerArrays[torch.Tensor] | None]:
    """A step of one token, whose value is the step's number."""
    slots = () if asked is None else [step + i for i in range(len(asked.rows))]
    return inputs.fill([ChunkInput([step], 5, 1, 1)], TABLE, [(4, 5)], sizes, asked, slots)


def tensors_of(sampler: SamplerArrays[torch.Tensor] | None) -> list[torch.Tensor]:
    """Those of any length."""
    assert sampler is not None
    return [tensor for field in fields(sampler) if (tensor := getattr(sampler, field.name)).numel()]


@pytest.mark.parametrize("runtime", [None, RecordingRuntime()], ids=["cpu", "device"])
def test_inputs_arrive_as_they_were_when_handed_over(runtime: RecordingRuntime | None) -> None:
    """Whatever they were in steps before."""
    inputs = StepInputs(LIMITS, runtime)
    for step in range(5):
        rows = [row(step + i, 10 * step, 3 * step) for i in range(step + 1)]
        asked = asked_of(rows, [GivenRow(step, 7, 0)])
        batch, sampler = fill(inputs, step, asked)
        assert batch.token_ids.tolist() == [step, *[0] * 7]
        assert sampler is not None
        assert sampler.sampled_slots.tolist() == [step + i for i in range(len(rows))]
        expected = asked.maps(CPU)
        for name in SAMPLING_NAMES:
            found = getattr(sampler, name)
            assert found.dtype == getattr(expected, name).dtype, name
            np.testing.assert_array_equal(found.numpy(), getattr(expected, name).numpy(), err_msg=name)


def test_there_is_room_for_all_that_requests_may_ask_for() -> None:
    """Of as many sequences as can run, beside the log probabilities of prompts."""
    inputs = StepInputs(LIMITS, RecordingRuntime())
    mask = np.zeros(2 * MAX_ENDINGS // 32, np.int32)
    rows = [replace(row(i, MAX_LOGIT_BIASES, MAX_ENDINGS), slot=i, mask=mask) for i in range(LIMITS.max_sequences)]
    for each in rows:
        each.parameters[index_of("frequency_penalty")] = 1.0
    sizes = StepSizes(LIMITS.token_budget, 8, LIMITS.max_logits_rows, LIMITS.max_blocks, False, False)
    batch, sampler = fill(inputs, 1, asked_of(rows, [GivenRow(i, i, 0) for i in range(8)]), sizes)
    assert batch.positions.shape == (LIMITS.token_budget,)
    assert sampler is not None
    assert sampler.barred.tolist()[-1] == 7 * 2 * MAX_ENDINGS + 7 + MAX_ENDINGS - 1
    assert sampler.sampled_slots.tolist() == list(range(1, 9))


def test_steps_larger_than_the_limits_are_a_bug() -> None:
    inputs = StepInputs(LIMITS, RecordingRuntime())
    with pytest.raises(AssertionError, match="larger"):
        fill(inputs, 1, sizes=replace(SIZES, num_tokens=10 * LIMITS.token_budget))
    with pytest.raises(AssertionError, match="larger"):
        fill(inputs, 1, asked_of([row(i, 0, MAX_ENDINGS) for i in range(4 * LIMITS.max_sequences)]))


def test_the_inputs_of_a_step_lie_in_one_copy_and_never_move() -> None:
    """Those of the model by the sizes of the step, and those of the sampler by its facts, whatever the other."""
    inputs = StepInputs(LIMITS, RecordingRuntime())
    places: dict[object, set[tuple[int, ...]]] = {}
    for step in range(4):
        asked = asked_of([row(step, 5 * (step % 2))])
        sizes = replace(SIZES, table_blocks=2 + step // 2)
        batch, sampler = fill(inputs, step, asked, sizes)
        of_model = [batch.token_ids, batch.positions, batch.attention.block_table]
        of_sampler = tensors_of(sampler)
        assert len({tensor.untyped_storage().data_ptr() for tensor in of_model + of_sampler}) == 1
        for key, tensors in ((sizes, of_model), (asked.facts, of_sampler)):
            assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
            places.setdefault(key, set()).add(tuple(tensor.data_ptr() for tensor in tensors))
    assert [len(found) for found in places.values()] == [1] * 4


def test_memory_is_rewritten_only_when_its_own_copy_has_run() -> None:
    runtime = RecordingRuntime()
    inputs = StepInputs(LIMITS, runtime)
    for step in range(4):
        fill(inputs, step)
    assert runtime.log == [
        ("record", 0), ("record", 1), ("wait", 0), ("record", 2), ("wait", 1), ("record", 3),
    ]  # fmt: skip
