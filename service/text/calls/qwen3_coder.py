"""Qwen3-Coder's and Qwen 3.5's XML: `<tool_call><function=f><parameter=x>value</parameter></function></tool_call>`.

Values are not JSON's: a text stands there as it is. So the tool's schema tells what a value is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from service.text.calls.call import Arguments, Begun, Call, Found
from service.text.calls.call_parser import BlankScanner, CallParser, Tools, find_mark, num_of_mark
from service.text.calls.feeds import MAX_HEAD_CHARS, Feed
from service.text.calls.hermes import JsonScanner, json_calls, json_feed
from service.text.calls.json_reader import PYTHON_WORDS
from service.text.calls.json_text import kind_of
from service.text.calls.pythonic import python_value
from service.text.calls.value_kinds import Kinds, Listed, is_listed

START, END = "<tool_call>", "</tool_call>"
FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"
# Models write the first mark twice, and put names into quotes.
NAMED = re.compile(r"""\s*(?:<tool_call>\s*)?<function=\s*["']?(?P<name>[^>\s"']+)["']?\s*>\s*""")
# With what follows the name of a call.
OPENING = re.compile(rf"{NAMED.pattern}(?={PARAMETER}|{END_OF_FUNCTION})")
_KEY = r"""<parameter=\s*["']?(?P<key>[^>\n]+?)["']?\s*>"""
# Between parameters, where a mark may stand twice.
_BETWEEN = rf"(?:\s|{END_OF_PARAMETER}|>)*+"
PARAMETER_HEAD = re.compile(rf"{_BETWEEN}{_KEY}")
CLOSING = re.compile(rf"{_BETWEEN}</function>\s*")
# Words that models write for null, true and false.
_WORDS = {"null": "null", "none": "null", "true": "true", "false": "false"}


def json_of_value(text: str, kinds: frozenset[str], listed: Listed = ()) -> str:
    """A parameter's text as JSON: a listed value, or a value of the allowed kinds in JSON's spelling or Python's; else
    the text itself.

    kinds   JSON schema's names of them; empty: any
    listed  those that the schema lists
    """
    as_text = json.dumps(text, ensure_ascii=False)
    if kinds == {"string"} and not listed:
        return as_text
    value = text.strip()
    spelt = [one for one in _spellings(value, kinds) if one is not None]
    for one in (*spelt, json.dumps(value, ensure_ascii=False)) if listed else ():
        if is_listed(json.loads(one), listed):
            return one
    if kinds == {"string"}:
        return as_text
    for one in spelt:
        kind = kind_of(one)
        if not kinds or kind in kinds:
            return one
    # A value of none of the allowed kinds stays as it is.
    plain = next((one for one in spelt if kind_of(one) is not None), None)
    return as_text if plain is None or "string" in kinds else plain


def _spellings(value: str, kinds: frozenset[str]) -> Iterator[str | None]:
    """The values that a text may be, as JSON; None for one that it is not."""
    yield value if kind_of(value) is not None else None
    word = _WORDS.get(value.lower())
    yield word if word is not None and (kinds or value in PYTHON_WORDS) else None
    read = python_value(value)
    # A word by itself or a text is Python's only where the schema says so.
    yield read if value[:1] in "[{(" or kinds else None
    if value[:1] in "\"'" and read is not None and "string" not in kinds:  # a value inside of quotes
        inner = json.loads(read).strip()
        yield inner if kind_of(inner) is not None else python_value(inner)


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
            mark = END_OF_FUNCTION if self._is_bare else END
            self._scanner = JsonScanner(start) if held[start] in "{[" else _XmlScanner(mark)
        return self._scanner.end(held)

    def _make_feed(self) -> Feed | None:
        start = None if self._held.startswith(END) else self._blanks.end(self._held)
        if start is None:
            return None
        return json_feed(self._tools) if self._held[start] in "{[" else XmlFeed(self._tools, is_bare=self._is_bare)

    def _calls(self, text: str, *, is_cut: bool) -> list[Call] | None:
        return [] if text == END else json_calls(text, is_cut=is_cut) if text.startswith(START) else None


# What a call ends with that leaves its last parameter open, where another one follows.
_NEXT_CALL = rf"{END_OF_FUNCTION}\s{{0,64}}{END}(?=\s{{0,64}}{START}\s{{0,64}}{FUNCTION})"
_MAX_NEXT_CHARS = 256


class _XmlScanner:
    """Finds the mark that ends a call, outside of its parameters, in a text that grows."""

    _inside = re.compile(f"{END_OF_PARAMETER}|(?P<call>{_NEXT_CALL})")

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._outside = re.compile(f"{re.escape(PARAMETER)}|{re.escape(mark)}")
        self._at, self._is_inside = 0, False

    def end(self, held: str) -> int | None:
        """Where the mark ends, None if it is not there yet. `held` is what it was, with more behind it."""
        while True:
            match = (self._inside if self._is_inside else self._outside).search(held, self._at)
            if match is None:
                self._at = max(self._at, len(held) - _MAX_NEXT_CHARS)
                return None
            if match.group() == self._mark or match.lastgroup == "call":
                return match.end()
            self._at, self._is_inside = match.end(), not self._is_inside


_NAMED = re.compile(rf"(?:{START})?{NAMED.pattern}")


def _beginning(mark: str) -> str:
    """A regular expression of one or more characters that a mark begins with."""
    written = ""
    for char in reversed(mark):
        written = re.escape(char) + (f"(?:{written})?" if written else "")
    return written


# What ends a parameter: its mark, or the beginning of another one where the mark is missing.
_END_OF_VALUE = re.compile(rf"{END_OF_PARAMETER}|\n?(?={_KEY})")
# At the end of a text: what may end a parameter, with or without its own mark.
_MAY_BEGIN = rf"(?:{_beginning(START)}\s{{0,64}}(?:{_beginning(FUNCTION)})?)?"
_MAY_END = re.compile(
    rf"\n?(?:{END_OF_FUNCTION}\s{{0,64}}(?:{_beginning(END)}\s{{0,64}}{_MAY_BEGIN})?|{_beginning(END_OF_FUNCTION)}"
    rf"|{_beginning(END_OF_PARAMETER)}|{PARAMETER}[^>\n]{{0,256}}|{_beginning(PARAMETER)})?\Z"
)
_ENDS = re.compile(rf"\n?(?:{END_OF_FUNCTION}\s*(?:{END})?|{END})\s*\Z")
_NOTHING_LISTED: Listed = ()


class XmlFeed(Feed):
    """A parameter is given out when it is complete, and one that is a text by its schema as it is written."""

    def __init__(self, tools: Tools, *, is_bare: bool) -> None:
        super().__init__(END, _NAMED, tools)
        self._schemas, self._is_bare = tools, is_bare
        self._kinds_of = Kinds({})
        self._names: set[str] = set()
        self._missing: set[str] = set()  # parameters that the tool has besides
        # Name of the parameter whose value comes next.
        self._key: str | None = None
        self._kinds, self._listed = frozenset[str](), _NOTHING_LISTED
        self._is_text = self._has_begun = False
        self._scanned = 0

    def _grow(self, held: str) -> list[Found] | None:
        if self._key is not None:
            return self._value(held)
        if not self._is_open:
            return self._begin(held)
        end = self._at + MAX_HEAD_CHARS
        if (parameter := PARAMETER_HEAD.match(held, self._at, end)) is not None:
            return self._enter(held, parameter["key"].strip(), parameter.end())
        if (closing := CLOSING.match(held, self._at, end)) is not None:
            self._at = closing.end()
            return [Arguments(self._close())]
        return None

    def _begin(self, held: str) -> list[Found] | None:
        start = self._at if self._given or self._is_bare else len(START)
        opening = OPENING.match(held, start, start + MAX_HEAD_CHARS)
        if opening is None or (self._is_bare and opening["name"] not in self._tools):
            return None
        self._at, self._is_open, self._names = opening.end(), True, set()
        schema = self._schemas.get(opening["name"], {})
        self._kinds_of, properties = Kinds(schema), schema.get("properties")
        self._missing = set(properties) if isinstance(properties, dict) else set()
        return [Begun(opening["name"])]

    def _enter(self, held: str, key: str, at: int) -> list[Found] | None:
        """A parameter's value begins at `at`, or with the line break there: that must be seen."""
        if at == len(held):
            return None
        self._key, (self._kinds, self._listed), self._has_begun = key, self._kinds_of.of_and_listed(key), False
        self._missing.discard(key)
        self._is_text = self._kinds == {"string"} and not self._listed
        self._at = self._scanned = at + held.startswith("\n", at)
        return []

    def _value(self, held: str) -> list[Found] | None:
        for match in _END_OF_VALUE.finditer(held, self._scanned):
            if match["key"] is not None and match["key"].strip() not in self._missing:
                continue
            # The last line break belongs to the mark.
            found = self._valued(held[self._at : match.start()].removesuffix("\n"))
            self._at = match.end()
            return found
        may_end = _MAY_END.search(held, self._scanned)
        assert may_end is not None, "it matches nothing, too"
        self._scanned = may_end.start()
        if not self._is_text or self._scanned <= self._at:
            return None
        value, self._at = held[self._at : self._scanned], self._scanned
        return [Arguments(self._member(json.dumps(value, ensure_ascii=False)[1:-1]))]

    def _valued(self, value: str) -> list[Found]:
        """The rest of a parameter's value."""
        if self._is_text:
            shown = self._member(json.dumps(value, ensure_ascii=False)[1:-1]) + '"'
        else:
            shown = self._member(json_of_value(value, self._kinds, self._listed))
        self._names.add(self._key or "")
        self._key = None
        return [Arguments(shown)]

    def _end(self, text: str, *, is_cut: bool) -> list[Found]:
        start, self._at, self._is_open = self._at, len(text), False
        rest = text[start:]
        if self._key is None:
            if is_cut:
                return []
            written = rest.strip()
            return [Arguments(self._close() if self._mark.startswith(written) else rest)]
        ends = None if is_cut else _ENDS.search(rest)
        if ends is None:
            return [Arguments(self._part(rest[: len(rest) - num_of_mark(rest, END_OF_PARAMETER)]))]
        return [*self._valued(rest[: ends.start()]), Arguments(self._close())]

    def _part(self, value: str) -> str:
        """The present part of a value that is cut off. The last line break belongs to the mark."""
        value = value.removesuffix("\n")
        if self._is_text:
            return self._member(json.dumps(value, ensure_ascii=False)[1:-1])
        is_text = not value.startswith(("[", "{")) and (not self._kinds or "string" in self._kinds)
        return self._member(json.dumps(value, ensure_ascii=False)[:-1] if is_text else value)

    def _close(self) -> str:
        self._is_open = False
        return "}" if self._names else "{}"

    def _member(self, written: str) -> str:
        """The value, or a part of it, with what stands before it in the object."""
        if self._has_begun:
            return written
        self._has_begun = True
        before, quote = ", " if self._names else "{", '"' if self._is_text else ""
        return f"{before}{json.dumps(self._key, ensure_ascii=False)}: {quote}{written}"
