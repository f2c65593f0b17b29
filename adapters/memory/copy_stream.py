"""The stream that copies adapters to the device beside the steps' stream, and the events that order the two.

    begin         work issued inside the context goes to the copy stream
    after_steps   copies issued from now on start after all steps launched so far
    mark          records an event behind all copies issued so far
    before_steps  steps launched from now on wait for the event

On a CPU everything happens at once, in the order of the calls.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class CopyEvent(Protocol):
    """An event on the copy stream."""

    def is_completed(self) -> bool:
        """Whether the copies before it are done. Queries the device without blocking."""


class CopyStream(Protocol):
    """See the module's docstring. One thread, between launches of steps."""

    def begin(self) -> AbstractContextManager[Any]: ...
    def after_steps(self) -> None: ...
    def mark(self) -> CopyEvent: ...
    def before_steps(self, mark: CopyEvent) -> None: ...


class CompletedCopy:
    """The event of copies that are already done."""

    def is_completed(self) -> bool:
        return True


COMPLETED = CompletedCopy()


class NoStream:
    """The copy stream of a CPU, where copies are synchronous."""

    def begin(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_steps(self) -> None:
        """They have happened."""

    def mark(self) -> CopyEvent:
        return COMPLETED

    def before_steps(self, mark: CopyEvent) -> None:
        """It has happened."""


class DeviceCopyEvent:
    """An event of the device."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_completed(self) -> bool:
        return bool(self.event.query())


class DeviceStream:
    """The copy stream of a GPU, or of an NPU, whose torch module has the same calls. Not verified on an NPU."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device)

    def begin(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def after_steps(self) -> None:
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        self._stream.wait_event(event)

    def mark(self) -> CopyEvent:
        event = self._module.Event()
        event.record(self._stream)
        return DeviceCopyEvent(event)

    def before_steps(self, mark: CopyEvent) -> None:
        assert isinstance(mark, DeviceCopyEvent), "a mark of another stream"
        self._module.current_stream(self._device).wait_event(mark.event)


def copy_stream_of(device: torch.device) -> CopyStream:
    """A new copy stream of the device."""
    return NoStream() if device.type == "cpu" else DeviceStream(device)
