"""If-Match and If-None-Match as clients send them: a condition that is misread would let a change through."""

from __future__ import annotations

import pytest
from fastapi import Request

from adapters.errors import Stale
from adapters.files.name_versions import NameRecord, Version, move
from service.api.adapter_routes.adapters import condition_of
from service.api.errors import BadRequest

DIGEST = "0123456789abcdef" * 4
RECORD = NameRecord((Version(1, "f" * 64, 0.0), Version(2, DIGEST, 0.0)))


def holds(*headers: tuple[str, str], record: NameRecord | None = RECORD) -> bool:
    """Whether a name that stands for this may be changed under these headers."""
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    condition = condition_of(Request({"type": "http", "headers": sent}))
    try:
        condition(record, None)
    except Stale:
        return False
    return True


@pytest.mark.parametrize(
    "value",
    [
        *("*", " * ", "2", '"2"', f'"{DIGEST}"', DIGEST[:12], f"sha256:{DIGEST}", '"7", "2"', "7,2"),
        *('W/"1" , "2"', ', "2",', '"a, b","2"', '"","2"'),
    ],
)
def test_the_version_that_is_there_is_found(value: str) -> None:
    assert holds(("if-match", value))


@pytest.mark.parametrize(
    "value",
    [*('"*"', '"1"', 'W/"2"', f'W/"{DIGEST}"', f'"{DIGEST[:11]}"', '"02"', '" 2"', '"2,3"', '"latest"', '""', "0")],
)
def test_tags_of_other_versions_or_of_none_hold_nothing(value: str) -> None:
    assert not holds(("if-match", value))


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", ",", '"2', '2"', '""2""', "latest", "v2", "\u00b2", "w/2", 'W/ "2"', 'w/"2"', "2 3", '"1" "2"'),
        *('*, "2"', "2, *", "**", "@2", "-2", "'2'", DIGEST.upper()),
    ],
)
def test_what_is_no_list_of_tags_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match="version numbers"):
        holds(("if-match", value))


def test_several_lines_of_a_header_are_one_list() -> None:
    assert holds(("if-match", '"7"'), ("if-match", '"2"'))
    with pytest.raises(BadRequest):
        holds(("if-match", "*"), ("if-match", '"2"'))


def test_a_name_may_be_asked_to_be_free_and_nothing_else() -> None:
    assert holds(("if-none-match", "*"), record=None)
    assert not holds(("if-none-match", "*"))
    for value in ('"*"', '"2"', 'W/"2"', "", "*,*", "2"):
        with pytest.raises(BadRequest):
            holds(("if-none-match", value), record=None)
    with pytest.raises(BadRequest):
        holds(("if-none-match", "*"), ("if-match", "*"))
    assert condition_of(Request({"type": "http", "headers": []})) is move
