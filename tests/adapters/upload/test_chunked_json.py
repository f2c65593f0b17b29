"""JSON in pieces: the value and the words of Python's parser, whatever the text and wherever it is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import chunked_json
from adapters.chunked_json import parsed
from adapters.gil_lock import GIL_LOCK
from tests.support.tiers import examples

MIB, PIECE_BYTES = 1 << 20, 1 << 14
# Long enough for any number and character that is made here.
SHORT_PIECE_BYTES = 48
NASTY = st.text(alphabet='[]{},:"\\ab\n\u20ac\U0001f600\ud83d\ude00', max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.just(-2.5e-7) | NASTY,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(NASTY, inner, max_size=6),
    max_leaves=40,
)
SPACING = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}, {"separators": (" , ", "  :")}])
# (where, as a part of the length; how many bytes are taken away; what comes in their place)
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.text('[]{},:" \\u12eDnt', max_size=2)), max_size=2)


def whole(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))


def outcome(parse: Callable[[], Any]) -> str:
    """The value as a text, or what is wrong."""
    try:
        return repr(parse())
    except json.JSONDecodeError as error:
        return error.msg


@settings(max_examples=examples(600), deadline=None)
@given(value=VALUES, spacing=SPACING, is_ascii=st.booleans(), edits=EDITS)
def test_all_is_as_with_pythons_parser(
    value: Any, spacing: dict[str, Any], is_ascii: bool, edits: list[tuple[float, int, str]]
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, **spacing)
    for where, num_gone, added in edits:
        at = int(where * len(text))
        text = text[:at] + added + text[at + num_gone :]
    body = text.encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_json, "PIECE_BYTES", SHORT_PIECE_BYTES)
        assert outcome(lambda: parsed(body, whole)) == outcome(lambda: whole(body))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1,2,]" + b" " * 60,
        b"[1, ,2]" + b" " * 60,
        b"[ ,[1]" + b" " * 60 + b"]",
        b"[" + b"1," * 40 + b"]",
        b"[" + b"1," * 40 + b"1}",
        b'{"a":1,' * 2 + b" " * 60 + b"}",
        b'{"' + b"a" * 60 + b'" 1}',
        b'{"' + b"a" * 60 + b'":1 "b":2}',
        b"[" * 30 + b"]" * 31,
        b'"' + b"a" * 60,
        b'"' + b"a" * 60 + b"\n" + b'"',
        b'"' + b"a" * 60 + b"\\u20ac",
        b'"' + b"a" * 46 + b"\\\xe2\x82\xac" + b'"',
        b'"' + b"\\ud83d" * 20 + b'"',
        b'"' + b"a" * 39 + b"\\ud83d\\ude00" * 4 + b'"',
        b'"' + b"a" * 35 + b"\\ud83d\\ud83d\\ude00" * 4 + b'"',
        b"[" + b" " * 60 + b"truex]",
        b"[" + b" " * 60 + b"\xe2\x82\xac]",
        b'"\xe2\x82\xac' + b'" ' * 40,
    ],
)
def test_what_is_no_json_is_told_in_the_same_words(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_json, "PIECE_BYTES", SHORT_PIECE_BYTES)
    assert outcome(lambda: parsed(text, whole)) == outcome(lambda: whole(text))


TEXTS = {
    "numbers": b'{"tokens": [' + b"100, " * 200_000 + b"1]}",
    "texts": b"[" + b'"ab",' * 200_000 + b'""]',
    "empty lists": b"[" + b"[]," * 300_000 + b"[]]",
    "small objects": b"[" + b'{"role":"user","content":[{"type":"text","text":"a"}]},' * 20_000 + b"1]",
    "fields": json.dumps({str(number): number for number in range(100_000)}).encode(),
    "one text": b'{"a": "' + b"b" * MIB + b'"}',
    "escapes": b'["' + b"\\ud83d\\ude00\\n" * 100_000 + b'"]',
    "characters": b'["' + "\u20ac".encode() * 400_000 + b'"]',
    "deep, then long": b"[" * 500 + b"1," * 500_000 + b"1" + b"]" * 500,
    "blanks": b"[" + b" " * MIB + b"]",
}


@pytest.mark.parametrize("name", TEXTS)
def test_no_piece_is_longer_than_it_may_be(name: str) -> None:
    text, lengths = TEXTS[name], list[int]()

    def parse(piece: bytes) -> Any:
        lengths.append(len(piece))
        return whole(piece)

    before = GIL_LOCK.num_pieces
    assert parsed(text, parse) == whole(text)
    assert GIL_LOCK.num_pieces - before >= len(text) // PIECE_BYTES, "a turn for each"
    assert max(lengths, default=0) <= PIECE_BYTES + 2, "with the quotes or brackets around it"


def test_what_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(RecursionError):
        parsed(b"[" * MIB, whole)


def test_a_number_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than a piece"):
        parsed(b'{"seed": ' + b"9" * MIB + b"}", whole)


def test_fields_of_the_outermost_object_are_replaced_as_they_come() -> None:
    text = json.dumps({str(number): {"a": number} for number in range(5000)}).encode()
    seen = list[str]()

    def field(name: str, value: Any) -> Any:
        seen.append(name)
        return value["a"]

    assert parsed(text, whole, field=field) == {str(number): number for number in range(5000)}
    assert seen == [str(number) for number in range(5000)]
    assert parsed(b'{"x": {"a": 1}}', whole, field=field) == {"x": 1}, "in a text of one piece too"
