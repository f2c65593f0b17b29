"""LFM2's format: `<|tool_call_start|>[name(key="value"), other()]<|tool_call_end|>`, or JSON between the same marks."""

from __future__ import annotations

import re
from collections.abc import Container

from service.text.calls.call import Arguments, Begun, Call, Found
from service.text.calls.call_parser import BlankScanner, CallParser, find_mark, num_of_mark
from service.text.calls.feeds import MAX_HEAD_CHARS, Feed, JsonFeed
from service.text.calls.json_text import BETWEEN, calls_in, head, named
from service.text.calls.pythonic import BEHIND_QUOTE, pythonic_argument

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
_OPENING = rf"{re.escape(START)}\s*+\[?\s*+"
_HEAD, _NAMED = re.compile(_OPENING + head()), re.compile(_OPENING + named())
_FOLLOWING = re.compile(BETWEEN + head())


class Lfm2Parser(CallParser):
    """All calls of an answer in one list; the end of the answer will do for the second mark.

    The first end mark ends it, quoted or not: templates, and so models, leave quotes inside of quotes as they are.
    """

    def _find_start(self, held: str) -> tuple[int, bool]:
        return find_mark(held, START)

    def _enter(self) -> None:
        self._at = len(START)
        self._list = BlankScanner(self._at)
        self._first: BlankScanner | None = None  # inside of the list

    def _find_end(self, held: str) -> int | None:
        end = held.find(END, self._at)
        self._at = max(self._at, len(held) - len(END) + 1)
        return None if end < 0 else end + len(END)

    def _make_feed(self) -> Feed | None:
        if self._first is None:
            if (start := self._list.end(self._held)) is None:
                return None
            self._first = BlankScanner(start + self._held.startswith("[", start))
        if (start := self._first.end(self._held)) is None:
            return None
        if self._held.startswith("{", start):
            return JsonFeed(END, _NAMED, self._tools, _HEAD, _FOLLOWING)
        return PythonicFeed(START, END, self._tools)

    def _calls(self, text: str, *, is_cut: bool) -> list[Call] | None:
        return calls_in(text.removeprefix(START).removesuffix(END), is_cut=is_cut)


# A name, and behind its bracket the end of the call or what an argument begins with.
_PYTHONIC_OPENING = (
    r"\s*+(?P<name>[^\W\d][\w.-]*)\s*\((?=\s*+(?:\)|[^\W\d][\w-]*+\s*+=\s*+"
    r"(?:[\"'\[({\d+-]|(?:None|True|False|null|true|false)(?![\w.]))))"
)
_PYTHONIC_FOLLOWING = re.compile(rf"[\s)\]}}]*+,{_PYTHONIC_OPENING}")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonicFeed(Feed):
    """An argument is given out when it is complete.

    start  stands before the first call's name, or before the list of calls
    mark   ends it
    """

    def __init__(self, start: str, mark: str, tools: Container[str]) -> None:
        before = rf"{re.escape(start)}\s*+\[?"
        super().__init__(mark, re.compile(rf"{before}\s*+(?P<name>[^\W\d][\w.-]*)\s*\("), tools)
        self._first = re.compile(before + _PYTHONIC_OPENING)
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
        given = self._argument(written) if written.strip() else ""
        # A comma may stand behind the last argument, and nowhere else by itself. Another bracket than the call's own
        # says that its own is missing.
        is_last = held[end] != ","
        if given is None or not (is_last or given):
            self._is_broken = True
            return None
        self._at = end + (held[end] in ",)")
        if not is_last:
            self._scanner = _ArgumentScanner(self._at)
            return [Arguments(given)]
        return [Arguments(given + self._close())]

    def _begin(self, held: str) -> list[Found] | None:
        head = _PYTHONIC_FOLLOWING if self._given else self._first
        match = head.match(held, self._at, self._at + MAX_HEAD_CHARS)
        if match is None:
            return None
        self._at, self._is_open, self._names = match.end(), True, set()
        self._scanner = _ArgumentScanner(self._at)
        return [Begun(match["name"])]

    def _end(self, text: str, *, is_cut: bool) -> list[Found]:
        assert self._scanner is not None, "no argument is open"
        written = text[self._at : len(text) - num_of_mark(text, self._mark)]
        self._at, self._is_open = len(text), False
        if self._is_broken:
            return [Arguments(written)]
        if not written.strip():
            return [] if is_cut else [Arguments(self._close())]
        # A text may end with the last quote or go on; an argument that is not complete is shown as far as it goes.
        brackets, quote = self._scanner.closing
        for closing in (brackets, quote + brackets) if is_cut else ("",):
            if (given := self._argument(written + closing)) is not None:
                return [Arguments(given[: len(given) - len(closing)] + ("" if is_cut else self._close()))]
        return [] if is_cut else [Arguments(written)]

    def _close(self) -> str:
        self._scanner, self._is_open = None, False
        return "}" if self._names else "{}"

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
        self._at, self._quote = start, ""
        self._open: list[str] = []  # what will close the brackets that are open
        self._solid_from = start  # between the last quote and that are blanks alone

    @property
    def closing(self) -> tuple[str, str]:
        """The brackets and the quote that are missing to the end of the argument."""
        return "".join(reversed(self._open)), self._quote

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
            elif not self._open and char in ",)]}":
                return at
            elif char in _CLOSING:
                self._open.append(_CLOSING[char])
            elif char != ",":
                self._open.pop()
            self._at = at + 1
        self._at = len(held)
        return None
