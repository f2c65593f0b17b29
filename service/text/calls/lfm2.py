"""LFM2's format: `<|tool_call_start|>[name(key="value"), other()]<|tool_call_end|>`, or JSON between the same marks."""

from __future__ import annotations

from service.text.calls.call import Call, CallParser, MarkScanner, find_mark
from service.text.calls.json_text import calls_in
from service.text.calls.pythonic import pythonic_calls

START, END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2Parser(CallParser):
    """All calls of an answer in one list; the end of the answer will do for the second mark."""

    def _find_start(self, held: str) -> tuple[int, bool]:
        return find_mark(held, START)

    def _enter(self) -> None:
        self._scanner = MarkScanner(END, "\"'")

    def _find_end(self, held: str) -> int | None:
        return self._scanner.end(held)

    def _calls(self, text: str) -> list[Call] | None:
        body = text.removeprefix(START).removesuffix(END)
        return pythonic_calls(body) or calls_in(body)
