"""Calls told while they are written: who is called as soon as that is certain, and the arguments as they come.

What was told cannot be taken back. So where a call that was begun turns out to be none, or is cut off, the rest of what
was written follows as its arguments, as it is: nothing is lost, and the client sees that they are no JSON.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from service.text.calls.call_parser import Arguments, Begun, BracketScanner, Call, Found

# What stands before the arguments of a call is looked at again with every piece of it, until it is as long as this.
_MAX_HEAD_CHARS = 1024


class Feed(ABC):
    """The calls of one text that begins with a mark, told piece by piece."""

    def __init__(self) -> None:
        self._at = 0  # what is before has been told, or says nothing
        self._is_open = False
        self._told: list[tuple[str, list[str]]] = []  # names, and pieces of arguments

    def push(self, held: str) -> list[Found]:
        """What became certain; `held` is what it was, with more behind it."""
        found: list[Found] = []
        while (grown := self._grow(held)) is not None:
            for one in grown:
                if isinstance(one, Begun):
                    self._told.append((one.name, []))
                elif isinstance(one, Arguments):
                    self._told[-1][1].append(one.text)
                found.append(one)
        return found

    def finish(self, text: str, calls: Sequence[Call] | None) -> list[Found]:
        """What of the whole text was not told yet. `calls`: those that it holds, None if it is none."""
        found = self.push(text)
        if calls is not None and self._has_told(calls):
            return found + list(calls[len(self._told) :])
        rest = text[self._at :]
        return found + ([Arguments(rest) if self._is_open else rest] if rest else [])

    def _has_told(self, calls: Sequence[Call]) -> bool:
        told = [Call(name, "".join(pieces)) for name, pieces in self._told]
        return not self._is_open and list(calls[: len(told)]) == told

    @abstractmethod
    def _grow(self, held: str) -> list[Found] | None:
        """The next that is certain, possibly nothing; None if more must come."""


class JsonFeed(Feed):
    """Arguments that are JSON are told as they are written.

    first      what stands before the arguments, with the call's name as `name` or, in JSON, as `quoted`
    following  the same for a call behind another
    accepts    whether a name is one that may be called
    """

    def __init__(
        self,
        first: re.Pattern[str],
        following: re.Pattern[str] | None = None,
        accepts: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__()
        self._head, self._following, self._accepts = first, following, accepts
        self._scanner: BracketScanner | None = None
        self._may_begin = True

    def _grow(self, held: str) -> list[Found] | None:
        if self._scanner is None:
            return self._begin(held)
        end = self._scanner.end(held)
        if end is not None:
            self._scanner, self._is_open = None, False
        start, self._at = self._at, len(held) if end is None else end
        return [Arguments(held[start : self._at])] if start < self._at else None

    def _begin(self, held: str) -> list[Found] | None:
        head = self._following if self._told else self._head
        if head is None or not self._may_begin:
            return None
        match = head.match(held, self._at, self._at + _MAX_HEAD_CHARS)
        if match is None:
            self._may_begin = len(held) - self._at < _MAX_HEAD_CHARS
            return None
        name = _name(match)
        if name is None or not (self._accepts is None or self._accepts(name)):
            return None
        self._at, self._is_open, self._scanner = match.end(), True, BracketScanner(match.end())
        return [Begun(name)]


def _name(match: re.Match[str]) -> str | None:
    groups = match.groupdict()
    if groups.get("name") is not None:
        return match["name"]
    try:
        name = json.loads(match["quoted"])
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None
