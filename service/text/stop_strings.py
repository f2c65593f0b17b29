"""Stop strings over streamed text: nothing that belongs to a stop string is ever given out."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, wherever the pieces are cut.

    Text that may still become a stop string is kept back until it is certain that it does not.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "the schema refuses empty stop strings"
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Add a piece; the text that may be given out. After a match `matched` is set and nothing more comes out.

        A stop string that is complete with a piece that may not end the text is text like any other; one that only
        begins there is found when it is complete.
        """
        if self.matched is not None or not self._stop:
            return "" if self.matched is not None else piece
        text = self._held + piece
        # The match that ends first is the one a reader of single characters sees; of those the longest starts first.
        starts = {stop: self._start(text, stop) for stop in self._stop} if may_end else {}
        found = [(start + len(stop), -len(stop), stop) for stop, start in starts.items() if start >= 0]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _start(self, text: str, stop: str) -> int:
        """Where `stop` stands in the text, -1 if nowhere. One that is kept back whole could not end the text, and was
        kept as the beginning of a longer one."""
        return text.find(stop, max(len(self._held) - len(stop) + 1, 0))

    def finish(self) -> str:
        """The text kept back, once no more can come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
