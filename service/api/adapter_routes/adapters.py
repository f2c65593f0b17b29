"""/v1/adapters: upload, list, show, delete; and If-Match and If-None-Match, which say what a name must stand
for so that it may be changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from adapters.files.manifest import AdapterRecord
from adapters.files.name_versions import Condition, Version, if_absent, if_match, is_selector, keep, move
from adapters.files.paths import separate, without_root
from adapters.store.name_index import Row
from adapters.store.store import AdapterStore
from service.api.access.auth import caller_of, check_again, namespace_of
from service.api.access.namespace import Namespace
from service.api.adapter_routes.listing import (
    MOST_PER_PAGE,
    Digits,
    Filters,
    FoundPage,
    Listing,
    page,
    page_of_adapters,
)
from service.api.adapter_routes.probe import probe, refuse_probe
from service.api.entry.request_log import note, notes_of
from service.api.errors import BadRequest, NotReady
from service.api.openapi import DELETE_ERRORS, UPLOAD_BODY, UPLOAD_ERRORS, errors
from service.api.schema.answers import AdapterDeleted, AdapterList, AdapterResponse, ModuleReport
from service.api.schema.base import each_once, no_query
from service.api.state import Services, services_of
from service.api.uploads.multipart import UploadQuery, in_upload_thread
from service.api.uploads.receive import MakeParts, announced_bytes, multipart, receive_upload
from service.engine.ipc.messages import Tier
from service.fairness.client_identity import CLIENT
from service.fairness.thread_pool import in_turn
from service.logs import audit

# An entity tag, or what a client is likely to send for one: a version's number or digest without quotes.
_TAG = re.compile(r'(W/)?"([^"]*)"|([0-9a-f]+|sha256:[0-9a-f]+)')
_ONE = r'(?:(?:W/)?"[^"]*"|[0-9a-f]+|sha256:[0-9a-f]+)'
_LIST = re.compile(rf"[ \t,]*{_ONE}(?:[ \t]*,[ \t,]*{_ONE})*[ \t,]*")

CONDITION_HEADERS: list[dict[str, Any]] = [
    {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": text}
    for name, text in (
        ("If-Match", "version numbers or digests of which the name must stand for one, or * for any; else 412"),
        ("If-None-Match", "* alone: the name must be free; else 412"),
    )
]


def condition_of(request: Request) -> Condition:
    """The condition that the headers set on a name; `move`, which allows every change, where neither is sent.
    BadRequest for an unsupported form."""
    match, none_match = _tags(request, "if-match"), _tags(request, "if-none-match")
    if none_match is None:
        return move if match is None else if_match(match)
    if none_match != ["*"] or match is not None:
        raise BadRequest("Send `If-None-Match: *`, or `If-Match` with version numbers or digests, or neither.")
    return if_absent


def refuse_conditions(request: Request, instead: str) -> None:
    """BadRequest if a condition is sent where none is looked at; `instead` says where it is, or why it is not."""
    if condition_of(request) is not move:
        raise BadRequest(f"If-Match and If-None-Match are not looked at here; {instead}.")


def _tags(request: Request, header: str) -> list[str] | None:
    """The versions that a header names, ["*"] for any; None where it is not sent. What can be no version's, weak tags
    and "*" in quotes among them, matches nothing and is left out. BadRequest for what is no list of entity tags: a
    condition that is misread would let a change through."""
    sent = request.headers.getlist(header)
    if not sent:
        return None
    text = ",".join(sent)
    if text.strip() == "*":
        return ["*"]
    if not _LIST.fullmatch(text):
        raise BadRequest(
            "If-Match takes version numbers, digests of 12 digits or more, entity tags in double quotes, with commas "
            "between them, or a * alone; If-None-Match takes a * alone."
        )
    tags = [(weak, quoted or bare) for weak, quoted, bare in _TAG.findall(text)]
    return [tag for weak, tag in tags if not weak and is_selector(tag)]


router = APIRouter(tags=["adapters"])


@router.post(
    "/v1/adapters",
    dependencies=[each_once],
    status_code=201,
    response_model=AdapterResponse,
    responses={
        **UPLOAD_ERRORS,
        200: {"model": AdapterResponse, "description": "The name already stands for the same content."},
    },
    openapi_extra={"requestBody": UPLOAD_BODY},
    summary="Upload an adapter",
)
async def upload_adapter(request: Request, query: Annotated[UploadQuery, Query()]) -> JSONResponse:
    """Check, store and name a PEFT LoRA adapter. It can be used in the next step; the answer says what was bound. A
    name that stands for other content is left as it is: PUT replaces that."""
    refuse_conditions(request, "send PUT /v1/adapters/{name}")
    record, created, sent_note = await take_upload(request, None, keep, query)
    answer = describe(request, record, sent_note)
    return JSONResponse(answer.model_dump(), status_code=201 if created else 200)


async def take_upload(
    request: Request, name: str | None, condition: Condition, query: UploadQuery, make_parts: MakeParts = multipart
) -> tuple[AdapterRecord, bool, str]:
    """Read the adapter in the request's body, check it, and make it the current version of its name, which is `name` or
    in the body. Returns (record, created) as `Upload.finish` does, and the note that was sent. LimitReached if the
    tenant may not have it, and what `probe` raises."""
    services = services_of(request)
    store = require_open_store(services)
    namespace = namespace_of(request, store)
    tenant = caller_of(request).tenant
    tenant.take_change()
    if query.probe:
        refuse_probe(services, tenant)
    with services.uploading() as slot, ExitStack() as held:
        declared = announced_bytes(request)
        upload = await in_upload_thread(
            store.begin, declared_bytes=declared, owner=CLIENT.get(), is_ephemeral=query.ephemeral
        )
        if query.without_tokenizer:
            upload.leave_tokenizer_out()
        if query.expert_b_order is not None:
            upload.order_experts(query.expert_b_order)
        try:
            with notes_of(request).phase("receive"):
                sent = await receive_upload(request, namespace.name_for_upload, upload, slot, make_parts)
            if query.probe:
                lease = await in_upload_thread(upload.hold)
                held.callback(lease.release)
                await probe(services, tenant, lease.record.manifest)
            await check_again(request, "upload")
            with notes_of(request).phase("move"):
                record, created = await in_upload_thread(
                    namespace.finish,
                    upload,
                    namespace.name_for_upload(sent.name_for(name)),
                    note=sent.note,
                    visibility=sent.visibility,
                    shared_with=sent.shared_with,
                    condition=condition,
                    on_new_version=query.on_new_version or sent.on_new_version,
                )
        finally:
            await in_upload_thread(upload.discard)
    note(request, adapter=record.reference, digest=record.digest[:12], created=created)
    audit_change(request, "upload" if record.is_first else "replacement", record, created=created)
    services.published(record)
    return record, created, sent.note


def audit_change(request: Request, event: str, record: AdapterRecord, **fields: Any) -> None:
    """Write the audit line of a change: the name, its new version and the key that changed it."""
    caller = caller_of(request)
    version = record.version
    _trace_change(request, event, record.name, version.digest, {"multilora.adapter.version": version.number})
    audit(
        event,
        tenant=caller.tenant.name,
        key=caller.key_id or None,
        adapter=without_root(record.name),
        version=record.version.number,
        digest=record.digest,
        visibility=record.visibility,
        **fields,
    )


def _trace_change(
    request: Request, event: str, full_name: str, digest: str, more: Mapping[str, int] = MappingProxyType({})
) -> None:
    adapter = {"multilora.adapter.name": separate(full_name)[1], "multilora.adapter.digest": digest}
    notes_of(request).span = {"multilora.change": event, **adapter, **more}


class AdapterFilters(Filters):
    limit: Digits = Field(100, ge=1, le=MOST_PER_PAGE, description="most adapters of a page")


@router.get(
    "/v1/adapters",
    dependencies=[each_once],
    response_model=AdapterList,
    responses=errors((400, 401, 429)),
    summary="List the adapters",
)
async def list_adapters(request: Request, filters: Annotated[AdapterFilters, Query()]) -> Response:
    """Adapters by name, a page at a time: `has_more` says whether more follow after `last_id`. What each is bound to is
    told by its own address."""
    services = services_of(request)
    namespace = namespace_of(request, require_store(services))

    def build(found: FoundPage) -> dict[str, Any]:
        lines = [_listed(services, namespace, *one) for one in zip(found.rows, found.facts, strict=True)]
        return page(lines, "name", has_more=found.has_more)

    wanted = Listing(namespace, filters, filters.limit, "adapters", partial(_fact, services), build)
    with services.calls.holding():
        return await page_of_adapters(services, wanted)


@router.get(
    "/v1/adapters/{name:adapter}",
    dependencies=[no_query],
    responses=errors((400, 401, 404, 500, 503)),
    summary="Show an adapter",
)
async def get_adapter(request: Request, name: str) -> AdapterResponse:
    """An adapter's load report: its bindings and the tier that holds it now."""
    return describe(request, namespace_of(request, require_store(services_of(request))).get(name))


@router.delete(
    "/v1/adapters/{name:adapter}",
    dependencies=[no_query],
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
    digest = await remove_adapter(request, name, condition_of(request))
    return AdapterDeleted(name=name, object="adapter.deleted", digest=digest, deleted=True)


async def remove_adapter(request: Request, name: str, condition: Condition) -> str:
    """Delete a name of the caller's; its current digest. LimitReached, NotFound, and what `condition` raises."""
    services, caller = services_of(request), caller_of(request)
    store = require_store(services)
    caller.tenant.take_change()
    full_name = namespace_of(request, store).find_own(name)
    with notes_of(request).phase("move"):
        digest = await in_turn(store.delete, full_name, condition)
    _trace_change(request, "deletion", full_name, digest)
    services.changed(full_name)
    adapter = without_root(full_name)
    note(request, adapter=adapter, digest=digest[:12])
    audit("deletion", tenant=caller.tenant.name, key=caller.key_id or None, adapter=adapter, digest=digest)
    return digest


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


def describe(request: Request, record: AdapterRecord, sent_note: str = "") -> AdapterResponse:
    """The load report of an adapter; `sent_note` came with the change that led to it."""
    services = services_of(request)
    manifest, version = record.manifest, record.version
    row = Row(
        record.name,
        record.owner,
        record.visibility,
        (),
        version.number,
        version.digest,
        version.created_at_seconds,
        record.is_pinned,
        manifest.rank,
        manifest.num_bytes,
        manifest.rows,
        manifest.has_chat_template,
        record.is_ephemeral,
        version.root,
        record.on_new_version,
    )
    return AdapterResponse(
        **_listed(services, namespace_of(request, require_store(services)), row, _fact(services, row.name, row.digest)),
        modules=[
            ModuleReport(
                module=one.module, rank=one.rank, scaling=one.scaling, bytes=one.num_bytes, parts=list(one.parts)
            )
            for one in manifest.modules
        ],
        eos_token_ids=list(manifest.eos_token_ids),
        labels=list(manifest.labels),
        notes=[*manifest.notes, *_same(version), *_unkept(services, record), *_unkept_note(version, sent_note)],
    )


def _same(version: Version) -> list[str]:
    if version.same_as is None:
        return []
    return [f"The weights are those of version {version.same_as}, value by value, in another float type."]


def _unkept(services: Services, record: AdapterRecord) -> list[str]:
    if record.name not in services.unkept:
        return []
    return ["It is pinned, but not kept on the device: too few rows may be pinned. Unpin others."]


def _unkept_note(version: Version, sent: str) -> list[str]:
    if sent in ("", version.note):
        return []
    return [f"The note sent with this is not kept, since it makes no version: version {version.number} stays as it is."]


class _Fact(NamedTuple):
    """The fields of a listed adapter that the store does not know."""

    state: Tier
    last_used: int | None
    replicas: Mapping[str, Tier]


def _fact(services: Services, name: str, digest: str) -> _Fact:
    engine = services.engine
    return _Fact(engine.tiers.get(digest, "disk"), services.last_used_seconds.get(name), engine.places_of(digest))


def _listed(services: Services, namespace: Namespace, row: Row, fact: _Fact) -> dict[str, Any]:
    """The fields of AdapterSummary."""
    return {
        "name": namespace.shown_name(row.name),
        "object": "adapter",
        "version": row.number,
        "digest": row.digest,
        "base": services.settings.base_name,
        "owner": namespace.shown_owner(row.owner),
        "visibility": row.visibility,
        "created": int(row.created_at_seconds),
        "rank": row.rank,
        "bytes": row.num_bytes,
        "rows": row.rows,
        "pinned": row.is_pinned,
        "ephemeral": row.is_ephemeral,
        "on_new_version": row.on_new_version,
        "state": fact.state,
        "has_chat_template": row.has_chat_template,
        "last_used": fact.last_used,
        "replicas": fact.replicas,
    }
