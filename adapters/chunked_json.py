"""Parsing of JSON texts of megabytes in pieces, each under the process's fair lock (`gil_lock.py`).

A list or object longer than a piece is parsed a run of items at a time, each run by Python's own parser; a string of
that length a run of characters at a time. So values and error messages are those of Python's parser. The time is
proportional to the length.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator
from typing import Any, cast

from adapters.gil_lock import locked_pieces

# Takes up to a millisecond, whatever is in it.
PIECE_BYTES = 1 << 14
# Less than what the parser of a piece, and whoever goes through the value, may use of Python's stack.
_MAX_DEPTH = sys.getrecursionlimit() - 100

_BLANKS = rb"[ \t\n\r]*+"
_TEXT = rb'"(?:[^"\\]++|\\.)*+"'
_PLAIN = rb'[^][{}",: \t\n\r]++'
# Lists and objects of up to three levels, which are not looked at any closer here.
_INSIDE = rb"(?:[^][{}\"]++|" + _TEXT + rb")*+"
for _ in range(2):
    _INSIDE = rb"(?:[^][{}\"]++|" + _TEXT + rb"|[\[{]" + _INSIDE + rb"[\]}])*+"
_VALUE = rb"(?:" + _TEXT + rb"|" + _PLAIN + rb"|[\[{]" + _INSIDE + rb"[\]}])"


def _run_of(item: bytes) -> re.Pattern[bytes]:
    """Items with a comma behind each, and the last one before a bracket that closes."""
    item = _BLANKS + item + _BLANKS
    return re.compile(rb"(?:" + item + rb",)*+(?:" + item + rb"(?=[\]}]))?+", re.DOTALL)


_LIST_RUN = _run_of(_VALUE)
_OBJECT_RUN = _run_of(_TEXT + _BLANKS + rb":" + _BLANKS + _VALUE)
# A run of numbers in a list without strings, lists and objects, which is read faster this way.
_FLAT_RUN = re.compile(rb'[^][{}"]*+')
# A part of a string that cuts no character and no surrogate pair of escapes in two.
_HIGH_HALF = rb"\\u[dD][89abAB]..(?:\\u[dD][c-fC-F]..|(?=[^\\])|(?=\\[^u])|(?=\\u(?![dD][c-fC-F])....))"
_TEXT_RUN = re.compile(rb'(?:[^"\\]++|\\[^u\x80-\xff]|\\u(?![dD][89abAB])....|' + _HIGH_HALF + rb")*+", re.DOTALL)
_SOME_BLANKS, _SOME_PLAIN = re.compile(_BLANKS), re.compile(rb"[-+.0-9A-Za-z]++")
_LONG_NUMBER = re.compile(rb"-?[0-9][-+.0-9eE]*")

Parse = Callable[[bytes], Any]
Merge = Callable[[dict[str, Any], dict[str, Any]], None]
Field = Callable[[str, Any], Any]


def parsed(text: bytes, parse: Parse, *, merge: Merge = dict.update, field: Field | None = None) -> Any:
    """The value of a JSON text.

    parse  a JSON text of up to a piece to its value; the texts of all pieces end between characters
    merge  (object so far, its next fields)
    field  of the outermost object, (name, value) to what takes the value's place as soon as it is read

    Raises json.JSONDecodeError with the words of Python's parser (its position says nothing), RecursionError for what
    is nested too deeply, ValueError for a number that is longer than a piece, and what those three raise.
    """
    reader = _Reader(text, parse, merge, field)
    for _ in locked_pieces(reader.pieces()):
        pass
    return reader.value


class _Reader:
    """Goes through the text once. The methods that yield do so after each piece."""

    def __init__(self, text: bytes, parse: Parse, merge: Merge, field: Field | None) -> None:
        self.value: Any = None
        self._text, self._parse, self._merge, self._field = text, parse, merge, field
        self._at = 0
        self._open: list[list[Any] | dict[str, Any]] = []  # the last is where the next item belongs
        self._keys: list[str | None] = []  # of each of them the field whose value is open, too

    def pieces(self) -> Generator[None]:
        """Parse; `value` is complete when the generator has ended."""
        if len(self._text) <= PIECE_BYTES:
            self.value = self._parse(self._text)
            if isinstance(self.value, dict):
                self.value = self._fields(self.value)
            return
        yield from self._blanks()
        yield from self._begin_value()
        while self._open:
            if not self._run():
                yield from self._begin_item()
            elif self._closes():
                yield from self._after_value()
            yield
        yield from self._blanks()
        if self._at < len(self._text):
            raise _fault("Extra data")

    def _run(self) -> bool:
        """Read as many whole items as there are in a piece. False if there is not one."""
        at, end, top = self._at, self._at + PIECE_BYTES, self._open[-1]
        is_list = isinstance(top, list)
        stop = _FLAT_RUN.match(self._text, at, end).end() if is_list else at  # type: ignore[union-attr]
        if self._text[stop : stop + 1] != b"]" or stop == end:
            stop = self._text.rfind(b",", at, stop) + 1
        if stop <= at:
            stop = (_LIST_RUN if is_list else _OBJECT_RUN).match(self._text, at, end).end()  # type: ignore[union-attr]
        if stop == at:
            return False
        items = self._text[at:stop].removesuffix(b",")
        if not items.strip(b" \t\n\r"):
            raise _fault("Expecting value")
        if isinstance(top, list):
            top.extend(self._parse(b"[" + items + b"]"))
        else:
            self._merge(top, self._fields(self._parse(b"{" + items + b"}")))
        self._at = stop
        return True

    def _begin_item(self) -> Generator[None]:
        """An item, or of a list or object its beginning."""
        yield from self._blanks()
        if isinstance(self._open[-1], dict):
            if self._next() != b'"':
                raise _fault("Expecting property name enclosed in double quotes")
            self._keys[-1] = yield from self._long_text()
            yield from self._blanks()
            if self._next() != b":":
                raise _fault("Expecting ':' delimiter")
            self._at += 1
            yield from self._blanks()
        yield from self._begin_value()

    def _begin_value(self) -> Generator[None]:
        first = self._next()
        if first in (b"[", b"{"):
            if len(self._open) >= _MAX_DEPTH:
                raise RecursionError("lists and objects that are nested too deeply")
            self._open.append([] if first == b"[" else {})
            self._keys.append(None)
            self._at += 1
            yield from self._blanks()
            if self._next() == self._closing():
                self._close()
                yield from self._after_value()
        else:
            self._put((yield from self._long_text()) if first == b'"' else self._plain())
            yield from self._after_value()

    def _after_value(self) -> Generator[None]:
        """The comma, or all brackets that close."""
        while self._open:
            yield from self._blanks()
            if self._next() == b",":
                self._at += 1
                return
            if self._next() != self._closing():
                raise _fault("Expecting ',' delimiter")
            self._close()

    def _closing(self) -> bytes:
        return b"]" if isinstance(self._open[-1], list) else b"}"

    def _closes(self) -> bool:
        """Whether the run that was read ended with the last item, not with a comma."""
        return self._text[self._at - 1 : self._at] != b","

    def _close(self) -> None:
        """The bracket that closes is next."""
        self._at += 1
        self._keys.pop()
        self._put(self._open.pop())

    def _put(self, value: Any) -> None:
        if not self._open:
            self.value = value
            return
        top = self._open[-1]
        if isinstance(top, list):
            top.append(value)
        else:
            self._merge(top, self._fields({cast("str", self._keys[-1]): value}))

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of the open object, after `field` was applied to those of the outermost one."""
        if self._field is None or len(self._open) > 1:
            return fields
        return {name: self._field(name, value) for name, value in fields.items()}

    def _next(self) -> bytes:
        return self._text[self._at : self._at + 1]

    def _blanks(self) -> Generator[None]:
        while True:
            end = self._at + PIECE_BYTES
            self._at = _SOME_BLANKS.match(self._text, self._at, end).end()  # type: ignore[union-attr]
            if self._at < end:
                return
            yield

    def _plain(self) -> Any:
        """A number, true, false or null."""
        match = _SOME_PLAIN.match(self._text, self._at, self._at + PIECE_BYTES)
        if match is None:
            raise _fault("Expecting value")
        if len(match[0]) == PIECE_BYTES and _LONG_NUMBER.fullmatch(match[0]):
            raise ValueError("a number that is longer than a piece")
        try:
            value = self._parse(match[0])
        except json.JSONDecodeError as error:
            raise _fault("Expecting ',' delimiter" if self._open and error.msg == "Extra data" else error.msg) from None
        self._at = match.end()
        return value

    def _long_text(self) -> Generator[None, None, str]:
        """The text whose first quote is next."""
        parts: list[str] = []
        self._at += 1
        while self._next() != b'"':
            at, end = self._at, self._at + PIECE_BYTES
            stop = _TEXT_RUN.match(self._text, at, end).end()  # type: ignore[union-attr]
            while at < stop < len(self._text) and self._text[stop] & 0xC0 == 0x80:
                stop -= 1  # in the middle of a character
            if at < stop < len(self._text):
                parts.append(self._parse(b'"' + self._text[at:stop] + b'"'))
            else:  # it never ends, or what is next is no escape: the parser says which
                parts.append(self._parse(b'"' + self._text[at : self._character_end(end)]))
            self._at = stop
            yield
        self._at += 1
        return "".join(parts)

    def _character_end(self, at: int) -> int:
        while at < len(self._text) and self._text[at] & 0xC0 == 0x80:
            at += 1
        return at


def _fault(words: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(words, "", 0)
