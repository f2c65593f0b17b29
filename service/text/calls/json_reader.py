"""JSON as models write it, read while it grows, and mended on the way."""

from __future__ import annotations

import json
import re

# By the quote that will end a text: characters that stay as they are.
_PLAIN_TEXT = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
# Characters that neither open nor close anything, are no word, and begin no mark.
_PLAIN = re.compile(r'[^"\'\[\]{},;<A-Za-z_]+')
_MAX_WORD_CHARS = len("False")
_WORD = re.compile(rf"[A-Za-z_]{{1,{_MAX_WORD_CHARS + 1}}}")
PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}
_SOLID = re.compile(r"\S")
_CLOSING = {"[": "]", "{": "}"}
_BEHIND_TEXT = ",:]}"


class JsonReader:
    """An object or a list, up to its last bracket. Mended are raw control characters and quotes in texts, backslashes
    that escape nothing, brackets that are missing or too many, a brace that stands twice, commas behind a last item,
    and Python's words and quotes. What is valid stays as it is.

    start  where the first bracket stands
    mark   ends it where it stands outside of texts, or alone on a line, whatever is open; empty: nothing does
    """

    def __init__(self, start: int, mark: str = "") -> None:
        self.at = start  # what stands before has been read
        self.is_over = False
        self._mark = mark
        self._open: list[str] = []  # the brackets that will close what is open, the innermost one last
        self._num_open = dict.fromkeys("]}", 0)
        self._quote = ""  # ends the text that is open
        self._solid_from = start

    @property
    def closing(self) -> str | None:
        """The brackets that are missing; None where a text is open."""
        return None if self._quote else "".join(reversed(self._open))

    def read(self, held: str, *, is_all: bool = False) -> str:
        """The part that is certain now, as JSON. `held` is the earlier text, with more behind it; `is_all`: no more
        comes."""
        read: list[str] = []
        while not self.is_over and self.at < len(held):
            found = self._read_text(held, is_all) if self._quote else self._read_structure(held, is_all)
            if found is None:
                break
            read.append(found)
        return "".join(read)

    def _read_text(self, held: str, is_all: bool) -> str | None:
        if (plain := _PLAIN_TEXT[self._quote].match(held, self.at)) is not None:
            return self._take(plain)
        char = held[self.at]
        if char == self._quote:
            return self._read_quote(held, is_all)
        if char == "\\":
            return self._read_escape(held, is_all)
        if char == "\n" and len(self._mark) > 1:
            begins = self._begins_mark(held, self.at + 1)
            if begins is None and not is_all:
                return None
            if begins:
                self.at, self.is_over = self.at + 1, True
                return ""
        self.at += 1
        return json.dumps(char)[1:-1]

    def _read_escape(self, held: str, is_all: bool) -> str | None:
        if (escape := _ESCAPE.match(held, self.at)) is not None:
            return self._take(escape)
        if _PART_OF_ESCAPE.match(held, self.at) is not None:
            if not is_all:
                return None
            self.at = len(held)
            return ""
        self.at += 1
        if held[self.at] != "'":
            return "\\\\"
        self.at += 1
        return "'"

    def _read_quote(self, held: str, is_all: bool) -> str | None:
        """A quote ends a text where something may follow it there; others are part of the text."""
        if (behind := self._behind(held, is_all)) is None:
            return None
        begins = bool(self._mark) and behind < len(held) and self._begins_mark(held, behind)
        if begins is None and not is_all:
            return None
        self.at += 1
        if behind < len(held) and held[behind] not in _BEHIND_TEXT and begins is False:
            return json.dumps(self._quote)[1:-1]
        self._quote = ""
        return '"'

    def _read_structure(self, held: str, is_all: bool) -> str | None:
        if (plain := _PLAIN.match(held, self.at)) is not None:
            return self._take(plain)
        begins = self._begins_mark(held, self.at) if self._mark else False
        if begins:
            self.is_over = True
            return ""
        if begins is None:  # half of a mark says nothing
            self.at = len(held) if is_all else self.at
            return "" if is_all else None
        char = held[self.at]
        if char == ",":
            return self._read_comma(held, is_all)
        if char == "{":
            return self._read_brace(held, is_all)
        if (word := _WORD.match(held, self.at)) is not None:
            if word.end() == len(held) and len(word[0]) <= _MAX_WORD_CHARS and not is_all:
                return None
            return PYTHON_WORDS.get(self._take(word), word[0])
        self.at += 1
        if char in "\"'":
            self._quote = char
            return '"'
        if char in _CLOSING:
            self._open.append(_CLOSING[char])
            self._num_open[_CLOSING[char]] += 1
        elif char in self._num_open:
            return self._close(char)
        return char

    def _read_comma(self, held: str, is_all: bool) -> str | None:
        """A comma before nothing is none."""
        if (behind := self._behind(held, is_all)) is None:
            return None
        begins = bool(self._mark) and behind < len(held) and self._begins_mark(held, behind)
        if begins is None and not is_all:
            return None
        self.at += 1
        return "" if begins or held[behind : behind + 1] in ("", "]", "}") else ","

    def _read_brace(self, held: str, is_all: bool) -> str | None:
        """An object begins with no other: of two braces the first is left out."""
        if (behind := self._behind(held, is_all)) is None:
            return None
        self.at += 1
        if held[behind : behind + 1] == "{":
            return ""
        self._open.append("}")
        self._num_open["}"] += 1
        return "{"

    def _close(self, char: str) -> str:
        """A bracket, with those that are missing before it; one that closes nothing is left out."""
        if not self._num_open[char]:
            return ""
        closed = ""
        while not closed.endswith(char):
            closed += self._open.pop()
            self._num_open[closed[-1]] -= 1
        self.is_over = not self._open
        return closed

    def _behind(self, held: str, is_all: bool) -> int | None:
        """Where the next solid character behind this one stands, None if it is not there yet. Blanks that were seen are
        not looked at again."""
        match = _SOLID.search(held, max(self.at + 1, self._solid_from))
        self._solid_from = len(held) if match is None else match.start()
        return self._solid_from if match is not None or is_all else None

    def _begins_mark(self, held: str, at: int) -> bool | None:
        """Whether the mark stands at `at`; None if it may, once more is there."""
        seen = held[at : at + len(self._mark)]
        return True if seen == self._mark else None if self._mark.startswith(seen) else False

    def _take(self, match: re.Match[str]) -> str:
        self.at = match.end()
        return match[0]


def mended(text: str, *, may_close: bool = True) -> str | None:
    """The JSON of an object or a list that a model wrote; None if something else stands behind it, or brackets are
    missing and `may_close` is false."""
    reader = JsonReader(0)
    read = reader.read(text, is_all=True)
    rest = text[reader.at :].strip(" \t\r\n]},")
    if rest or reader.closing is None or (reader.closing and not may_close):
        return None
    return read + reader.closing
