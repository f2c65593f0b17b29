"""How Qwen3-Coder spells a call in XML, and what the values in it are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from service.text.calls.json_reader import PYTHON_WORDS
from service.text.calls.json_text import kind_of
from service.text.calls.pythonic import python_value
from service.text.calls.value_kinds import Listed, is_listed

START, END = "<tool_call>", "</tool_call>"
FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"
NAMED = re.compile(r"\s*<function=\s*(?P<name>[^>\s]+)\s*>\s*")
# With what follows the name of a call.
OPENING = re.compile(rf"{NAMED.pattern}(?={PARAMETER}|{END_OF_FUNCTION})")
PARAMETER_HEAD = re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>")
CLOSING = re.compile(r"\s*</function>\s*")
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
