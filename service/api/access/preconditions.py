"""If-Match and If-None-Match: what a name must stand for so that it may be changed."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request

from adapters.files.name_versions import Condition, if_absent, if_match, is_selector, move
from service.api.errors import BadRequest

# An entity tag, or what a client is likely to send for one: a version's number or digest without quotes.
_TAG = re.compile(r'(W/)?"([^"]*)"|([0-9a-f]+|sha256:[0-9a-f]+)')
_ONE = r'(?:(?:W/)?"[^"]*"|[0-9a-f]+|sha256:[0-9a-f]+)'
_LIST = re.compile(rf"[ \t,]*{_ONE}(?:[ \t]*,[ \t,]*{_ONE})*[ \t,]*")

CONDITION_HEADERS: list[dict[str, Any]] = [
    {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": text}
    for name, text in (
        ("If-Match", "version numbers or digests of which the name must stand for one, or * for any; else 412"),
        ("If-None-Match", "* alone: the name must be free; else 412"),
    )
]


def condition_of(request: Request) -> Condition:
    """The condition that the headers set on a name; `move`, which allows every change, where neither is sent.
    BadRequest for an unsupported form."""
    match, none_match = _tags(request, "if-match"), _tags(request, "if-none-match")
    if none_match is None:
        return move if match is None else if_match(match)
    if none_match != ["*"] or match is not None:
        raise BadRequest("Send `If-None-Match: *`, or `If-Match` with version numbers or digests, or neither.")
    return if_absent


def refuse_conditions(request: Request, instead: str) -> None:
    """BadRequest if a condition is sent where none is looked at; `instead` says where it is, or why it is not."""
    if condition_of(request) is not move:
        raise BadRequest(f"If-Match and If-None-Match are not looked at here; {instead}.")


def _tags(request: Request, header: str) -> list[str] | None:
    """The versions that a header names, ["*"] for any; None where it is not sent. What can be no version's, weak tags
    and "*" in quotes among them, matches nothing and is left out. BadRequest for what is no list of entity tags: a
    condition that is misread would let a change through."""
    sent = request.headers.getlist(header)
    if not sent:
        return None
    text = ",".join(sent)
    if text.strip() == "*":
        return ["*"]
    if not _LIST.fullmatch(text):
        raise BadRequest(
            "If-Match takes version numbers, digests of 12 digits or more, entity tags in double quotes, with commas "
            "between them, or a * alone; If-None-Match takes a * alone."
        )
    tags = [(weak, quoted or bare) for weak, quoted, bare in _TAG.findall(text)]
    return [tag for weak, tag in tags if not weak and is_selector(tag)]
