"""If-Match and If-None-Match: what a name must stand for so that it may be changed."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from adapters.names import Condition, if_absent, if_match, move
from service.api.errors import BadRequest

CONDITION_HEADERS: list[dict[str, Any]] = [
    {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": text}
    for name, text in (
        ("If-Match", "version numbers or digests of which the name must stand for one, or * for any; else 412"),
        ("If-None-Match", "* alone: the name must be free; else 412"),
    )
]


def condition_of(request: Request) -> Condition:
    """What the headers ask of a name; `move`, that is nothing, where neither is sent. BadRequest for what is not
    served."""
    match, none_match = _tags(request, "if-match"), _tags(request, "if-none-match")
    if none_match is None:
        return move if match is None else if_match(match)
    if none_match != ["*"] or match is not None:
        raise BadRequest("Send `If-None-Match: *`, or `If-Match` with version numbers or digests, or neither.")
    return if_absent


def refuse_conditions(request: Request, instead: str) -> None:
    """BadRequest if a condition is sent where none is looked at; `instead` says where it is."""
    if condition_of(request) is not move:
        raise BadRequest(f"If-Match and If-None-Match are not looked at here; {instead}.")


def _tags(request: Request, header: str) -> list[str] | None:
    """The entity tags of a header, without quotes; None where it is not sent. A weak tag matches nothing."""
    sent = request.headers.getlist(header)
    return [tag.strip().strip('"') for tag in ",".join(sent).split(",")] if sent else None
