"""LFM2's format: `<|tool_call_start|>[name(key="value"), other()]<|tool_call_end|>`, or JSON between the same marks."""

from __future__ import annotations

import re

from service.text.calls.call_parser import BlankScanner, Call, CallParser, find_mark
from service.text.calls.feeds import Feed, JsonFeed
from service.text.calls.json_text import BETWEEN, calls_in, head, named
from service.text.calls.pythonic_pieces import PythonicFeed

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
