"""Who holds which conv-state line.

One line per running sequence of a model with convolutions; the tensors live in `service.models.caches`. Line 0 is the
null line and is never handed out. Lines are not cleared: a sequence's first step says "no initial state" in its maps.
The scheduler takes a line when it admits a sequence and gives it back when the sequence ends or is preempted. O(1).
"""

from __future__ import annotations


class StateLines:
    """Lines 1 .. num_lines - 1."""

    def __init__(self, num_lines: int) -> None:
        assert num_lines >= 2, "the null line and one more"
        self.num_lines = num_lines
        self._free = list(range(num_lines - 1, 0, -1))  # a stack: low lines first, freed ones reused while warm
        self._used: set[int] = set()

    @property
    def capacity(self) -> int:
        """Lines that sequences can hold, all together."""
        return self.num_lines - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def take(self) -> int:
        """A line; the caller has looked at `num_free`."""
        line = self._free.pop()
        self._used.add(line)
        return line

    def release(self, line: int) -> None:
        self._used.remove(line)
        self._free.append(line)

    def check_integrity(self) -> None:
        """Every line but 0 is either free or used."""
        assert sorted([*self._free, *self._used]) == list(range(1, self.num_lines)), "lines lost or held twice"
