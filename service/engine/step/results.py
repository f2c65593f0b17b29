"""The way of a step's result to the host: one copy into pinned memory, which is waited for when the step is collected.

There are two pinned buffers, used in turn, since the result of one step is read after the next has been launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_LEAST_NUMBERS = 4096


@dataclass(frozen=True, slots=True)
class StepResult:
    """A result under way; `wait` may be called once, before the next but one is fetched."""

    numbers: torch.Tensor
    arrived: Any

    def wait(self) -> np.ndarray:
        """int32 [n], there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.numbers.numpy()


class ResultBuffers:
    """See the module's docstring. On a CPU there is nothing to bring."""

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._buffers = [torch.empty(0, dtype=torch.int32)] * 2

    def fetch(self, packed: torch.Tensor) -> StepResult:
        """Begin to bring packed int32 [n] to the host."""
        if self._runtime is None:
            return StepResult(packed, None)
        num = packed.shape[0]
        buffer, later = self._buffers
        if buffer.shape[0] < num:
            buffer = torch.empty(max(_LEAST_NUMBERS, 2 * num), dtype=torch.int32, pin_memory=True)
        self._buffers = [later, buffer]
        numbers = buffer[:num]
        numbers.copy_(packed, non_blocking=True)
        arrived = self._runtime.Event()
        arrived.record()
        return StepResult(numbers, arrived)
