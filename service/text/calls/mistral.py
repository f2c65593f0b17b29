"""Mistral's formats: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and since its eleventh tokenizer
`[TOOL_CALLS]name[ARGS]{...}` for each call, in some models without `[ARGS]` or with a `[CALL_ID]` before it."""

from __future__ import annotations

import re

from service.text.calls.call_parser import BlankScanner, BracketScanner, Call, CallParser, find_mark
from service.text.calls.feeds import Feed, JsonFeed
from service.text.calls.json_text import BETWEEN, calls_in, head, is_object

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_MAX_NAME_CHARS = 256
_START = re.escape(START)
_HEAD = re.compile(rf"{_START}\s*+(?:\[?\s*+{head()}|(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{))")
_FOLLOWING = re.compile(BETWEEN + head())


class MistralParser(CallParser):
    """What follows a mark: a list of calls, one call, or a name with its arguments."""

    def _find_start(self, held: str) -> tuple[int, bool]:
        return find_mark(held, START)

    def _enter(self) -> None:
        self._blanks = BlankScanner(len(START))
        self._scanner: BracketScanner | None = None

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
                self._scanner = BracketScanner(start)
            elif brace >= 0 and _NAME.fullmatch(held, start, brace):
                self._scanner = BracketScanner(brace)
            else:
                return len(START)
        return self._scanner.end(held)

    def _make_feed(self) -> Feed:
        return JsonFeed(_HEAD, _FOLLOWING)

    def _calls(self, text: str) -> list[Call] | None:
        body = text.removeprefix(START).lstrip()
        if body[:1] in ("[", "{"):
            return calls_in(body)
        name, brace, rest = body.partition("{")
        named = _NAME.fullmatch(name)
        return [Call(named[1], brace + rest)] if named and is_object(brace + rest) else None
