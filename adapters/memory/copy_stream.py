"""The stream on which adapters come to the device, beside that of the steps, and the events that order the two.

    begin        what is asked within goes to the copies' stream
    after_steps  what is asked there from now on begins after all that steps have been asked for until now
    mark         an event behind what was asked there until now
    before_steps the steps' stream goes on only when the mark has been reached

On a host that is its own device everything happens at once, in the order in which it is asked for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class CopyEvent(Protocol):
    """How far the copies have come."""

    def is_completed(self) -> bool:
        """Asks the device, and waits for nothing."""


class CopyStream(Protocol):
    """See the module's docstring. One thread, between launches of steps."""

    def begin(self) -> AbstractContextManager[Any]: ...
    def after_steps(self) -> None: ...
    def mark(self) -> CopyEvent: ...
    def before_steps(self, mark: CopyEvent) -> None: ...


class CompletedCopy:
    """The mark of what has happened."""

    def is_completed(self) -> bool:
        return True


COMPLETED = CompletedCopy()


class NoStream:
    """A host's."""

    def begin(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_steps(self) -> None:
        """They have happened."""

    def mark(self) -> CopyEvent:
        return COMPLETED

    def before_steps(self, mark: CopyEvent) -> None:
        """It has happened."""


class DeviceCopyEvent:
    """A device's event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_completed(self) -> bool:
        return bool(self.event.query())


class DeviceStream:
    """Of a GPU, or of an NPU, whose module of torch is called alike. Not verified on an NPU."""

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
    """The device's own."""
    return NoStream() if device.type == "cpu" else DeviceStream(device)
