"""JSON beside an adapter's tensors: as much as trainers write is read, and what would take seconds is not parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.errors import Malformed, Unsupported
from adapters.extras import check_vocabulary
from adapters.format import MAX_CONTAINERS, MAX_VALUES, parse_json_object

TOO_MUCH = r"cannot be read: it may have 32768 lists and objects and 262144 commas\.$"


def entry(token_id: int) -> dict[str, Any]:
    """As tokenizers write one."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": f"<unused{token_id}>", **flags}


def check(**files: bytes | None) -> None:
    """With a base that has 10,000 such tokens."""
    known = {f"<unused{i}>": i for i in range(10_000)}
    names = ("added_tokens", "tokenizer_config", "tokenizer")
    check_vocabulary(*(files.get(name) for name in names), 10_000, known.get)


def test_files_of_a_tokenizer_with_6400_added_tokens_are_read() -> None:
    entries = [entry(i) for i in range(6400)]
    rest = {"model": {"vocab": {"a": 0}, "merges": [["a", "b"]] * 10_000}}
    for indent in (None, 2):
        check(
            added_tokens=json.dumps({one["content"]: one["id"] for one in entries}, indent=indent).encode(),
            tokenizer_config=json.dumps({"added_tokens_decoder": {str(e["id"]): e for e in entries}}).encode(),
            tokenizer=json.dumps({"version": "1.0", "added_tokens": entries, **rest}, indent=indent).encode(),
        )


@pytest.mark.parametrize("tail", [b"", b', "model": {"merges": [["a", "b"], ["c'], ids=["to its end", "cut off behind"])
def test_a_token_that_the_base_has_not_is_found_at_any_place(tail: bytes) -> None:
    listed = json.dumps([entry(1), entry(2), entry(10_000)]).encode()
    with pytest.raises(Unsupported, match="<unused10000>"):
        check(tokenizer=b'{"added_tokens" : ' + listed + (tail or b"}"))


@pytest.mark.parametrize("empty", ["[]", "[ ]", "null", '{"a": [1]}'])
def test_no_list_of_added_tokens_adds_none(empty: str) -> None:
    check(tokenizer=f'{{"added_tokens": {empty}, "model": {{"merges": [["a", "b"]]}}}}'.encode())


@pytest.mark.parametrize("text", ["[{}", "[{} {}]", "[{},]", "[,]", '[{"content": "a"}; {}]', "[{]"])
def test_a_broken_list_is_refused(text: str) -> None:
    with pytest.raises(Malformed, match=r"^tokenizer.json cannot be read: its list of added tokens is broken\.$"):
        check(tokenizer=f'{{"added_tokens": {text}'.encode())


@pytest.mark.parametrize("item", [b"[]", b"{}", b"0", b'"a"'])
def test_a_list_of_millions_is_not_parsed(item: bytes) -> None:
    text = b"[" + b",".join([item] * (1 << 21)) + b"]"
    with pytest.raises(Malformed, match=r"^tokenizer.json cannot be read: it has more than 16384 added tokens\.$"):
        check(tokenizer=b'{"added_tokens":' + text + b"}")
    for name in ("added_tokens", "tokenizer_config"):
        with pytest.raises(Malformed, match=TOO_MUCH):
            check(**{name: b'{"x":' + text + b"}"})


def test_one_entry_of_millions_is_not_parsed() -> None:
    with pytest.raises(Malformed, match="broken"):
        check(tokenizer=b'{"added_tokens":[[' + b",".join([b"[]"] * (1 << 20)) + b"]]}")


def test_the_bounds_are_met_exactly() -> None:
    most = b'{"x":[' + b",".join([b"{}"] * (MAX_CONTAINERS - 2)) + b"]}"
    assert len(parse_json_object(most, "it")["x"]) == MAX_CONTAINERS - 2
    values = b'{"x":[' + b",".join([b"0"] * (MAX_VALUES + 1)) + b"]}"
    assert len(parse_json_object(values, "it")["x"]) == MAX_VALUES + 1
    for text in (most.replace(b"]}", b",{}]}"), values.replace(b"]}", b",0]}")):
        with pytest.raises(Malformed, match=TOO_MUCH):
            parse_json_object(text, "it")
        assert parse_json_object(text, "it", is_bounded=False)
