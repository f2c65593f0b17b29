"""Pages of names, from the store's index: by cursor, with filters, written off the event loop, and only once while
nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from fastapi import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from adapters.store.name_index import Query, Row
from service.api.access.namespace import Namespace
from service.api.page_cache import WrittenPage
from service.api.state import Services
from service.engine.ipc.messages import Tier
from service.fairness.thread_pool import in_turn

MOST_PER_PAGE = 1000
# Whether a page is as it was written last is found in a thread if it shows facts of more: a millisecond for 1,000.
_MOST_LOOKED_UP_ON_LOOP = 100
MOST_RANK = (1 << 31) - 1  # beyond any that a model has


def _plain_digits(text: Any) -> Any:
    if isinstance(text, str) and not (text.isascii() and text.isdigit()):
        raise PydanticCustomError("digits", "it must be a whole number, in the digits 0 to 9 alone")
    return text


# A number in a query. By itself pydantic reads 1_0 as 10, and " 5", "+5" and "5.0" as 5.
Digits = Annotated[int, BeforeValidator(_plain_digits)]


class Filters(BaseModel):
    """Query parameters of listings; those that are given add up."""

    model_config = ConfigDict(extra="forbid")

    after: str = Field("", max_length=256, description="the last name of the page before (its `last_id`)")
    prefix: str = Field("", max_length=256, description="how names begin")
    rank: Digits | None = Field(None, ge=1, le=MOST_RANK, description="largest rank of the adapter")
    state: Tier | None = Field(None, description="where the weights are")
    owner: str | None = Field(None, max_length=64, description="whose adapters; empty: those of nobody")
    pinned: bool | None = Field(None, description="whether operators keep it on the device")

    @property
    def are_given(self) -> bool:
        """Whether something beside names is asked for, which the base model has not."""
        return any(one is not None for one in (self.rank, self.state, self.owner, self.pinned))


class FoundPage(NamedTuple):
    """Adapters of a page, and of each what `Listing.fact_of` says."""

    rows: list[Row]
    facts: Sequence[Any]
    has_more: bool


class Listing(NamedTuple):
    """A page of adapters for one caller, before it is built.

    limit    most adapters of it
    key      what it depends on beside these, the store and facts
    fact_of  name and digest -> what is shown of an adapter that the store does not know; it may change at any time
    build    the answer, as plain data, which is by far the quickest for a long list
    """

    namespace: Namespace
    filters: Filters
    limit: int
    key: Hashable
    fact_of: Callable[[str, str], Any] | None
    build: Callable[[FoundPage], dict[str, Any]]

    def cache_key(self) -> Hashable:
        """All that the page depends on beside the store's changes and facts."""
        seen = self.namespace.viewer, self.namespace.shown_owner("")
        return self.key, seen, self.limit, tuple(self.filters.model_dump().values())

    def facts_of(self, adapters: Iterable[tuple[str, str]]) -> tuple[Any, ...]:
        """Now."""
        return () if self.fact_of is None else tuple(self.fact_of(*one) for one in adapters)

    def is_current(self, page: WrittenPage) -> bool:
        """Whether it would be written as it was."""
        return page.change == self.namespace.store.num_changes() and page.facts == self.facts_of(page.adapters)


async def listing(build: Callable[[], Any]) -> Response:
    """Build and write a listing in a thread. `build` returns plain data or an answer's model."""
    text = await in_turn(lambda: msgspec.json.encode(build(), enc_hook=BaseModel.model_dump))
    return Response(text, media_type="application/json")


async def page_of_adapters(services: Services, wanted: Listing) -> Response:
    """The page, written in a thread unless it is what it was: other requests' streams go on meanwhile."""
    page = services.pages.get(wanted.cache_key())
    if page is None or len(page.adapters) > _MOST_LOOKED_UP_ON_LOOP or not wanted.is_current(page):
        page = await in_turn(_page, services, wanted)
    return Response(page.text, media_type="application/json")


def _page(services: Services, wanted: Listing) -> WrittenPage:
    """Takes milliseconds if it is not what it was: not for an event loop."""
    key = wanted.cache_key()
    page = services.pages.get(key)
    if page is not None and wanted.is_current(page):
        return page
    change = wanted.namespace.store.num_changes()
    rows, has_more = _rows(services, wanted)
    # The facts are read before the page is built from them, so that a page never shows newer ones than it is cached
    # for.
    adapters = tuple((row.name, row.digest) for row in rows) if wanted.fact_of is not None else ()
    facts = wanted.facts_of(adapters)
    page = WrittenPage(change, adapters, facts, msgspec.json.encode(wanted.build(FoundPage(rows, facts, has_more))))
    if wanted.filters.state is None:  # which adapters are in a tier is no change of the store
        services.pages.put(key, page)
    return page


def _rows(services: Services, wanted: Listing) -> tuple[list[Row], bool]:
    """The page's rows of the index, and whether more follow."""
    namespace, filters = wanted.namespace, wanted.filters
    owner = None if filters.owner is None else namespace.owner_of(filters.owner)
    # An own name may be given with its tenant before it; pages go by the names that they show.
    after = namespace.shown_name(namespace.full_name(filters.after))
    known = (after, filters.prefix, filters.rank, owner, filters.pinned)
    query = Query(wanted.limit + 1, *known, viewer=namespace.viewer)
    if filters.state is not None:
        tiers = dict(services.engine.tiers)
        if filters.state == "disk":
            query = msgspec.structs.replace(query, not_in_digests=frozenset(tiers))
        else:
            held = frozenset(digest for digest, tier in tiers.items() if tier == filters.state)
            query = msgspec.structs.replace(query, in_digests=held)
    found = namespace.store.page(query)
    return found[: wanted.limit], len(found) > wanted.limit


def page(data: list[dict[str, Any]], id_field: str, *, has_more: bool) -> dict[str, Any]:
    """OpenAI's form of a page: `last_id` is what `after` takes."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0][id_field] if data else None,
        "last_id": data[-1][id_field] if data else None,
        "has_more": has_more,
    }
