"""Stop strings over streamed text: nothing that belongs to a stop string is ever given out."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

_NUM_CODE_POINTS = 0x110000
_ROOT = 0


class StopAutomaton:
    """Aho and Corasick's automaton of a request's stop strings, shared by all its sequences; never changes.

    A state is a beginning of a stop string: the longest one that the text read so far ends with. To read a character
    costs the same on average however many stop strings there are, how long they are and how much they repeat
    themselves; to build it costs a few steps and about 150 bytes for each of their characters.

    depth   for each state, the characters of its beginning
    ending  for each state, the longest stop string that it ends with, as an index into `stop`, -1 for none
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "the schema refuses empty stop strings"
        self.stop = tuple(dict.fromkeys(stop))
        self.depth = array("l", [0])
        self.ending = array("l", [-1])
        self._next: dict[int, int] = {}  # state * _NUM_CODE_POINTS + code point -> state
        self._fallback = array("l", [_ROOT])
        self._goes_on = bytearray(1)
        edges = self._grow_trie()
        for parent, code_point, state in sorted(edges, key=lambda edge: self.depth[edge[0]]):
            self._link(parent, code_point, state)

    def step(self, state: int, code_point: int) -> int:
        """The state after one more character."""
        while (following := self._next.get(state * _NUM_CODE_POINTS + code_point)) is None:
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]
        return following

    def rest(self, state: int) -> int:
        """The longest end of a state's beginning that may still become a stop string, as a state: the state itself,
        unless it is a whole stop string that begins no longer one."""
        while state != _ROOT and not self._goes_on[state]:
            state = self._fallback[state]
        return state

    def _grow_trie(self) -> list[tuple[int, int, int]]:
        """One state for each beginning; (state, code point, state after it) for all of them."""
        edges = []
        for index, text in enumerate(self.stop):
            state = _ROOT
            for char in text:
                code_point = ord(char)
                following = self._next.get(state * _NUM_CODE_POINTS + code_point)
                if following is None:
                    following = len(self.depth)
                    self._next[state * _NUM_CODE_POINTS + code_point] = following
                    self.depth.append(self.depth[state] + 1)
                    self.ending.append(-1)
                    self._fallback.append(_ROOT)
                    self._goes_on.append(0)
                    self._goes_on[state] = 1
                    edges.append((state, code_point, following))
                state = following
            self.ending[state] = index
        return edges

    def _link(self, parent: int, code_point: int, state: int) -> None:
        """Where to go on when no character fits: the longest other beginning that the state ends with."""
        if parent != _ROOT:
            self._fallback[state] = self.step(self._fallback[parent], code_point)
        if self.ending[state] < 0:
            self.ending[state] = self.ending[self._fallback[state]]


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, wherever the pieces are cut.

    Text that may still become a stop string is kept back until it is certain that it does not.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = _ROOT
        self._held: deque[str] = deque()
        self.matched: str | None = None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Add a piece; the text that may be given out. After a match `matched` is set and nothing more comes out.

        A stop string that is complete with a piece that may not end the text is text like any other; one that only
        begins there is found when it is complete.
        """
        if self.matched is not None or not self._automaton.stop:
            return "" if self.matched is not None else piece
        automaton, state = self._automaton, self._state
        for num_read, char in enumerate(piece, start=1):
            state = automaton.step(state, ord(char))
            # The match that ends first is the one a reader of single characters sees; of those the longest.
            if may_end and automaton.ending[state] >= 0:
                self.matched = automaton.stop[automaton.ending[state]]
                self._held.extend(piece[:num_read])
                return self._give(len(self.matched))
        self._state = state = automaton.rest(state)
        self._held.extend(piece)
        return self._give(automaton.depth[state])

    def _give(self, num_kept: int) -> str:
        """Everything but the last characters."""
        return "".join([self._held.popleft() for _ in range(len(self._held) - num_kept)])

    def finish(self) -> str:
        """The text kept back, once no more can come."""
        return self._give(0)
