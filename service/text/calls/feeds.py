"""Calls read while they are written: who is called as soon as that is certain, and the arguments as they come.

What was given out cannot be taken back. So where a call that was begun turns out to be none, the rest of what was
written follows as its arguments: nothing is lost, and the client sees that they are no JSON. A call that is cut off is
what there is of it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence

from service.text.calls.call import Arguments, Begun, Call, Found
from service.text.calls.json_reader import JsonReader
from service.text.calls.json_text import is_object

# Most characters before a call's arguments that are parsed again with every new part of them.
MAX_HEAD_CHARS = 1024


class Feed(ABC):
    """The calls of one text that begins with a mark, given out piece by piece.

    mark   what ends the text, empty if nothing does
    named  what stands up to the first call's name, with the name as `name` or, in JSON, as `quoted`
    tools  the names of those that there are
    """

    def __init__(self, mark: str, named: re.Pattern[str], tools: Container[str]) -> None:
        self._at = 0  # what is before was given out, or says nothing
        self._is_open = False
        self._given: list[tuple[str, list[str]]] = []  # names, and pieces of arguments
        self._mark, self._named, self._tools = mark, named, tools

    def push(self, held: str) -> list[Found]:
        """The parts that are certain now; `held` is the earlier text, with more behind it."""
        found: list[Found] = []
        while (grown := self._grow(held)) is not None:
            found += self._noted(grown)
        return found

    def finish(
        self, text: str, calls_of: Callable[[str], Sequence[Call] | None], *, ends_answer: bool, is_cut: bool
    ) -> list[Found]:
        """The parts of the whole text that were not emitted yet.

        calls_of     its calls in spellings that a feed does not read, None if there are none
        ends_answer  whether no mark ended it
        is_cut       whether the model had not ended: then a call whose name is there is one
        """
        found = self.push(text)
        if self._is_open:
            found += self._noted(self._end(text, is_cut=is_cut))
        if not is_cut or not self._given:
            calls = calls_of(text)
            if calls is not None and [one.name for one in calls[: len(self._given)]] == [
                name for name, _ in self._given
            ]:
                return found + list(calls[len(self._given) :])
        if is_cut and not self._given and (match := self._named.match(text, 0, MAX_HEAD_CHARS)) is not None:
            name = name_in(match)
            if name is not None and name in self._tools:
                return [Begun(name)]
        rest = text[self._at :]
        if self._given and (is_cut or self._says_nothing(rest, ends_answer)):
            return found
        return found + ([rest] if rest else [])

    def _says_nothing(self, rest: str, ends_answer: bool) -> bool:
        """Whether what stands behind the calls are brackets that nothing opened, the end of a block, and
        the mark or half of it."""
        rest = rest.strip(" \t\r\n]}),`")
        return rest in ("", self._mark) or (ends_answer and self._mark.startswith(rest))

    def _noted(self, found: list[Found]) -> list[Found]:
        for one in found:
            if isinstance(one, Begun):
                self._given.append((one.name, []))
            elif isinstance(one, Arguments):
                self._given[-1][1].append(one.text)
        return found

    def _is_complete_with(self, text: str) -> bool:
        """Whether the arguments of the call that is open are an object with this behind them."""
        return is_object("".join((*self._given[-1][1], text)))

    @abstractmethod
    def _grow(self, held: str) -> list[Found] | None:
        """The next that is certain, possibly nothing; None if more must come."""

    @abstractmethod
    def _end(self, text: str, *, is_cut: bool) -> list[Found]:
        """The rest of a call that is open where the text ends."""


class JsonFeed(Feed):
    """Arguments that are JSON are given out as they are written.

    first       what stands before the arguments, with the call's name as `name` or, in JSON, as `quoted`
    following   the same for a call behind another
    only_tools  whether a call of another name is none
    """

    def __init__(
        self,
        mark: str,
        named: re.Pattern[str],
        tools: Container[str],
        first: re.Pattern[str],
        following: re.Pattern[str] | None = None,
        *,
        only_tools: bool = False,
    ) -> None:
        super().__init__(mark, named, tools)
        self._head, self._following, self._only_tools = first, following, only_tools
        self._reader: JsonReader | None = None
        self._may_begin = True

    def _grow(self, held: str) -> list[Found] | None:
        if self._reader is None:
            return self._begin(held)
        text = self._reader.read(held)
        self._at = self._reader.at
        if not self._reader.is_over:
            return [Arguments(text)] if text else None
        text += self._missing(text)
        self._reader, self._is_open = None, False
        return [Arguments(text)] if text else []

    def _begin(self, held: str) -> list[Found] | None:
        head = self._following if self._given else self._head
        if head is None or not self._may_begin:
            return None
        match = head.match(held, self._at, self._at + MAX_HEAD_CHARS)
        if match is None:
            self._may_begin = len(held) - self._at < MAX_HEAD_CHARS
            return None
        name = name_in(match)
        if name is None or (self._only_tools and name not in self._tools):
            return None
        self._at, self._is_open, self._reader = match.end(), True, JsonReader(match.end(), self._mark)
        return [Begun(name)]

    def _end(self, text: str, *, is_cut: bool) -> list[Found]:
        assert self._reader is not None, "no arguments are open"
        read = self._reader.read(text, is_all=True)
        read += "" if is_cut else self._missing(read)
        self._at, self._is_open = self._reader.at, False
        return [Arguments(read)] if read else []

    def _missing(self, text: str) -> str:
        """The brackets that are missing behind the text and make the arguments an object; else nothing."""
        assert self._reader is not None, "no arguments are open"
        closing = self._reader.closing
        return closing if closing and self._is_complete_with(text + closing) else ""


def name_in(match: re.Match[str]) -> str | None:
    """The name of a call's head, None if it is none."""
    groups = match.groupdict()
    if groups.get("name") is not None:
        return match["name"]
    try:
        name = json.loads(match["quoted"])
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None
