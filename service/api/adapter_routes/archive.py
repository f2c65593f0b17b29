"""GET /v1/adapters/{name}/archive: an adapter's files on their way out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from contextlib import ExitStack, suppress

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from adapters.files.paths import separate
from service.api.access.auth import namespace_of
from service.api.adapter_routes.adapters import audit_change, require_store
from service.api.entry.request_log import note
from service.api.openapi import errors
from service.api.schema.base import no_query
from service.api.state import services_of
from service.api.threads import in_turn

router = APIRouter(tags=["adapters"])

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
        held.enter_context(services.calls.places())
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
