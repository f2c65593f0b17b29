"""Refuses unknown query parameters, so that none is dropped in silence."""

from __future__ import annotations

from fastapi import Depends, Request

from service.api.errors import BadRequest, quoted

# Whoever moves a program from Azure's OpenAI to another server leaves the one in its client's settings, which send it
# with every request; Anthropic's clients send the other with requests that name a beta in a header.
_INERT = (b"api-version", b"beta")


def without_inert(query: bytes) -> bytes:
    """The query without what means nothing here."""
    if not any(name in query for name in _INERT):
        return query
    return b"&".join(part for part in query.split(b"&") if part.partition(b"=")[0] not in _INERT)


def refuse_query(request: Request) -> None:
    """BadRequest for any parameter of the query."""
    for name in request.query_params:
        raise BadRequest(f"`{quoted(name)}` is not a parameter of this request; leave it out.", param=quoted(name))


# For routes that look at no query parameter.
no_query = Depends(refuse_query)


# Lists, the second as OpenAI's clients write the first.
_LISTS = ("include", "include[]")


def _refuse_repeats(request: Request) -> None:
    for name in request.query_params:
        if name not in _LISTS and len(request.query_params.getlist(name)) > 1:
            raise BadRequest(f"`{quoted(name)}` is there twice; send it once.", param=quoted(name))


# For routes whose parameters have one value each, but for lists: of two, one would be dropped.
each_once = Depends(_refuse_repeats)
