"""Slots and lines: which sequence holds which.

A running sequence owns one slot, a small integer that names its row of the request table (`inputs.py`) and its
penalty counts, and one line, which names its convolution and delta-net states (`state_lines.py`). Number 0 is the
null slot and the null line, which padding points at, and is never handed out. Nothing is cleared when one changes
hands: a sequence's first step says "no initial state" in its maps. The scheduler acquires both when it admits a
sequence and frees them when the sequence ends or is preempted. O(1).
"""

from __future__ import annotations


class Slots:
    """Slots, or lines, 1 .. num_slots - 1."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 2, "the null slot and one more"
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))  # a stack: low slots first, freed ones reused while warm
        self._used: set[int] = set()

    @property
    def capacity(self) -> int:
        """Slots that sequences can hold, all together."""
        return self.num_slots - 1

    @property
    def free(self) -> list[int]:
        """Slots that nobody has."""
        return [*self._free]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def acquire(self) -> int:
        """A slot; the caller has looked at `num_free`."""
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self._used.remove(slot)
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Every slot but 0 is either free or used."""
        assert sorted([*self._free, *self._used]) == list(range(1, self.num_slots)), "slots lost or held twice"
