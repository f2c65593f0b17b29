"""Values and arguments that are written like Python's, `key=[1, 2.5, None]`, to JSON.

Not by Python's own parser: that refuses much of what models write (`from=`, `07`, line breaks in texts, `true`), and
its depth is not ours to bound. Numbers are kept as they are written, as far as JSON spells them so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_MAX_DEPTH = 64
_BLANKS = re.compile(r"\s*")
_KEY = re.compile(r"[^\W\d][\w-]*")
_NUMBER = re.compile(r"([+-]?)(\d+(?:_\d+)*|(?=\.\d))(\.\d*)?([eE][+-]?\d+)?(?![\w.])")
_WORDS = {"None": "null", "True": "true", "False": "false", "null": "null", "true": "true", "false": "false"}
# A quote ends the text where one of these follows, or nothing; others are part of it, for models forget to escape them.
BEHIND_QUOTE = ",:)]}"
_QUOTED = re.compile(
    r"""(?P<quote>'{3}|"{3}|["'])(?P<text>"""
    r"""(?:(?!(?P=quote))[^\\]|\\.|(?P=quote)(?!\s*(?:[,:)\]}]|\Z)))*+)(?P=quote)""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_ESCAPED |= {char: char for char in "\\'\""}


def python_value(text: str) -> str | None:
    """The JSON of a value that is spelt as Python or JSON does; None if it is something else."""
    try:
        return _Reader(text).whole_value()
    except _Malformed:
        return None


def pythonic_argument(text: str) -> tuple[str, str] | None:
    """Name and value of an argument, `key=value`, as JSON; None if it is something else."""
    try:
        return _Reader(text).argument()
    except _Malformed:
        return None


class _Malformed(ValueError):
    """Not what is expected here."""


class _Reader:
    """Goes through the text once; each method reads one thing and returns it as JSON."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def whole_value(self) -> str:
        """A value, and nothing else."""
        value = self._value(_MAX_DEPTH)
        self._expect_end()
        return value

    def argument(self) -> tuple[str, str]:
        """An argument, and nothing else."""
        argument = self._argument()
        self._expect_end()
        return argument

    def _argument(self) -> tuple[str, str]:
        key = self._match(_KEY).group()
        self._skip()
        self._expect("=")
        return _json_text(key), self._value(_MAX_DEPTH)

    def _value(self, depth: int) -> str:
        if not depth:
            raise _Malformed
        values: list[str] = []
        if self._takes("{"):
            members: list[tuple[str, str | None]] = []
            self._items("}", lambda: members.append(self._member(depth - 1)))
            return _object(members)
        for opening, closing in ("[]", "()"):
            if self._takes(opening):
                self._items(closing, lambda: values.append(self._value(depth - 1)))
                return f"[{', '.join(values)}]"
        if self._text.startswith(('"', "'"), self._at):
            return self._quoted()
        if (match := _NUMBER.match(self._text, self._at)) is not None:
            self._at = match.end()
            return _number(match)
        word = self._match(_KEY).group()
        if word not in _WORDS:
            raise _Malformed
        return _WORDS[word]

    def _member(self, depth: int) -> tuple[str, str | None]:
        """Key and value of an object; or a set's value, and None."""
        key = self._value(depth)
        self._skip()
        if not self._takes(":"):
            return key, None
        if key[0] in "[{":
            raise _Malformed
        return key if key.startswith('"') else _json_text(key), self._value(depth)

    def _quoted(self) -> str:
        return _json_text(_ESCAPE.sub(_unescaped, self._match(_QUOTED)["text"]))

    def _items(self, closing: str, item: Callable[[], None]) -> None:
        """Items with commas between them, up to the closing bracket and the blanks behind it."""
        self._skip()
        while not self._takes(closing):
            item()
            self._skip()
            if not self._takes(","):
                self._expect(closing)
                break
        self._skip()

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        self._skip()
        match = pattern.match(self._text, self._at)
        if match is None:
            raise _Malformed
        self._at = match.end()
        return match

    def _takes(self, char: str) -> bool:
        self._skip()
        if not self._text.startswith(char, self._at):
            return False
        self._at += 1
        return True

    def _expect(self, char: str) -> None:
        if not self._takes(char):
            raise _Malformed

    def _expect_end(self) -> None:
        self._skip()
        if self._at != len(self._text):
            raise _Malformed

    def _skip(self) -> None:
        match = _BLANKS.match(self._text, self._at)
        assert match is not None, "it matches nothing, too"
        self._at = match.end()


def _object(members: list[tuple[str, str | None]]) -> str:
    """An object, or a list where a set was written."""
    values = [key for key, value in members if value is None]
    if values:
        if len(values) < len(members):
            raise _Malformed
        return f"[{', '.join(values)}]"
    return "{" + ", ".join(f"{key}: {value}" for key, value in members) + "}"


def _number(match: re.Match[str]) -> str:
    sign, whole, fraction, exponent = match.groups()
    whole = whole.replace("_", "").lstrip("0") or "0"
    if fraction == ".":
        fraction = ".0"
    return ("-" if sign == "-" else "") + whole + (fraction or "") + (exponent or "")


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else match[0]
    if code[0] in "01234567":
        return chr(int(code, 8))
    return _ESCAPED.get(code, match[0])


def _json_text(text: str) -> str:
    """A JSON text; in ASCII if it holds half of a surrogate pair, which no UTF-8 does."""
    try:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)
