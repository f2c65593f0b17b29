"""What of a query is refused: nothing that is asked for is dropped in silence."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import Depends, Request

from service.api.errors import BadRequest, quoted


def refuse_query(request: Request, but: Collection[str] = ()) -> None:
    """BadRequest for any parameter of the query `but` these."""
    for name in request.query_params:
        if name not in but:
            raise BadRequest(f"`{quoted(name)}` is not a parameter of this request; leave it out.", param=quoted(name))


def _refuse_query(request: Request) -> None:
    refuse_query(request)


# For routes that look at no query parameter.
no_query = Depends(_refuse_query)


def _refuse_repeats(request: Request) -> None:
    for name in request.query_params:
        if len(request.query_params.getlist(name)) > 1:
            raise BadRequest(f"`{quoted(name)}` is there twice; send it once.", param=quoted(name))


# For routes whose parameters have one value each: of two, one would be dropped.
each_once = Depends(_refuse_repeats)
