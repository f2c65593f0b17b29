"""Qwen3-Coder's calls, told parameter by parameter, and texts as they are written."""

from __future__ import annotations

import json

from service.text.calls import xml_spelling as xml
from service.text.calls.call_parser import Arguments, Begun, Found, Tools, find_mark
from service.text.calls.feeds import Feed
from service.text.calls.value_kinds import Kinds

# What stands before a parameter's value is looked at again with every piece of it.
_MAX_HEAD_CHARS = 1024


class XmlFeed(Feed):
    """A parameter is told when it is complete, and one that is a text by its schema as it is written."""

    def __init__(self, tools: Tools, *, is_bare: bool) -> None:
        super().__init__()
        self._tools, self._is_bare = tools, is_bare
        self._kinds_of = Kinds({})
        self._names: set[str] = set()
        # Of the parameter whose value comes next.
        self._key: str | None = None
        self._kinds = frozenset[str]()
        self._is_text = self._has_begun = False
        self._scanned = 0

    def _grow(self, held: str) -> list[Found] | None:
        if self._key is not None:
            return self._value(held)
        if not self._is_open:
            return self._begin(held)
        end = self._at + _MAX_HEAD_CHARS
        if (parameter := xml.PARAMETER_HEAD.match(held, self._at, end)) is not None:
            return self._enter(held, parameter.group("key").strip(), parameter.end())
        if (closing := xml.CLOSING.match(held, self._at, end)) is not None:
            self._at, self._is_open = closing.end(), False
            return [Arguments("}" if self._names else "{}")]
        return None

    def _begin(self, held: str) -> list[Found] | None:
        start = self._at if self._told or self._is_bare else len(xml.START)
        opening = xml.OPENING.match(held, start, start + _MAX_HEAD_CHARS)
        if opening is None or (self._is_bare and opening[1] not in self._tools):
            return None
        self._at, self._is_open, self._names = opening.end(), True, set()
        self._kinds_of = Kinds(self._tools.get(opening[1], {}))
        return [Begun(opening[1])]

    def _enter(self, held: str, key: str, at: int) -> list[Found] | None:
        """A parameter's value begins at `at`, or with the line break there: that must be seen."""
        if at == len(held) or key in self._names:
            return None
        self._key, self._kinds, self._has_begun = key, self._kinds_of.of(key), False
        self._is_text = self._kinds == {"string"}
        self._at = self._scanned = at + held.startswith("\n", at)
        return []

    def _value(self, held: str) -> list[Found] | None:
        assert self._key is not None, "no parameter is open"
        num_chars, is_whole = find_mark(held[self._scanned :], xml.END_OF_PARAMETER)
        self._scanned += num_chars
        if not is_whole and not self._is_text:
            return None
        # The last line break belongs to the mark.
        end = self._scanned - (held[self._at : self._scanned].endswith("\n"))
        if not is_whole and end <= self._at:
            return None
        value = held[self._at : end]
        written = xml.json_of_value(value, self._kinds)
        written = written[1:-1] if self._is_text else written
        told = written if self._has_begun else self._member(written)
        self._has_begun, self._at = True, end
        if is_whole:
            told += '"' if self._is_text else ""
            self._names.add(self._key)
            self._key, self._at = None, self._scanned + len(xml.END_OF_PARAMETER)
        return [Arguments(told)]

    def _member(self, written: str) -> str:
        """What stands before the value in the object, and what is there of the value."""
        before, quote = ", " if self._names else "{", '"' if self._is_text else ""
        return f"{before}{json.dumps(self._key, ensure_ascii=False)}: {quote}{written}"
