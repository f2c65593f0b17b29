"""Replacing an adapter without a gap: PUT under a condition, the history of a name, and the way back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from adapters.files.manifest import AdapterRecord
from adapters.files.name_versions import Change, or_made, while_ephemeral
from service.api.access.auth import caller_of, namespace_of
from service.api.access.preconditions import CONDITION_HEADERS, condition_of, refuse_conditions
from service.api.adapter_routes.adapters import audit_change, describe, require_open_store, require_store, take_upload
from service.api.entry.request_log import note, notes_of
from service.api.openapi import DELETE_ERRORS, REPLACE_BODY, UPLOAD_ERRORS, errors
from service.api.schema.answers import AdapterHistory, AdapterResponse, AdapterVersion
from service.api.schema.base import each_once, no_query
from service.api.schema.requests import RollbackRequest, VisibilityRequest
from service.api.state import services_of
from service.api.threads import in_turn
from service.api.uploads.multipart import UploadQuery, visible_to

router = APIRouter(tags=["adapters"])


@router.put(
    "/v1/adapters/{name:adapter}",
    dependencies=[each_once],
    response_model=AdapterResponse,
    responses={
        **UPLOAD_ERRORS,
        **errors((412,)),
        201: {"model": AdapterResponse, "description": "The name stands for a new version."},
        200: {"model": AdapterResponse, "description": "The name stood for the same content already."},
    },
    openapi_extra={"requestBody": REPLACE_BODY, "parameters": CONDITION_HEADERS},
    summary="Upload an adapter, in the place of the name's current one if it has one",
)
async def put_adapter(request: Request, name: str, query: Annotated[UploadQuery, Query()]) -> JSONResponse:
    """The name stands for the new version in one step: running requests end on the one they began with, new ones use
    this one at once. The same content again makes no version."""
    store = require_open_store(services_of(request))
    condition = or_made(condition_of(request))
    early = while_ephemeral(condition) if query.ephemeral else condition
    store.check(namespace_of(request, store).place(name), early)  # better lost now than after gigabytes
    record, created, sent_note = await take_upload(request, name, condition, query)
    return _answer(request, record, sent_note, status=201 if created else 200)


@router.get(
    "/v1/adapters/{name:adapter}/history",
    dependencies=[no_query],
    responses=errors((400, 401, 404)),
    summary="List the versions of an adapter",
)
async def get_history(request: Request, name: str) -> AdapterHistory:
    """The versions that are kept, newest first; the first one is what the name stands for. Requests may name each as
    `name@number` or `name@digest`."""
    store = require_store(services_of(request))
    namespace = namespace_of(request, store)
    record = store.versions(namespace.find(name))
    may_change = namespace.may_change(record.owner)
    return AdapterHistory(
        object="list",
        name=name,
        owner=namespace.shown_owner(record.owner),
        visibility=record.visibility,
        shared_with=list(record.shared_with) if may_change else [],
        data=[
            AdapterVersion(
                number=one.number,
                digest=one.digest,
                created=int(one.created_at_seconds),
                by=one.by if may_change else "",
                note=one.note,
                same_as=one.same_as,
            )
            for one in reversed(record.versions)
        ],
    )


@router.post(
    "/v1/adapters/{name:adapter}/rollback",
    dependencies=[no_query],
    response_model=AdapterResponse,
    responses={**DELETE_ERRORS, **errors((412,))},
    openapi_extra={"parameters": CONDITION_HEADERS},
    summary="Go back to an earlier version of an adapter",
)
async def roll_back(request: Request, name: str, body: RollbackRequest) -> JSONResponse:
    """The earlier content becomes the name's newest version, in one step, as an upload of it would."""
    services = services_of(request)
    store = require_store(services)
    caller_of(request).tenant.take_change()
    full_name = namespace_of(request, store).find_own(name)
    change = Change(caller_of(request).by, body.note)
    selector = "" if body.version is None else str(body.version)
    condition = condition_of(request)
    with notes_of(request).phase("move"):
        record, created = await in_turn(store.rollback, full_name, selector, change, condition=condition)
    services.published(record)
    note(request, adapter=record.reference, digest=record.digest[:12], created=created)
    audit_change(request, "rollback", record, created=created)
    return _answer(request, record, body.note)


@router.patch(
    "/v1/adapters/{name:adapter}",
    dependencies=[no_query],
    response_model=AdapterResponse,
    responses=DELETE_ERRORS,
    summary="Say who may use an adapter",
)
async def change_visibility(request: Request, name: str, body: VisibilityRequest) -> JSONResponse:
    """Change which tenants beside the owner may use a name, with all its versions. Running requests go on."""
    refuse_conditions(request, "who may use a name holds for all that it stands for")
    store = require_store(services_of(request))
    caller_of(request).tenant.take_change()
    full_name = namespace_of(request, store).find_own(name)
    visibility, shared_with = visible_to(body.visibility, ",".join(body.shared_with))
    assert visibility is not None, "a field that must be there"
    await in_turn(store.set_visibility, full_name, visibility, shared_with)
    record = store.get(full_name)
    audit_change(request, "visibility", record, shared_with=",".join(shared_with) or None)
    return _answer(request, record)


def _answer(request: Request, record: AdapterRecord, sent_note: str = "", *, status: int = 200) -> JSONResponse:
    """The load report; `ETag` is what If-Match takes."""
    return JSONResponse(
        describe(request, record, sent_note).model_dump(), status_code=status, headers={"ETag": f'"{record.digest}"'}
    )
