"""The parser of tool calls that all formats share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from service.text.calls.call import Arguments, Begun, Call, Found
from service.text.calls.feeds import Feed

# JSON schemas of the arguments of the tools that there are, by name.
Tools = Mapping[str, Mapping[str, Any]]
# A text that comes at once is read in pieces, so that what is held outside of calls stays short.
_PIECE_CHARS = 1 << 12


class CallParser(ABC):
    """Calls in a text that arrives in pieces; what is found does not depend on where the pieces are cut.

    A call is given out as it is written (`service.text.calls.feeds`), or joined when it is complete. What begins like a
    call and is none is text, with all its marks. A subclass says where a call may begin, where it ends and what reads
    it.

    tools      JSON schemas of the arguments of the tools that there are, by name
    in_pieces  whether calls are given out in pieces
    """

    def __init__(self, tools: Tools, in_pieces: bool = False) -> None:
        self._tools, self._in_pieces = tools, in_pieces
        self._feed: Feed | None = None
        self._held = ""
        self._inside = False
        self._waiting: list[Found] = []  # of the call that is not complete, where it is given out whole

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
        """The certain parts of the held text."""
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
            if self._feed is None:
                self._feed = self._make_feed()
            if end is None:
                self._waiting += self._feed.push(self._held) if self._feed is not None else ()
                found += self._given() if self._in_pieces else ()
                break
            self._inside = False
            found += self._read(self._take(end))
        return found

    def finish(self, *, is_cut: bool = False) -> list[Found]:
        """The withheld rest, once the text has ended. `is_cut`: it ended before the model had."""
        text, self._held = self._held, ""
        if not text:
            return []
        return self._read(text, ends_answer=True, is_cut=is_cut) if self._inside else [text]

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    def _read(self, text: str, *, ends_answer: bool = False, is_cut: bool = False) -> list[Found]:
        """The rest of what is found in a text from its first mark to its last."""
        if self._feed is not None:
            calls_of = partial(self._calls, is_cut=is_cut)
            self._waiting += self._feed.finish(text, calls_of, ends_answer=ends_answer, is_cut=is_cut)
        else:
            calls = self._calls(text, is_cut=is_cut)
            self._waiting += [text] if calls is None else calls
        self._feed = None
        return self._given()

    def _given(self) -> list[Found]:
        """The waiting parts, which are removed."""
        found, self._waiting = self._waiting, []
        return found if self._in_pieces else _joined(found)

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
        """The streaming parser of the call that begins the held text; None if that is not certain yet, or there is
        none."""

    @abstractmethod
    def _calls(self, text: str, *, is_cut: bool) -> list[Call] | None:
        """The calls in a text from its first mark to its last, in a spelling that no feed reads; None if there are
        none."""


def _joined(found: Iterable[Found]) -> list[Found]:
    """Each call that comes in pieces as one."""
    joined, arguments = list[Found](), list[str]()
    for one in found:
        if isinstance(one, Arguments):
            arguments.append(one.text)
            continue
        if arguments:
            joined[-1] = _with_arguments(joined[-1], arguments)
        joined.append(Call(one.name, "") if isinstance(one, Begun) else one)
    if arguments:
        joined[-1] = _with_arguments(joined[-1], arguments)
    return joined


def _with_arguments(begun: Found, pieces: list[str]) -> Call:
    assert isinstance(begun, Call), "arguments of nothing"
    call = Call(begun.name, "".join(pieces))
    pieces.clear()
    return call


def find_mark(held: str, mark: str) -> tuple[int, bool]:
    """`_find_start` where calls begin with a mark."""
    at = held.find(mark)
    if at >= 0:
        return at, True
    return len(held) - num_of_mark(held, mark), False


def num_of_mark(text: str, mark: str) -> int:
    """How many characters of the beginning of a mark, or of all of it, a text ends with."""
    return next((size for size in range(min(len(mark), len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


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
