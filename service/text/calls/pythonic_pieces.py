"""Calls like Python's, told argument by argument: where a text ends is seen at what stands behind its quote."""

from __future__ import annotations

import re

from service.text.calls.call_parser import Arguments, Begun, Found
from service.text.calls.feeds import Feed
from service.text.calls.pythonic import BEHIND_QUOTE, pythonic_argument

_OPENING = r"\s*+(?P<name>[^\W\d][\w.-]*)\s*\("
_FOLLOWING = re.compile(rf"\s*,{_OPENING}")
_MAX_HEAD_CHARS = 1024


class PythonicFeed(Feed):
    """An argument is told when it is complete.

    mark  what stands before the first call's name, or before the list of calls
    """

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._first = re.compile(rf"{re.escape(mark)}\s*+\[?{_OPENING}")
        self._scanner: _ArgumentScanner | None = None
        self._names: set[str] = set()
        self._is_broken = False

    def _grow(self, held: str) -> list[Found] | None:
        if self._is_broken:
            return None
        if self._scanner is None:
            return self._begin(held)
        end = self._scanner.end(held)
        if end is None:
            return None
        written = held[self._at : end]
        told = self._argument(written) if written.strip() else ""
        # A comma may stand behind the last argument, and nowhere else by itself.
        is_last = held[end] == ")"
        if told is None or not (is_last or told):
            self._is_broken = True
            return None
        self._at = end + 1
        if not is_last:
            self._scanner = _ArgumentScanner(self._at)
            return [Arguments(told)]
        self._scanner, self._is_open = None, False
        return [Arguments((told or ("" if self._names else "{")) + "}")]

    def _begin(self, held: str) -> list[Found] | None:
        head = _FOLLOWING if self._told else self._first
        match = head.match(held, self._at, self._at + _MAX_HEAD_CHARS)
        if match is None:
            return None
        self._at, self._is_open, self._names = match.end(), True, set()
        self._scanner = _ArgumentScanner(self._at)
        return [Begun(match["name"])]

    def _argument(self, written: str) -> str | None:
        """As a member of a JSON object, with what joins it to those before; None if it is none."""
        member = pythonic_argument(written)
        if member is None or member[0] in self._names:
            return None
        self._names.add(member[0])
        return f"{', ' if len(self._names) > 1 else '{'}{member[0]}: {member[1]}"


_QUOTED = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


class _ArgumentScanner:
    """Finds the comma or bracket that ends an argument, in a text that grows; what it holds need not be valid."""

    _OUTSIDE = re.compile(r"[\"'\[\](){},]")
    _SOLID = re.compile(r"\S")

    def __init__(self, start: int) -> None:
        self._at, self._depth, self._quote = start, 0, ""
        self._solid_from = start  # between the last quote and that are blanks alone

    def end(self, held: str) -> int | None:
        """Where it stands, None if it is not there yet. `held` is what it was, with more behind it."""
        while (match := (_QUOTED[self._quote] if self._quote else self._OUTSIDE).search(held, self._at)) is not None:
            char, at = match.group(), match.start()
            self._at = at
            if char == "\\":
                if at + 1 == len(held):
                    return None
                self._at = at + 2
                continue
            if self._quote:
                behind = self._SOLID.search(held, max(at + 1, self._solid_from))
                if behind is None:
                    self._solid_from = len(held)
                    return None
                self._quote = "" if behind.group() in BEHIND_QUOTE else self._quote
            elif char in "\"'":
                self._quote = char
            elif not self._depth and char in ",)]}":
                return at
            elif char != ",":
                self._depth += 1 if char in "[({" else -1
            self._at = at + 1
        self._at = len(held)
        return None
