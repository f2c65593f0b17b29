"""PUT and DELETE /v1/adapters/{name}/pin, and what has the engine keep what is pinned."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Request

from adapters.files.paths import without_root
from adapters.store.pins import Pins
from adapters.store.store import AdapterStore
from service.api.access.auth import namespace_of
from service.api.access.preconditions import refuse_conditions
from service.api.adapter_routes.adapters import audit_change, describe, require_open_store
from service.api.openapi import errors
from service.api.schema.answers import AdapterResponse
from service.api.schema.base import no_query
from service.api.state import Services, services_of
from service.api.threads import in_turn
from service.logs import LOGGER

router = APIRouter(tags=["adapters"])

_RETRY_SECONDS = 5.0
# An operator's, which no tenant's limits count.
_ERRORS = errors((400, 401, 403, 404, 413, 500, 503, 507))


@router.put(
    "/v1/adapters/{name:adapter}/pin",
    dependencies=[no_query],
    responses={
        **_ERRORS,
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
    responses=_ERRORS,
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
    told = Pins()
    while True:
        retry_seconds = None
        try:
            found = await in_turn(store.pins)
        except Exception:
            LOGGER.exception("what is pinned cannot be told; the next attempt is soon")
            found, retry_seconds = told, _RETRY_SECONDS
        if found != told:
            services.engine.pin(found.digests)
            services.unkept = found.left_out
            for name in sorted(found.left_out - told.left_out):
                LOGGER.warning(
                    "The pinned adapter %r is not kept on the device: too few rows may be pinned.", without_root(name)
                )
        told = found
        with suppress(TimeoutError):
            await asyncio.wait_for(services.pins_changed.wait(), retry_seconds)
        services.pins_changed.clear()
