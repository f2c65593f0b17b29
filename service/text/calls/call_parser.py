"""What a tool call is, and the parts of a parser that all formats have in common."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.text.calls.feeds import Feed


@dataclass(frozen=True)
class Call:
    """One call. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Begun:
    """A call of which more follows: its `Arguments`, up to the next of anything else."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of the call that was begun last."""

    text: str


# JSON schemas of the arguments of the tools that there are, by name.
Tools = Mapping[str, Mapping[str, Any]]
# A text that comes at once is read in pieces, so that what is held outside of calls stays short.
_PIECE_CHARS = 1 << 12
# What a parser finds: text that is none of a call, a call, or a part of one.
Found = str | Call | Begun | Arguments


class CallParser(ABC):
    """Calls in a text that arrives in pieces; what is found does not depend on where the pieces are cut.

    A call is given out when it is complete, since half of one may turn out to be none: what begins like a call and is
    none is text, with all its marks. In pieces it is given out as it is written (`service.text.calls.feeds`).
    A subclass says where a call may begin, where it ends and what it says.

    tools      JSON schemas of the arguments of the tools that there are, by name
    in_pieces  whether calls are given out in pieces
    """

    def __init__(self, tools: Tools, in_pieces: bool = False) -> None:
        self._tools, self._in_pieces = tools, in_pieces
        self._feed: Feed | None = None
        self._held = ""
        self._inside = False

    def push(self, text: str) -> list[Found]:
        """Add a piece; what became certain with it."""
        found: list[Found] = []
        for start in range(0, len(text), _PIECE_CHARS):
            # A text that nobody else has grows where it is, and is not copied for each piece of a long call.
            held, self._held = self._held, ""
            held += text[start : start + _PIECE_CHARS]
            self._held = held
            del held
            found += self._look()
        return found

    def _look(self) -> list[Found]:
        """What is certain of what is held."""
        found: list[Found] = []
        while self._held:
            if not self._inside:
                start, self._inside = self._find_start(self._held)
                if start:
                    found.append(self._take(start))
                if not self._inside:
                    break
                self._enter()
                self._feed = None
            end = self._find_end(self._held)
            if self._feed is None and self._in_pieces:
                self._feed = self._make_feed()
            if end is None:
                found += self._feed.push(self._held) if self._feed is not None else ()
                break
            self._inside = False
            found += self._read(self._take(end))
        return found

    def finish(self) -> list[Found]:
        """What was kept back, once no more can come."""
        text, self._held = self._held, ""
        if not text:
            return []
        return self._read(text) if self._inside else [text]

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    def _read(self, text: str) -> list[Found]:
        calls = self._calls(text)
        if self._feed is not None:
            return self._feed.finish(text, calls)
        return [text] if calls is None else [*calls]

    @abstractmethod
    def _find_start(self, held: str) -> tuple[int, bool]:
        """(characters that are certainly no part of a call, whether one begins behind them)."""

    @abstractmethod
    def _enter(self) -> None:
        """A call begins with the first character that is held."""

    @abstractmethod
    def _find_end(self, held: str) -> int | None:
        """The length of the call that begins `held`, or of what has turned out to be none; None while more must come.
        It is called again with the same text and more behind it."""

    @abstractmethod
    def _make_feed(self) -> Feed | None:
        """What gives out in pieces the call that begins what is held; None if that is not certain yet, or none does."""

    @abstractmethod
    def _calls(self, text: str) -> list[Call] | None:
        """The calls in a text from its first mark to its last, None if they cannot be understood."""


def find_mark(held: str, mark: str) -> tuple[int, bool]:
    """`_find_start` where calls begin with a mark."""
    at = held.find(mark)
    if at >= 0:
        return at, True
    kept = next((size for size in range(min(len(mark) - 1, len(held)), 0, -1) if mark.startswith(held[-size:])), 0)
    return len(held) - kept, False


class BlankScanner:
    """Finds what stands behind blanks, in a text that grows.

    start  where the first of them may stand
    """

    _SOLID = re.compile(r"\S")

    def __init__(self, start: int) -> None:
        self._at = start

    def end(self, held: str) -> int | None:
        """Where the blanks end, None if nothing stands behind them yet. `held` is what it was, with more behind it."""
        match = self._SOLID.search(held, self._at)
        self._at = len(held) if match is None else match.start()
        return None if match is None else self._at


class MarkScanner:
    """Finds the mark that ends a call, outside of JSON's texts, in a text that grows. JSON's texts have no line breaks:
    where one is not closed, the next line is outside of it again."""

    _INSIDE = re.compile(r'["\\\n]')

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._outside = re.compile(f'"|{re.escape(mark)}')
        self._at, self._quoted = 0, False

    def end(self, held: str) -> int | None:
        """Where the mark ends, None if it is not there yet. `held` is what it was, with more behind it."""
        while True:
            match = (self._INSIDE if self._quoted else self._outside).search(held, self._at)
            if match is None:
                kept = 0 if self._quoted else len(self._mark) - 1
                self._at = max(self._at, len(held) - kept)
                return None
            if match.group() == "\\":
                if match.end() == len(held):
                    self._at = match.start()
                    return None
                self._at = match.end() + 1
            elif match.group() == self._mark:
                return match.end()
            else:
                self._quoted = not self._quoted
                self._at = match.end()


class BracketScanner:
    """Finds the end of a JSON object or list, in a text that grows; what it holds need not be valid.

    start  where its first bracket stands
    """

    _OUTSIDE = re.compile(r'["\[\]{}]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self, start: int) -> None:
        self._at, self._depth, self._quoted = start, 0, False

    def end(self, held: str) -> int | None:
        """Where the last bracket ends, None if it is not there yet. `held` is what it was, with more behind it."""
        while True:
            match = (self._INSIDE if self._quoted else self._OUTSIDE).search(held, self._at)
            if match is None:
                self._at = len(held)
                return None
            char = match.group()
            if char == "\\":
                if match.end() == len(held):
                    self._at = match.start()
                    return None
                self._at = match.end() + 1
                continue
            self._at = match.end()
            if char == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if char in "[{" else -1
                if self._depth <= 0:
                    return self._at
