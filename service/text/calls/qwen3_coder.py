"""Qwen3-Coder's and Qwen 3.5's XML: `<tool_call><function=f><parameter=x>value</parameter></function></tool_call>`.

Values are not JSON's: a text stands there as it is. So the tool's schema tells what a value is.
"""

from __future__ import annotations

import json
import re

from service.text.calls.call_parser import BlankScanner, Call, CallParser, MarkScanner, find_mark
from service.text.calls.feeds import Feed, JsonFeed
from service.text.calls.hermes import HEAD
from service.text.calls.json_text import calls_in
from service.text.calls.qwen3_coder_pieces import XmlFeed
from service.text.calls.value_kinds import Kinds
from service.text.calls.xml_spelling import (
    CLOSING,
    END,
    END_OF_FUNCTION,
    END_OF_PARAMETER,
    FUNCTION,
    OPENING,
    PARAMETER,
    PARAMETER_HEAD,
    START,
    json_of_value,
)


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
        self._scanner: _XmlScanner | MarkScanner | None = None

    def _find_end(self, held: str) -> int | None:
        if held.startswith(END):
            return len(END)
        if self._scanner is None:
            start = self._blanks.end(held)
            if start is None:
                return None
            xml = _XmlScanner(END_OF_FUNCTION if self._is_bare else END)
            self._scanner = MarkScanner(END) if held[start] == "{" else xml
        return self._scanner.end(held)

    def _make_feed(self) -> Feed | None:
        start = None if self._held.startswith(END) else self._blanks.end(self._held)
        if start is None:
            return None
        return JsonFeed(HEAD) if self._held[start] == "{" else XmlFeed(self._tools, is_bare=self._is_bare)

    def _calls(self, text: str) -> list[Call] | None:
        if text == END:
            return []
        body = text.removeprefix(START).removesuffix(END)
        if body.lstrip().startswith("{"):
            return calls_in(body)
        calls, at = list[Call](), 0
        while at < len(body):
            read = self._call(body, at)
            if read is None:
                return None
            call, at = read
            calls.append(call)
        if not text.startswith(START) and not all(call.name in self._tools for call in calls):
            return None
        return calls or None

    def _call(self, body: str, at: int) -> tuple[Call, int] | None:
        """The call that begins at `at`, and where it ends; None if there is none."""
        opening = OPENING.match(body, at)
        if opening is None:
            return None
        name, members = opening[1], dict[str, str]()
        kinds, at = Kinds(self._tools.get(name, {})), opening.end()
        while (parameter := PARAMETER_HEAD.match(body, at)) is not None:
            end, key = body.find(END_OF_PARAMETER, parameter.end()), parameter["key"].strip()
            if end < 0 or key in members:
                return None
            value = body[parameter.end() : end].removeprefix("\n").removesuffix("\n")
            members[key] = json_of_value(value, kinds.of(key))
            at = end + len(END_OF_PARAMETER)
        closing = CLOSING.match(body, at)
        if closing is None:
            return None
        written = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items())
        return Call(name, "{" + ", ".join(written) + "}"), closing.end()


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
