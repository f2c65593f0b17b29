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
# Around JSON that a model writes as a block of Markdown.
_FENCE = re.compile(r"`{1,3}(?:json?|js?)?\s{0,64}")
_OPENING = rf"{START}\s*+(?:{_FENCE.pattern})?\[?\s*+"
_HEAD, _NAMED = re.compile(_OPENING + head()), re.compile(_OPENING + named())
_FOLLOWING = re.compile(BETWEEN + head())


class HermesParser(CallParser):
    """Calls between two marks; the end of the answer or the next call's first mark will do for the second one."""

    _is_unended = _is_behind_unended = False

    def _find_start(self, held: str) -> tuple[int, bool]:
        return find_mark(held, START)

    def _enter(self) -> None:
        self._blanks = BlankScanner(len(START))
        self._scanner: JsonScanner | None = None
        self._is_behind_unended, self._is_unended = self._is_unended, False

    def _find_end(self, held: str) -> int | None:
        if self._scanner is None:
            if (start := self._blanks.end(held)) is None:
                return None
            if (fence := _FENCE.match(held, start)) is not None:
                start = fence.end()
                if start == len(held):
                    return None
            if held[start] not in "{[":
                return len(START)
            self._scanner = JsonScanner(start)
        end = self._scanner.end(held)
        self._is_unended = end is not None and not held.endswith(END, 0, end)
        return end

    def _make_feed(self) -> Feed:
        return json_feed(self._tools)

    def _calls(self, text: str, *, is_cut: bool) -> list[Call] | None:
        if self._is_behind_unended and text.strip() == START:  # it was written in the place of the second one
            return []
        return json_calls(text, is_cut=is_cut)


_MARK = re.compile(rf"{END}|(?={START})")


class JsonScanner:
    """Finds the mark behind JSON, or the first mark of the next call, in a text that grows.

    start  where its first bracket stands
    """

    def __init__(self, start: int) -> None:
        self._json = JsonReader(start, END)
        self._at = start

    def end(self, held: str) -> int | None:
        """Where the call ends, None if the mark is not there yet. `held` is what it was, with more behind it."""
        if not self._json.is_over:
            self._json.read(held)
            self._at = self._json.at
            if not self._json.is_over:
                return None
        match = _MARK.search(held, self._at)
        self._at = max(self._at, len(held) - len(END) + 1)
        return None if match is None else match.end()


def json_feed(tools: Container[str]) -> JsonFeed:
    """The streaming parser of one text between marks."""
    return JsonFeed(END, _NAMED, tools, _HEAD, _FOLLOWING)


def json_calls(text: str, *, is_cut: bool) -> list[Call] | None:
    """The calls between the marks, the second of which may be missing or cut."""
    body = text.removeprefix(START)
    body = body[: len(body) - num_of_mark(body, END)].strip()
    if (fence := _FENCE.match(body)) is not None:
        body = body[fence.end() :].rstrip("`")
    return calls_in(body, is_cut=is_cut)
