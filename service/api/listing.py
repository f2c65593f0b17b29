"""Pages of names, from the store's index: by cursor, with filters, and written off the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from adapters.index import Query, Row
from service.api.errors import BadRequest, quoted
from service.api.namespace import Namespace
from service.api.state import Services
from service.api.threads import in_turn
from service.engine.messages import Tier

MOST_PER_PAGE = 1000
MOST_RANK = (1 << 31) - 1  # beyond any that a model has; the index holds 64 bits


class Filters(BaseModel):
    """Query parameters of listings; those that are given add up."""

    model_config = ConfigDict(extra="forbid")

    after: str = Field("", max_length=256, description="the last name of the page before (its `last_id`)")
    prefix: str = Field("", max_length=256, description="how names begin")
    rank: int | None = Field(None, ge=1, le=MOST_RANK, description="largest rank of the adapter")
    state: Tier | None = Field(None, description="where the weights are")
    owner: str | None = Field(None, max_length=64, description="whose adapters; empty: those of nobody")
    pinned: bool | None = Field(None, description="whether operators keep it on the device")

    @property
    def are_given(self) -> bool:
        """Whether something beside names is asked for, which the base model has not."""
        return any(one is not None for one in (self.rank, self.state, self.owner, self.pinned))


def rows(services: Services, namespace: Namespace, filters: Filters, limit: int) -> tuple[list[Row], bool]:
    """A page of adapters, and whether more follow. Takes milliseconds: not for an event loop."""
    tiers = dict(services.engine.tiers)
    owner = None if filters.owner is None else namespace.owner_of(filters.owner)
    known = (filters.after, filters.prefix, filters.rank, owner, filters.pinned)
    query = Query(limit + 1, *known, viewer=namespace.viewer)
    if filters.state == "disk":
        query = msgspec.structs.replace(query, not_in_digests=frozenset(tiers))
    elif filters.state is not None:
        held = frozenset(digest for digest, tier in tiers.items() if tier == filters.state)
        query = msgspec.structs.replace(query, in_digests=held)
    found = namespace.store.page(query)
    return found[:limit], len(found) > limit


async def listing(build: Callable[[], Any]) -> Response:
    """What `build` returns, built and written in a thread: other requests' streams go on meanwhile. Plain data, which
    is by far the quickest for a long list, or an answer's model."""
    text = await in_turn(lambda: msgspec.json.encode(build(), enc_hook=BaseModel.model_dump))
    return Response(text, media_type="application/json")


def page(data: list[dict[str, Any]], id_field: str, *, has_more: bool) -> dict[str, Any]:
    """OpenAI's form of a page: `last_id` is what `after` takes."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0][id_field] if data else None,
        "last_id": data[-1][id_field] if data else None,
        "has_more": has_more,
    }


def _refuse_query(request: Request) -> None:
    for name in request.query_params:
        raise BadRequest(f"`{quoted(name)}` is not a parameter of this request; leave it out.", param=quoted(name))


# For routes that look at no query parameter: nothing that is asked for is dropped in silence.
no_query = Depends(_refuse_query)


def _refuse_repeats(request: Request) -> None:
    for name in request.query_params:
        if len(request.query_params.getlist(name)) > 1:
            raise BadRequest(f"`{quoted(name)}` is there twice; send it once.", param=quoted(name))


# For routes whose parameters have one value each: of two, one would be dropped in silence.
each_once = Depends(_refuse_repeats)
