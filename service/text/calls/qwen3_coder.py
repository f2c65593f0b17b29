"""Qwen3-Coder's and Qwen 3.5's XML: `<tool_call><function=f><parameter=x>value</parameter></function></tool_call>`.

Values are not JSON's: a text stands there as it is. So the tool's schema tells what a value is.
"""

from __future__ import annotations

import re

from service.text.calls.call_parser import BlankScanner, Call, CallParser, find_mark
from service.text.calls.feeds import Feed
from service.text.calls.hermes import JsonScanner, json_calls, json_feed
from service.text.calls.qwen3_coder_pieces import XmlFeed
from service.text.calls.xml_spelling import END, END_OF_FUNCTION, END_OF_PARAMETER, FUNCTION, PARAMETER, START


class Qwen3CoderParser(CallParser):
    """One call between two marks; the end of the answer will do for the second one, and models forget the first."""

    _is_bare = False

    def _find_start(self, held: str) -> tuple[int, bool]:
        if self._is_bare:  # the second mark behind a call that has no first one is nobody's
            rest = held.lstrip()
            if END.startswith(rest[: len(END)]):
                return len(held) - len(rest), rest.startswith(END)
            self._is_bare = False
        return min((find_mark(held, mark) for mark in (START, FUNCTION)), key=lambda found: (found[0], not found[1]))

    def _enter(self) -> None:
        self._is_bare = self._held.startswith(FUNCTION)
        self._blanks = BlankScanner(0 if self._is_bare else len(START))
        self._scanner: _XmlScanner | JsonScanner | None = None

    def _find_end(self, held: str) -> int | None:
        if held.startswith(END):
            return len(END)
        if self._scanner is None:
            start = self._blanks.end(held)
            if start is None:
                return None
            xml = _XmlScanner(END_OF_FUNCTION if self._is_bare else END)
            self._scanner = JsonScanner(start) if held[start] in "{[" else xml
        return self._scanner.end(held)

    def _make_feed(self) -> Feed | None:
        start = None if self._held.startswith(END) else self._blanks.end(self._held)
        if start is None:
            return None
        return json_feed(self._tools) if self._held[start] in "{[" else XmlFeed(self._tools, is_bare=self._is_bare)

    def _calls(self, text: str, *, is_cut: bool) -> list[Call] | None:
        return [] if text == END else json_calls(text, is_cut=is_cut) if text.startswith(START) else None


class _XmlScanner:
    """Finds the mark that ends a call, outside of its parameters, in a text that grows."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._outside = re.compile(f"{re.escape(PARAMETER)}|{re.escape(mark)}")
        self._at, self._is_inside = 0, False

    def end(self, held: str) -> int | None:
        """Where the mark ends, None if it is not there yet. `held` is what it was, with more behind it."""
        while True:
            if self._is_inside:
                start = held.find(END_OF_PARAMETER, self._at)
                end = start + len(END_OF_PARAMETER)
            else:
                match = self._outside.search(held, self._at)
                start, end = match.span() if match is not None else (-1, 0)
                if match is not None and match.group() == self._mark:
                    return end
            if start < 0:
                self._at = max(self._at, len(held) - len(END_OF_PARAMETER) + 1)
                return None
            self._at, self._is_inside = end, not self._is_inside
