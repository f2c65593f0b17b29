"""Routes below an adapter's name: its replacement without a gap, its history and the way back, who may use it, its pin
on the device, and its files on their way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import ExitStack, suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from adapters.files.manifest import AdapterRecord
from adapters.files.name_versions import Change, or_made, while_ephemeral
from adapters.files.paths import separate, without_root
from adapters.store.catalog import Pins
from adapters.store.store import AdapterStore
from service.api.access.auth import caller_of, namespace_of
from service.api.adapter_routes.adapters import (
    CONDITION_HEADERS,
    audit_change,
    condition_of,
    describe,
    refuse_conditions,
    require_open_store,
    require_store,
    take_upload,
)
from service.api.entry.request_log import note, notes_of
from service.api.errors import BadRequest
from service.api.openapi import DELETE_ERRORS, REPLACE_BODY, UPLOAD_ERRORS, errors
from service.api.schema.answers import AdapterHistory, AdapterResponse, AdapterVersion
from service.api.schema.base import each_once, no_query
from service.api.schema.control import RollbackRequest, SettingsRequest
from service.api.state import Services, services_of
from service.api.uploads.multipart import UploadQuery, visible_to
from service.fairness.thread_pool import in_turn
from service.logs import LOGGER

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
    summary="Upload an adapter, instead of the name's current one if it has one",
)
async def put_adapter(request: Request, name: str, query: Annotated[UploadQuery, Query()]) -> JSONResponse:
    """The name stands for the new version in one step: running requests end on the one they began with, new ones use
    this one at once. The same content again makes no version."""
    store = require_open_store(services_of(request))
    condition = or_made(condition_of(request))
    early = while_ephemeral(condition) if query.ephemeral else condition
    store.check(namespace_of(request, store).name_for_upload(name), early)  # better lost now than after gigabytes
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
    summary="Say who may use an adapter, and what its requests do when it moves",
)
async def change_settings(request: Request, name: str, body: SettingsRequest) -> JSONResponse:
    """Change which tenants beside the owner may use a name, with all its versions, and what requests that come from now
    on do when it moves. Running requests go on."""
    refuse_conditions(request, "the settings of a name hold for all that it stands for")
    store = require_store(services_of(request))
    caller_of(request).tenant.take_change()
    full_name = namespace_of(request, store).find_own(name)
    visibility, shared_with = visible_to(body.visibility, ",".join(body.shared_with))
    if visibility is None and body.on_new_version is None:
        raise BadRequest("Send `visibility`, `on_new_version` or both.")
    change = Change(visibility=visibility, shared_with=shared_with, on_new_version=body.on_new_version)
    await in_turn(store.change_settings, full_name, change)
    record = store.get(full_name)
    fields = {"shared_with": ",".join(shared_with) or None, "on_new_version": body.on_new_version}
    audit_change(request, "visibility" if visibility is not None else "setting", record, **fields)
    return _answer(request, record)


def _answer(request: Request, record: AdapterRecord, sent_note: str = "", *, status: int = 200) -> JSONResponse:
    """The load report; `ETag` is what If-Match takes."""
    return JSONResponse(
        describe(request, record, sent_note).model_dump(), status_code=status, headers={"ETag": f'"{record.digest}"'}
    )


_RETRY_SECONDS = 5.0
# An operator's, which no tenant's limits count.
_PIN_ERRORS = errors((400, 401, 403, 404, 413, 500, 503, 507))


@router.put(
    "/v1/adapters/{name:adapter}/pin",
    dependencies=[no_query],
    responses={
        **_PIN_ERRORS,
        409: {**errors((409,))[409], "description": "More rows of the device would be pinned than may be."},
    },
    summary="Keep an adapter on the device",
)
async def pin_adapter(request: Request, name: str) -> AdapterResponse:
    """Bring the adapter of this name to the device and pin it there, used or not, on every engine and after every
    start. The pin follows the name to its later versions."""
    return await _set_pinned(request, name, True)


@router.delete(
    "/v1/adapters/{name:adapter}/pin",
    dependencies=[no_query],
    responses=_PIN_ERRORS,
    summary="Keep an adapter on the device no longer",
)
async def unpin_adapter(request: Request, name: str) -> AdapterResponse:
    """It stays where it is until others need the room."""
    return await _set_pinned(request, name, False)


async def _set_pinned(request: Request, name: str, is_pinned: bool) -> AdapterResponse:
    refuse_conditions(request, "a pin belongs to the name, whatever it stands for")
    services = services_of(request)
    store = require_open_store(services)
    full_name = namespace_of(request, store).find_own(name)
    await in_turn(store.set_pinned, full_name, is_pinned)
    services.changed(full_name)
    record = store.get(full_name)
    audit_change(request, "pin" if is_pinned else "unpin", record)
    return describe(request, record)


async def follow_pins(services: Services, store: AdapterStore) -> None:
    """Tell the engine of every change of what is pinned, for ever. One task does, so that what the engine was told last
    is what was so last."""
    sent = Pins()
    while True:
        retry_seconds = None
        try:
            found = await in_turn(store.pins)
        except Exception:
            LOGGER.exception("what is pinned cannot be sent; the next attempt is soon")
            found, retry_seconds = sent, _RETRY_SECONDS
        if found != sent:
            services.engine.pin(found.digests)
            services.unkept = found.left_out
            for name in sorted(found.left_out - sent.left_out):
                LOGGER.warning(
                    "The pinned adapter %r is not kept on the device: too few rows may be pinned.", without_root(name)
                )
        sent = found
        with suppress(TimeoutError):
            await asyncio.wait_for(services.pins_changed.wait(), retry_seconds)
        services.pins_changed.clear()


_MEDIA_TYPE = "application/gzip"


class _Archive(StreamingResponse):
    """Pieces that a thread reads, one at a time: the next one once the client has taken the last. What is `held` is
    given back, and the file closed, however it ends."""

    def __init__(self, pieces: Generator[bytes, None, None], held: ExitStack, headers: dict[str, str]) -> None:
        super().__init__(self._read(), headers=headers, media_type=_MEDIA_TYPE)
        self._pieces, self._held, self._has_ended = pieces, held, False

    async def _read(self) -> AsyncIterator[bytes]:
        while (piece := await in_turn(self._next)) is not None:
            if piece:
                yield piece

    def _next(self) -> bytes | None:
        piece = next(self._pieces, None)
        if self._has_ended:
            self._pieces.close()
        return piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._held:
                await super().__call__(scope, receive, send)
        finally:
            # Of a client that has left, exceptions keep all of this until the collector comes.
            self._has_ended = True
            with suppress(ValueError):  # a thread reads, and closes it then
                self._pieces.close()


@router.get(
    "/v1/adapters/{name:adapter}/archive",
    dependencies=[no_query],
    response_class=Response,
    responses={
        **errors((400, 401, 403, 404, 429, 500, 503)),
        200: {
            "content": {_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
            "description": "A .tar.gz of a PEFT directory; `ETag` is the adapter's digest.",
        },
    },
    summary="Download an adapter",
)
async def get_archive(request: Request, name: str) -> Response:
    """The adapter, or a version of it (`name@number`), as a PEFT directory that loads elsewhere and is the same adapter
    when it is uploaded again. Deleting the name meanwhile does not end the download."""
    services = services_of(request)
    store = require_store(services)
    full_name = namespace_of(request, store).find_own(name)
    with ExitStack() as held:
        held.enter_context(services.calls.holding())
        record = held.enter_context(store.lease(full_name)).record
        pieces = await in_turn(store.archive, record)
        note(request, adapter=record.reference, digest=record.digest[:12])
        audit_change(request, "download", record)
        file_name = separate(record.name)[1].replace("/", "-")
        headers = {
            "ETag": f'"{record.digest}"',
            "X-Multilora-Adapter": f"{record.reference} sha256:{record.digest}",
            "Content-Disposition": f'attachment; filename="{file_name}-{record.version.number}.tar.gz"',
        }
        return _Archive(pieces, held.pop_all(), headers)
