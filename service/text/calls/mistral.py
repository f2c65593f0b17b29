"""Mistral's formats: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and since its eleventh tokenizer
`[TOOL_CALLS]name[ARGS]{...}` for each call, in some models without `[ARGS]` or with a `[CALL_ID]` before it."""

from __future__ import annotations

import re

from service.text.calls.call import Call
from service.text.calls.call_parser import BlankScanner, CallParser, find_mark
from service.text.calls.feeds import Feed, JsonFeed
from service.text.calls.json_reader import JsonReader
from service.text.calls.json_text import BETWEEN, calls_in, head, named

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_BEHIND_NAME = r"\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?(?:\[ARGS\]\s*+)?"
_NAME = re.compile(rf"\s*([\w.-]+){_BEHIND_NAME}")
_MAX_NAME_CHARS = 256
_START = re.escape(START)
_HEAD = re.compile(rf"{_START}\s*+(?:\[?\s*+{head()}|(?P<name>[\w.-]+){_BEHIND_NAME}(?=\{{))")
_NAMED = re.compile(rf"{_START}\s*+(?:\[?\s*+{named()}|(?P<name>[\w.-]+)\s*+(?:\[(?:C|A)|\{{))")
_FOLLOWING = re.compile(BETWEEN + head())


class MistralParser(CallParser):
    """Parses the text behind a mark: a list of calls, one call, or a name with its arguments."""

    def _find_start(self, held: str) -> tuple[int, bool]:
        return find_mark(held, START)

    def _enter(self) -> None:
        self._blanks = BlankScanner(len(START))
        self._scanner: JsonReader | None = None

    def _find_end(self, held: str) -> int | None:
        if self._scanner is None:
            start = self._blanks.end(held)
            if start is None:
                return None
            # `[ARGS]` comes behind a name, so that what begins with a bracket is a list.
            brace = held.find("{", start)
            if brace < 0 and held[start] != "[" and len(held) - start <= _MAX_NAME_CHARS:
                return None
            if held[start] in "[{":
                self._scanner = JsonReader(start, START)
            elif brace >= 0 and _NAME.fullmatch(held, start, brace):
                self._scanner = JsonReader(brace, START)
            else:
                return len(START)
        self._scanner.read(held)
        return self._scanner.at if self._scanner.is_over else None

    def _make_feed(self) -> Feed:
        return JsonFeed(START, _NAMED, self._tools, _HEAD, _FOLLOWING)

    def _calls(self, text: str, *, is_cut: bool) -> list[Call] | None:
        return calls_in(text.removeprefix(START), is_cut=is_cut)
