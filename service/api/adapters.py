"""/v1/adapters: upload, list, show, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from adapters.names import Change, Condition, keep
from adapters.records import AdapterRecord
from adapters.store import AdapterStore
from service.api.answers import AdapterDeleted, AdapterList, AdapterResponse, AdapterSummary, ModuleReport
from service.api.auth import caller_of
from service.api.conditions import CONDITION_HEADERS, condition_of, refuse_conditions
from service.api.errors import BadRequest, NotReady
from service.api.listing import listing
from service.api.openapi import DELETE_ERRORS, UPLOAD_BODY, UPLOAD_ERRORS, errors
from service.api.requestlog import note
from service.api.state import Services, services_of
from service.api.upload import in_upload_thread, receive_upload

router = APIRouter(tags=["adapters"])

_State = Literal["disk", "host", "device"]


@router.post(
    "/v1/adapters",
    status_code=201,
    response_model=AdapterResponse,
    responses={
        **UPLOAD_ERRORS,
        200: {"model": AdapterResponse, "description": "The name already stands for the same content."},
    },
    openapi_extra={"requestBody": UPLOAD_BODY},
    summary="Upload an adapter",
)
async def upload_adapter(request: Request) -> JSONResponse:
    """Check, store and name a PEFT LoRA adapter. It can be used in the next step; the answer says what was bound. A
    name that stands for other content is left as it is: PUT replaces that."""
    refuse_conditions(request, "send PUT /v1/adapters/{name}")
    record, created = await take_upload(request, None, keep)
    answer = describe(services_of(request), record)
    return JSONResponse(answer.model_dump(), status_code=201 if created else 200)


async def take_upload(request: Request, name: str | None, condition: Condition) -> tuple[AdapterRecord, bool]:
    """Read the adapter in the request's body, check it, and make it the current version of its name, which is `name` or
    in the body. Returns (record, created) as `Upload.finish` does."""
    services = services_of(request)
    store = require_open_store(services)
    # The announced bytes include the multipart framing, so the store's own limit is left to its running count.
    announced = int(request.headers.get("content-length", 0))
    with services.uploading():
        upload = await in_upload_thread(store.begin, declared_bytes=min(announced, store.limits.max_upload_bytes))
        try:
            sent = await receive_upload(request, store, upload)
            change = Change(caller_of(request), sent.note)
            record, created = await in_upload_thread(upload.finish, sent.name_for(name), change, condition=condition)
        finally:
            await in_upload_thread(upload.discard)
    note(request, adapter=record.reference, digest=record.digest[:12], created=created)
    services.published(record)
    return record, created


@router.get("/v1/adapters", response_model=AdapterList, responses=errors((400, 401, 429)), summary="List the adapters")
async def list_adapters(request: Request) -> Response:
    """All adapters by name; what each is bound to is told by its own address."""
    services = services_of(request)
    store = require_store(services)

    def build() -> AdapterList:
        state_of = _states(services)
        return AdapterList(
            object="list",
            data=[AdapterSummary(**_summary(services, record, state_of(record.digest))) for record in store.each()],
        )

    with services.calls.places():
        return await listing(build)


@router.get("/v1/adapters/{name}", responses=errors((400, 401, 404, 500)), summary="Show an adapter")
async def get_adapter(request: Request, name: str) -> AdapterResponse:
    """What the adapter is bound to, and where it is now."""
    services = services_of(request)
    return describe(services, require_store(services).get(name))


@router.delete(
    "/v1/adapters/{name}",
    responses={**DELETE_ERRORS, **errors((412,))},
    openapi_extra={"parameters": CONDITION_HEADERS},
    summary="Delete an adapter",
)
async def delete_adapter(request: Request, name: str) -> AdapterDeleted:
    """The name and its versions are gone when this returns. Requests that use the adapter finish; its rows, memory and
    files go with the last of them."""
    services = services_of(request)
    if name == services.settings.base_name:
        raise BadRequest(f"{name!r} is the base model, which cannot be deleted; name an adapter.")
    digest = await asyncio.to_thread(require_store(services).delete, name, condition_of(request))
    services.deleted(name)
    note(request, adapter=name, digest=digest[:12])
    return AdapterDeleted(name=name, object="adapter.deleted", digest=digest, deleted=True)


def require_store(services: Services) -> AdapterStore:
    """The store. BadRequest where LoRA is off."""
    if services.store is None:
        raise BadRequest("LoRA is off, since --adapter-row-bytes is 0; start the server with a row budget.")
    return services.store


def require_open_store(services: Services) -> AdapterStore:
    """The store, if it takes new adapters now. NotReady while the server shuts down, and until the engine has told how
    many rows it has: an adapter taken before that would not be checked against them."""
    store = require_store(services)
    if services.draining:
        raise NotReady("The server is shutting down; upload to another one.")
    if store.row_plan is None:
        services.require_ready()
        assert store.row_plan is not None, "ready without a row plan"
    return store


def describe(services: Services, record: AdapterRecord) -> AdapterResponse:
    """The load report of an adapter."""
    manifest = record.manifest
    return AdapterResponse(
        **_summary(services, record, _states(services)(record.digest)),
        modules=[
            ModuleReport(module=one.module, rank=one.rank, scaling=one.scaling, bytes=one.num_bytes)
            for one in manifest.modules
        ],
        notes=list(manifest.notes),
    )


def _summary(services: Services, record: AdapterRecord, state: _State) -> dict[str, Any]:
    """The fields of AdapterSummary."""
    manifest = record.manifest
    return {
        "name": record.name,
        "object": "adapter",
        "version": record.version.number,
        "digest": manifest.digest,
        "base": services.settings.base_name,
        "created": int(record.version.created_at_seconds),
        "rank": manifest.rank,
        "bytes": manifest.num_bytes,
        "rows": manifest.rows,
        "state": state,
        "has_chat_template": manifest.has_chat_template,
        "last_used": services.last_used_seconds.get(record.name),
    }


def _states(services: Services) -> Callable[[str], _State]:
    """Where the weights of a digest are now."""
    stats = services.engine.stats
    on_device = frozenset() if stats is None else frozenset(stats.adapters_on_device)
    on_host = frozenset() if stats is None else frozenset(stats.adapters_on_host)
    return lambda digest: "device" if digest in on_device else "host" if digest in on_host else "disk"
