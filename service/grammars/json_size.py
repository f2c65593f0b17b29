"""How long plain data is as JSON, without writing it: to write a million numbers keeps Python's lock for 0.3 s, and the
longest integers take 0.2 ms each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Least characters of each, with the separator behind it: `1, `, `1.5, `, `"": `, and a list the brackets alone, since
# its last item has no separator.
_LEAST_CHARS, _LEAST_FLOAT_CHARS, _QUOTES_CHARS, _BRACKETS_CHARS = 3, 5, 4, 2
# A decimal digit has 3.3 bits.
_BITS_OF_A_DIGIT = 4


def each_value(data: Any) -> Iterator[Any]:
    """The data itself, and all keys and values in it, however deep; in no order."""
    waiting = [data]
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, dict):
            waiting.extend(one)
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def least_chars(data: Any, enough: int) -> int:
    """At least so many characters `json.dumps` would write of a list or object. The walk through it ends where they are
    more than `enough`."""
    num_chars = -_BRACKETS_CHARS
    for one in each_value(data):
        if isinstance(one, str):
            num_chars += len(one) + _QUOTES_CHARS
        elif isinstance(one, float):
            num_chars += _LEAST_FLOAT_CHARS
        elif isinstance(one, int):
            num_chars += _LEAST_CHARS + (one.bit_length() - 1) // _BITS_OF_A_DIGIT
        else:
            num_chars += _BRACKETS_CHARS
        if num_chars > enough:
            break
    return num_chars
