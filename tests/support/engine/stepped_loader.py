"""Adapter loaders without a thread, so that no outcome hangs on its speed: `service.engine.loras.residency.Loader`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class SteppedLoader:
    """Reads when the test says so, in the test's own thread."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def close(self) -> None:
        self._work.clear()

    def do_next(self) -> bool:
        """The oldest work that was submitted; False without any."""
        if not self._work:
            return False
        self._work.popleft()()
        return True

    def do_all(self) -> int:
        """All work, also what comes meanwhile; how much that was."""
        count = 0
        while self.do_next():
            count += 1
        return count


class PromptLoader:
    """Reads at once, in the engine's own thread: what a step holds depends on its requests alone."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def close(self) -> None:
        pass
