"""Hermes' format, Qwen 2.5's and Qwen 3's too: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Container

from service.text.calls.call import Call
from service.text.calls.call_parser import BlankScanner, CallParser, find_mark, num_of_mark
from service.text.calls.feeds import Feed, JsonFeed
from service.text.calls.json_reader import JsonReader
from service.text.calls.json_text import BETWEEN, calls_in, head, named

START, END = "<tool_call>", "</tool_call>"
_OPENING = rf"{START}\s*+\[?\s*+"
_HEAD, _NAMED = re.compile(_OPENING + head()), re.compile(_OPENING + named())
_FOLLOWING = re.compile(BETWEEN + head())


class HermesParser(CallParser):
    """Calls between two marks; the end of the answer will do for the second one."""

    def _find_start(self, held: str) -> tuple[int, bool]:
        return find_mark(held, START)

    def _enter(self) -> None:
        self._blanks = BlankScanner(len(START))
        self._scanner: JsonScanner | None = None

    def _find_end(self, held: str) -> int | None:
        if self._scanner is None:
            if (start := self._blanks.end(held)) is None:
                return None
            if held[start] not in "{[":
                return len(START)
            self._scanner = JsonScanner(start)
        return self._scanner.end(held)

    def _make_feed(self) -> Feed:
        return json_feed(self._tools)

    def _calls(self, text: str, *, is_cut: bool) -> list[Call] | None:
        return json_calls(text, is_cut=is_cut)


class JsonScanner:
    """Finds the mark behind JSON, in a text that grows.

    start  where its first bracket stands
    """

    def __init__(self, start: int) -> None:
        self._json = JsonReader(start, END)
        self._at = start

    def end(self, held: str) -> int | None:
        """Where the mark ends, None if it is not there yet. `held` is what it was, with more behind it."""
        if not self._json.is_over:
            self._json.read(held)
            self._at = self._json.at
            if not self._json.is_over:
                return None
        at = held.find(END, self._at)
        self._at = max(self._at, len(held) - len(END) + 1)
        return None if at < 0 else at + len(END)


def json_feed(tools: Container[str]) -> JsonFeed:
    """The streaming parser of one text between marks."""
    return JsonFeed(END, _NAMED, tools, _HEAD, _FOLLOWING)


def json_calls(text: str, *, is_cut: bool) -> list[Call] | None:
    """The calls between the marks, the second of which may be missing or cut."""
    body = text.removeprefix(START)
    return calls_in(body[: len(body) - num_of_mark(body, END)], is_cut=is_cut)
