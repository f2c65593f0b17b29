"""GET /v1/models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from service.api.access.auth import caller_of, namespace_of
from service.api.adapter_routes.listing import (
    MOST_PER_PAGE,
    Digits,
    Filters,
    FoundPage,
    Listing,
    listing,
    page,
    page_of_adapters,
)
from service.api.admission.model_resolution import resolve
from service.api.openapi import errors
from service.api.schema.answers import ModelCard, ModelList
from service.api.schema.base import each_once, no_query
from service.api.state import Services, services_of

router = APIRouter(tags=["OpenAI"])

# Owner of the base and of adapters without a tenant.
_OPERATOR = "multilora"


class ModelFilters(Filters):
    after_id: str = Field("", max_length=256, description="the same as `after`, as Anthropic's clients call it")
    limit: Digits = Field(MOST_PER_PAGE, ge=1, le=MOST_PER_PAGE, description="most models of a page, the base included")


@router.get(
    "/v1/models",
    dependencies=[each_once],
    response_model=ModelList,
    responses=errors((400, 401, 429)),
    summary="List the base and its adapters",
)
async def list_models(request: Request, filters: Annotated[ModelFilters, Query()]) -> Response:
    """The base first, then the adapters by name, a page at a time: `has_more` says whether more follow after
    `last_id`. Cards have the fields of OpenAI's, vLLM's and Anthropic's lists."""
    services = services_of(request)
    base = services.settings.base_name
    # The base comes before all adapters, whatever it is called.
    filters.after = filters.after or filters.after_id
    has_base = not filters.after and not filters.are_given and base.startswith(filters.prefix)
    if filters.after == base:
        filters.after = ""
    limit_tokens = _limit_tokens(services)
    shows_paths = caller_of(request).may("admin")
    base_cards = [_base_card(services, limit_tokens, shows_paths=shows_paths)] * has_base

    def build(found: FoundPage) -> dict[str, Any]:
        cards = [
            _adapter_card(
                services,
                limit_tokens,
                namespace.shown_name(one.name),
                one.owner,
                (one.root if shows_paths else "") or one.digest,
                one.created_at_seconds,
            )
            for one in found.rows
        ]
        return page(base_cards + cards, "id", has_more=found.has_more)

    with services.calls.holding():
        if services.store is None:
            return await listing(lambda: page(base_cards, "id", has_more=False))
        namespace = namespace_of(request, services.store)
        key = ("models", has_base, limit_tokens, shows_paths)
        return await page_of_adapters(services, Listing(namespace, filters, filters.limit - has_base, key, None, build))


@router.get(
    "/v1/models/{model:adapter}",
    dependencies=[no_query],
    responses=errors((400, 401, 404, 500, 503)),
    summary="One model",
)
async def get_model(request: Request, model: str) -> ModelCard:
    """The card of the base or of an adapter, by any name that requests may use."""
    services, caller = services_of(request), caller_of(request)
    shows_paths = caller.may("admin")
    target = resolve(services, caller, model)
    try:
        if not target.parts:
            return ModelCard(**_base_card(services, _limit_tokens(services), shows_paths=shows_paths))
        record = target.parts[0].record
        name = f"{target.shown_name}@{record.version.number}" if "@" in model else target.shown_name
        version = record.version
        root, made = (version.root if shows_paths else "") or version.digest, version.created_at_seconds
        return ModelCard(**_adapter_card(services, _limit_tokens(services), name, record.owner, root, made))
    finally:
        target.release()


def _base_card(services: Services, limit_tokens: int | None, *, shows_paths: bool) -> dict[str, Any]:
    name = services.settings.base_name
    root = str(services.settings.model_dir) if shows_paths else name
    return _card(limit_tokens, name, services.started_at_seconds, root=root, parent=None)


def _adapter_card(
    services: Services, limit_tokens: int | None, name: str, owner: str, root: str, created_at_seconds: float
) -> dict[str, Any]:
    parent = services.settings.base_name
    return _card(limit_tokens, name, int(created_at_seconds), root=root, parent=parent, owned_by=owner or _OPERATOR)


def _card(
    limit_tokens: int | None, name: str, created: int, *, root: str, parent: str | None, owned_by: str = _OPERATOR
) -> dict[str, Any]:
    """The fields of ModelCard."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": owned_by,
        "root": root,
        "parent": parent,
        "max_model_len": limit_tokens,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _limit_tokens(services: Services) -> int | None:
    """Context length, prompt and answer together; None while there is no engine."""
    ready = services.engine.ready
    return None if ready is None else ready.max_model_len_tokens
