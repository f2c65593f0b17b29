"""A stream of copies that notes what is asked of it, and whose marks are reached when the test says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from adapters.memory.device_upload import CopyEvent


class FakeMark:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.number = len(stream.marks)

    def is_completed(self) -> bool:
        return self.number < self.stream.num_reached


class FakeStream:
    """`adapters.memory.device_upload.CopyStream`. events: what was asked, tensor operations as "copies: aten.copy_" or
    "steps: aten.copy_"."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.marks: list[FakeMark] = []
        self.num_reached = 0
        self._where = "steps"

    @contextmanager
    def begin(self) -> Iterator[None]:
        self._where = "copies"
        try:
            yield
        finally:
            self._where = "steps"

    def after_steps(self) -> None:
        self.events.append("copies wait for steps")

    def mark(self) -> CopyEvent:
        self.marks.append(FakeMark(self))
        self.events.append("mark")
        return self.marks[-1]

    def before_steps(self, mark: CopyEvent) -> None:
        assert isinstance(mark, FakeMark)
        self.events.append(f"steps wait for mark {mark.number}")

    def note(self, operation: str) -> None:
        self.events.append(f"{self._where}: {operation}")


class Noted(TorchDispatchMode):
    """Notes with a stream what is asked of tensors; views cost the device nothing and are left out."""

    VIEWS = ("slice", "view", "select", "alias", "detach", "as_strided", "is_pinned", "unbind", "narrow")

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name not in self.VIEWS:
            self._stream.note(name)
        return func(*args, **(kwargs or {}))
