"""Calls that are written as JSON, with the text of their arguments kept as it is."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from service.text.calls.call import Call
from service.text.calls.json_reader import mended
from service.text.calls.pythonic import python_value
from service.text.calls.value_kinds import kind_of_value

_BLANKS = re.compile(r"[ \t\r\n]*")
_ARGUMENT_KEYS = ("arguments", "parameters")
# What a call may hold besides its name and arguments.
_OTHER_KEYS = {"id", "index", "type", "function"}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


# Members that are texts, as many as there are.
_TEXTS = r"""(?:\s*+"\w++"\s*+:\s*+"(?:[^"\\]|\\.)*+"\s*+,)"""
# Between the arguments of a call and the next one: in a list, or behind it, as some models write several.
BETWEEN = r"""(?:\s*+,\s*+"\w++"\s*+:\s*+"[^"\\]*+")*[\s}]*+,?\s*+"""


def head(*keys: str) -> str:
    """A regular expression of what stands before the arguments of a call, whose name is `quoted`; `keys`: what it may
    be called."""
    return rf"""{named(*keys)}\s*+,{_TEXTS}*?\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{{)"""


def named(*keys: str) -> str:
    """The same, up to the name."""
    key = "|".join(keys or ("name",))
    return rf"""(?:\{{\s*+)?\{{{_TEXTS}*?\s*+"(?:{key})"\s*+:\s*+(?P<quoted>"(?:[^"\\]|\\.)*+")"""


def calls_in(text: str, name_keys: tuple[str, ...] = ("name",), *, is_cut: bool = False) -> list[Call] | None:
    """The calls of an object, or of a list of them, and nothing else, in JSON, in JSON that can be mended, or in
    Python's spelling; None if it is something else. `is_cut`: what is missing is none of the model's faults."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return None
    for spell in (str, partial(mended, may_close=not is_cut), python_value):
        spelt = spell(text)
        calls = None if spelt is None else _calls_in(spelt, name_keys)
        if calls is not None:
            return calls
    return None


def _calls_in(text: str, name_keys: tuple[str, ...]) -> list[Call] | None:
    try:
        spans = _list_items(text) if text.startswith("[") else [(0, len(text))]
        return [_call(text[start:end], name_keys) for start, end in spans] or None
    except (ValueError, RecursionError):
        return None


def is_object(text: str) -> bool:
    """Whether it is the text of a JSON object."""
    try:
        return isinstance(_DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def kind_of(text: str) -> str | None:
    """JSON schema's name of the type of the value that a text is; None if it is none."""
    try:
        return kind_of_value(_DECODER.decode(text))
    except (ValueError, RecursionError):
        return None


def _call(text: str, name_keys: tuple[str, ...]) -> Call:
    """The call that a JSON object is. ValueError if it is none."""
    members = _members(text)
    name = next((json.loads(members[key]) for key in name_keys if key in members), None)
    if not isinstance(name, str) and members.get("function", "").startswith("{"):  # as OpenAI's API has calls
        return _call(members["function"], ("name",))
    if not isinstance(name, str) or not name:
        raise ValueError("a call has no name")
    given = next((members[key] for key in _ARGUMENT_KEYS if key in members), None)
    if given is None:
        if not members.keys() <= {*name_keys, *_OTHER_KEYS}:  # they are somewhere else, and would be lost
            raise ValueError("the arguments are missing")
        given = "null"
    if given == "null" or given == '""':
        return Call(name, "{}")
    if given.startswith('"'):  # some models write the object as a text
        given = json.loads(given)
        given = given if is_object(given) else mended(given) or given
    if not is_object(given):
        raise ValueError("the arguments are no object")
    return Call(name, given.strip())


def _skip(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    assert match is not None, "it matches nothing, too"
    return match.end()


def _span(text: str, at: int) -> tuple[int, int]:
    """Where the JSON value at `at` begins and ends. ValueError if there is none."""
    return at, _DECODER.raw_decode(text, at)[1]


def _list_items(text: str) -> list[tuple[int, int]]:
    """The spans of a list's items. ValueError if the text is no list."""
    spans: list[tuple[int, int]] = []
    at = _skip(text, 1)
    while not text.startswith("]", at):
        if spans:
            at = _skip(text, _expect(text, at, ","))
        spans.append(_span(text, at))
        at = _skip(text, spans[-1][1])
    _expect_end(text, at + 1)
    return spans


def _members(text: str) -> dict[str, str]:
    """The texts of an object's values, the first where a key comes twice. ValueError if the text is no object."""
    members: dict[str, str] = {}
    at = _skip(text, _expect(text, 0, "{"))
    while not text.startswith("}", at):
        if members:
            at = _skip(text, _expect(text, at, ","))
        key, end = _DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key is no text")
        start, at = _span(text, _skip(text, _expect(text, _skip(text, end), ":")))
        members.setdefault(key, text[start:at])
        at = _skip(text, at)
    _expect_end(text, at + 1)
    return members


def _expect(text: str, at: int, char: str) -> int:
    if not text.startswith(char, at):
        raise ValueError(f"{char} is missing")
    return at + 1


def _expect_end(text: str, at: int) -> None:
    if at != len(text):
        raise ValueError("something follows")
