"""GET /v1/models."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from service.api.answers import ModelCard, ModelList
from service.api.auth import caller_of, namespace_of
from service.api.listing import MOST_PER_PAGE, Filters, each_once, listing, no_query, page, rows
from service.api.openapi import errors
from service.api.state import Services, services_of
from service.api.targets import resolve

router = APIRouter(tags=["OpenAI"])

# Of the base and of adapters that are no tenant's.
_OPERATOR = "multilora"


class _Filters(Filters):
    limit: int = Field(MOST_PER_PAGE, ge=1, le=MOST_PER_PAGE, description="most models of a page, the base included")


@router.get(
    "/v1/models",
    dependencies=[each_once],
    response_model=ModelList,
    responses=errors((400, 401, 429)),
    summary="List the base and its adapters",
)
async def list_models(request: Request, filters: Annotated[_Filters, Query()]) -> Response:
    """The base first, then the adapters by name, a page at a time: `has_more` says whether more follow after
    `last_id`. Adapters have the base as `parent` and their digest as `root`."""
    services = services_of(request)

    namespace = None if services.store is None else namespace_of(request, services.store)

    def build() -> dict[str, Any]:
        base = services.settings.base_name
        # The base comes before all adapters, whatever it is called.
        if filters.after == base:
            filters.after = ""
            has_base = False
        else:
            has_base = not filters.after and not filters.are_given and base.startswith(filters.prefix)
        cards, has_more = [_base_card(services)] * has_base, False
        if namespace is not None:
            found, has_more = rows(services, namespace, filters, filters.limit - has_base)
            cards += [
                _adapter_card(services, namespace.shown_name(one.name), one.owner, one.digest, one.created_at_seconds)
                for one in found
            ]
        return page(cards, "id", has_more=has_more)

    with services.calls.places():
        return await listing(build)


@router.get(
    "/v1/models/{model:adapter}",
    dependencies=[no_query],
    responses=errors((400, 401, 404, 500, 503)),
    summary="One model",
)
async def get_model(request: Request, model: str) -> ModelCard:
    """The card of the base or of an adapter, by any name that requests may use."""
    services = services_of(request)
    target = resolve(services, caller_of(request), model)
    try:
        if target.lease is None:
            return ModelCard(**_base_card(services))
        record = target.lease.record
        name = f"{target.shown_name}@{record.version.number}" if "@" in model else target.shown_name
        card = _adapter_card(services, name, record.owner, record.digest, record.version.created_at_seconds)
        return ModelCard(**card)
    finally:
        target.release()


def _base_card(services: Services) -> dict[str, Any]:
    name = services.settings.base_name
    return _card(services, id=name, created=services.started_at_seconds, root=name, parent=None)


def _adapter_card(services: Services, name: str, owner: str, digest: str, created_at_seconds: float) -> dict[str, Any]:
    fields = {"id": name, "created": int(created_at_seconds), "root": digest, "parent": services.settings.base_name}
    return _card(services, owned_by=owner or _OPERATOR, **fields)


def _card(services: Services, *, owned_by: str = _OPERATOR, **fields: Any) -> dict[str, Any]:
    """The fields of ModelCard."""
    ready = services.engine.ready
    limit = None if ready is None else ready.max_model_len_tokens
    return {**fields, "object": "model", "owned_by": owned_by, "max_model_len": limit}
