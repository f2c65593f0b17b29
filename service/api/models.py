"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from service.api.admission import resolve
from service.api.answers import ModelCard, ModelList
from service.api.listing import listing
from service.api.openapi import errors
from service.api.state import Services, services_of

router = APIRouter(tags=["OpenAI"])


@router.get(
    "/v1/models", response_model=ModelList, responses=errors((401, 429)), summary="List the base and its adapters"
)
async def list_models(request: Request) -> Response:
    """The base first, then the adapters by name. Adapters have the base as `parent` and their digest as `root`."""
    services = services_of(request)

    def build() -> ModelList:
        names = services.store.names() if services.store is not None else {}
        adapters = (
            _adapter_card(services, name, alias.digest, alias.created_at_seconds) for name, alias in names.items()
        )
        return ModelList(object="list", data=[_base_card(services), *adapters])

    with services.calls.places():
        return await listing(build)


@router.get("/v1/models/{model}", responses=errors((401, 404, 500)), summary="One model")
async def get_model(request: Request, model: str) -> ModelCard:
    """The card of the base or of an adapter, by any name that requests may use."""
    services = services_of(request)
    target = resolve(services, model)
    try:
        if target.lease is None:
            return _base_card(services)
        record = target.lease.record
        return _adapter_card(services, record.name, record.digest, record.version.created_at_seconds)
    finally:
        target.release()


def _base_card(services: Services) -> ModelCard:
    name = services.settings.base_name
    return _card(services, id=name, created=services.started_at_seconds, root=name, parent=None)


def _adapter_card(services: Services, name: str, digest: str, created_at_seconds: float) -> ModelCard:
    return _card(
        services,
        id=name,
        created=int(created_at_seconds),
        root=digest,
        parent=services.settings.base_name,
    )


def _card(services: Services, **fields: Any) -> ModelCard:
    ready = services.engine.ready
    return ModelCard(
        object="model",
        owned_by="multilora",
        max_model_len=None if ready is None else ready.max_model_len_tokens,
        **fields,
    )
