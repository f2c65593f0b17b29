"""The masks of a step's constrained sequences, made beside the model.

A mask needs all tokens before it, but the model does not: the masks are made in a thread while it runs, and only
sampling waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from service.engine.sequences.constraint import TokenConstraint


class StepMasks:
    """The masks of one step at a time, on their way to the device.

    On a device there are two pinned buffers on the host, used in turn, as in `step_inputs`: one is written while the
    device may still fetch the other.
    """

    def __init__(self, max_sequences: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_sequences, -(-vocab_size // 32))
        self._device_of_steps = device
        self._runtime: Any = None if device.type == "cpu" else torch.get_device_module(device)
        # The buffers, and what is written through.
        self._hosts: list[torch.Tensor] = []
        self._masks: list[np.ndarray] = []
        self._copied: list[Any] = []
        self._device = torch.empty(0, dtype=torch.int32)
        self._turn = 0
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None
        self._num_rows = 0

    def begin(self, constraints: Sequence[TokenConstraint | None]) -> None:
        """Start to make masks, in this order; None: of a sequence that has ended, whose token nobody reads."""
        assert self._filling is None, "the masks of one step at a time"
        if self._thread is None:
            self._allocate()
        assert self._thread is not None
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        self._num_rows = len(constraints)
        masks = self._masks[self._turn][: len(constraints)]
        self._filling = self._thread.submit(_fill, masks, list(constraints))

    def wait(self) -> torch.Tensor:
        """int32 [rows, ceil(vocab / 32)] on the device, valid until the next but one `begin`."""
        assert self._filling is not None, "nothing was begun"
        filling, self._filling = self._filling, None
        filling.result()
        host = self._hosts[self._turn][: self._num_rows]
        if self._runtime is None:
            return host
        on_device = self._device[: self._num_rows]
        on_device.copy_(host, non_blocking=True)
        self._copied[self._turn] = self._runtime.Event()
        self._copied[self._turn].record()
        return on_device

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _allocate(self) -> None:
        is_pinned = self._runtime is not None
        if is_pinned:
            self._hosts = [torch.zeros(self._shape, dtype=torch.int32, pin_memory=True) for _ in range(2)]
            self._masks = [host.numpy() for host in self._hosts]
        else:
            self._masks = [np.zeros(self._shape, np.int32)]
            self._hosts = [torch.from_numpy(masks) for masks in self._masks]
        self._copied = [None] * len(self._hosts)
        if is_pinned:
            self._device = torch.zeros(self._shape, dtype=torch.int32, device=self._device_of_steps)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")


def _fill(masks: np.ndarray, constraints: list[TokenConstraint | None]) -> None:
    for mask, constraint in zip(masks, constraints, strict=True):
        if constraint is None:
            mask[:] = -1
        else:
            constraint.fill(mask)
