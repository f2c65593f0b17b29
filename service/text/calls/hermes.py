"""Hermes' format, Qwen 2.5's and Qwen 3's too: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import re

from service.text.calls.call_parser import Call, CallParser, MarkScanner, find_mark
from service.text.calls.feeds import Feed, JsonFeed
from service.text.calls.json_text import calls_in, head

START, END = "<tool_call>", "</tool_call>"


HEAD = re.compile(rf"{START}\s*" + head())


class HermesParser(CallParser):
    """One call between two marks; the end of the answer will do for the second one."""

    def _find_start(self, held: str) -> tuple[int, bool]:
        return find_mark(held, START)

    def _enter(self) -> None:
        self._scanner = MarkScanner(END)

    def _find_end(self, held: str) -> int | None:
        return self._scanner.end(held)

    def _make_feed(self) -> Feed:
        return JsonFeed(HEAD)

    def _calls(self, text: str) -> list[Call] | None:
        return calls_in(text.removeprefix(START).removesuffix(END))
