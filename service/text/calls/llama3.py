"""Llama 3's JSON format: `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`; `;` between calls, or a
list of them."""

from __future__ import annotations

import re

from service.text.calls.call import Call
from service.text.calls.call_parser import BlankScanner, CallParser, find_mark
from service.text.calls.feeds import Feed, JsonFeed
from service.text.calls.json_reader import JsonReader
from service.text.calls.json_text import BETWEEN, calls_in, head, named

TAG = "<|python_tag|>"
_KEYS = ("name", "type", "function", "parameters", "arguments")
_NAME_KEYS = ("name", "function")
_BLANKS = r"[ \t\r\n]{0,64}"
_OPENING = re.compile(rf'\{{{_BLANKS}(?:\{{{_BLANKS})?(?:"(?P<key>[a-z]*)(?:"{_BLANKS}(?P<colon>:)?)?)?')

_BEFORE = rf"(?:{re.escape(TAG)})?\s*+\[?\s*+"
_HEAD, _NAMED = re.compile(_BEFORE + head(*_NAME_KEYS)), re.compile(_BEFORE + named(*_NAME_KEYS))
_FOLLOWING = re.compile(BETWEEN + head(*_NAME_KEYS))
# A brace, with the bracket of the list that it begins; and such a bracket where the text ends.
_BRACE, _LIST = re.compile(rf"(?:\[{_BLANKS})?\{{"), re.compile(rf"\[{_BLANKS}\Z")
# Stands between two calls, and outside of texts nowhere in one.
SEPARATOR = ";"


class Llama3Parser(CallParser):
    """Calls have no mark of their own, so an object that is not behind the tag must name a tool that there is."""

    def _find_start(self, held: str) -> tuple[int, bool]:
        end, tagged = find_mark(held, TAG)
        at = 0
        while (brace := _BRACE.search(held, at, end)) is not None:
            if (opens := _opens_call(held, brace.end() - 1)) is not False:
                return brace.start(), bool(opens)
            at = brace.end()
        begun = None if tagged else _LIST.search(held, at)
        return (end, tagged) if begun is None else (begun.start(), False)

    def _enter(self) -> None:
        self._blanks = BlankScanner(len(TAG) if self._held.startswith(TAG) else 0)
        self._scanner: JsonReader | None = None

    def _find_end(self, held: str) -> int | None:
        if self._scanner is None:
            start = self._blanks.end(held)
            if start is None:
                return None
            opens: bool | None = held[start] == "{"
            if held[start] == "[":
                brace = _BRACE.match(held, start)
                is_open = _LIST.match(held, start) is not None
                opens = _opens_call(held, brace.end() - 1) if brace is not None else None if is_open else False
            if not opens:
                return None if opens is None else len(TAG)  # of something else, code say
            self._scanner = JsonReader(start, SEPARATOR)
        self._scanner.read(held)
        return self._scanner.at if self._scanner.is_over else None

    def _make_feed(self) -> Feed:
        only_tools = not self._held.startswith(TAG)
        return JsonFeed(SEPARATOR, _NAMED, self._tools, _HEAD, _FOLLOWING, only_tools=only_tools)

    def _calls(self, text: str, *, is_cut: bool) -> list[Call] | None:
        calls = calls_in(text.removeprefix(TAG), _NAME_KEYS, is_cut=is_cut)
        if calls and not text.startswith(TAG) and calls[0].name not in self._tools:
            return None
        return calls


def _opens_call(held: str, at: int) -> bool | None:
    """Whether the brace at `at` begins an object with a key of calls first; None if that is not certain yet."""
    match = _OPENING.match(held, at)
    assert match is not None, "the brace is there"
    key = match["key"] or ""
    if match["colon"]:
        return key in _KEYS
    return None if match.end() == len(held) and any(one.startswith(key) for one in _KEYS) else False
