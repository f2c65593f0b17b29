"""The way of a step's arrays to the device: one copy from pinned memory, which nobody waits for.

The copy runs later than it is asked for, so memory that it reads must not be written meanwhile. There are two pinned
buffers, used in turn, each with an event that says when its latest copy has run: the host prepares a step while the
device still fetches the one before, and waits only if it is two steps ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch


class Event(Protocol):
    """What has been asked of the device so far; of torch.cuda and torch.npu."""

    def record(self) -> object: ...

    def synchronize(self) -> object: ...


class Runtime(Protocol):
    """The part of torch.cuda and torch.npu that is needed here."""

    def Event(self) -> Event: ...


class Staging:
    """Carries arrays to one device. On a CPU the tensors share the arrays' memory."""

    def __init__(self, device: torch.device, runtime: Runtime | None = None) -> None:
        """runtime  of the device; None: torch's, which on a CPU needs none"""
        self._device = device
        self._runtime: Any = runtime
        if runtime is None and device.type != "cpu":
            self._runtime = torch.get_device_module(device)
        self._buffers = [_Buffer(), _Buffer()]

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Tensors of the arrays by their names, on the device; the arrays may be changed afterwards but on a CPU."""
        if self._runtime is None:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        buffer, later = self._buffers
        self._buffers = [later, buffer]
        offsets = [0]
        for array in arrays.values():
            offsets.append(offsets[-1] + -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        host = buffer.writable(offsets[-1], is_pinned=self._device.type != "cpu")
        host_bytes = host.numpy()
        for offset, array in zip(offsets, arrays.values(), strict=False):
            host_bytes[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = host.to(self._device, non_blocking=True, copy=True)
        buffer.copied = self._runtime.Event()
        buffer.copied.record()
        return {
            name: _view(on_device[offset : offset + array.nbytes], array)
            for offset, (name, array) in zip(offsets, arrays.items(), strict=False)
        }


class _Buffer:
    """Host memory, and the event of the copy that reads it, if one may be under way."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.copied: Event | None = None

    def writable(self, num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        """uint8 [num_bytes] that no copy reads any more."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self._bytes) < num_bytes:
            size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        return self._bytes[:num_bytes]


def _view(raw: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    return raw.view(torch.from_numpy(array[:0]).dtype).view(array.shape)


_ALIGNMENT_BYTES = 64  # each array begins on its own line
_LEAST_BYTES = 1 << 16
