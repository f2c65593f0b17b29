"""GET /v1/models."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from service.api.admission import resolve
from service.api.answers import ModelCard, ModelList
from service.api.listing import MOST_PER_PAGE, Filters, listing, no_query, page, rows
from service.api.openapi import errors
from service.api.state import Services, services_of

router = APIRouter(tags=["OpenAI"])


class _Filters(Filters):
    limit: int = Field(MOST_PER_PAGE, ge=1, le=MOST_PER_PAGE, description="most models of a page, the base included")


@router.get(
    "/v1/models", response_model=ModelList, responses=errors((400, 401, 429)), summary="List the base and its adapters"
)
async def list_models(request: Request, filters: Annotated[_Filters, Query()]) -> Response:
    """The base first, then the adapters by name, a page at a time: `has_more` says whether more follow after
    `last_id`. Adapters have the base as `parent` and their digest as `root`."""
    services = services_of(request)

    def build() -> dict[str, Any]:
        base = services.settings.base_name
        # The base comes before all adapters, whatever it is called.
        if filters.after == base:
            filters.after = ""
            has_base = False
        else:
            has_base = not filters.after and not filters.are_given and base.startswith(filters.prefix)
        found, has_more = rows(services, filters, filters.limit - has_base)
        cards = [_adapter_card(services, one.name, one.digest, one.created_at_seconds) for one in found]
        return page([_base_card(services)] * has_base + cards, "id", has_more=has_more)

    with services.calls.places():
        return await listing(build)


@router.get("/v1/models/{model}", dependencies=[no_query], responses=errors((400, 401, 404, 500)), summary="One model")
async def get_model(request: Request, model: str) -> ModelCard:
    """The card of the base or of an adapter, by any name that requests may use."""
    services = services_of(request)
    target = resolve(services, model)
    try:
        if target.lease is None:
            return ModelCard(**_base_card(services))
        record = target.lease.record
        name = record.reference if "@" in model else record.name
        return ModelCard(**_adapter_card(services, name, record.digest, record.version.created_at_seconds))
    finally:
        target.release()


def _base_card(services: Services) -> dict[str, Any]:
    name = services.settings.base_name
    return _card(services, id=name, created=services.started_at_seconds, root=name, parent=None)


def _adapter_card(services: Services, name: str, digest: str, created_at_seconds: float) -> dict[str, Any]:
    base = services.settings.base_name
    return _card(services, id=name, created=int(created_at_seconds), root=digest, parent=base)


def _card(services: Services, **fields: Any) -> dict[str, Any]:
    """The fields of ModelCard."""
    ready = services.engine.ready
    limit = None if ready is None else ready.max_model_len_tokens
    return {**fields, "object": "model", "owned_by": "multilora", "max_model_len": limit}
