"""GET /openapi.json. To build and write the schema takes 0.2 s, so that a thread does it, once, when it is first asked
for: nobody else's request waits meanwhile."""

from __future__ import annotations

from threading import Lock
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.api.access.auth import Access
from service.api.openapi import finish
from service.api.schema.generation_answers import ChatChunk
from service.api.schema.response_answers import MessageError, MessageEvent, ResponseEvent
from service.api.threads import in_turn
from service.version import server_version


def serve_openapi(app: FastAPI, access: Access | None, root_path: str = "") -> None:
    """Have `app` tell its schema, in the place of FastAPI's own way to, and show it at /docs. `access` is None where no
    key is needed; `root_path` stands before all paths for clients."""
    lock, written = Lock(), list[bytes]()

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=server_version(), routes=app.routes)
            chunks: dict[str, Any] = {}
            for model in (ChatChunk, ResponseEvent, MessageEvent, MessageError):
                chunk = model.model_json_schema(ref_template="#/components/schemas/{model}")
                chunks |= {**chunk.pop("$defs", {}), model.__name__: chunk}
            finish(schema, access=access, chunks=chunks)
            if root_path:
                schema["servers"] = [{"url": root_path}]
            app.openapi_schema = schema
        return app.openapi_schema

    def write() -> bytes:
        with lock:  # of several that ask for it first one builds it
            if not written:
                written.append(bytes(JSONResponse(app.openapi()).body))
        return written[0]

    async def send(_request: Request) -> Response:
        return Response(await in_turn(write), media_type="application/json")

    app.openapi = build  # type: ignore[method-assign]
    path = app.openapi_url
    assert path is not None, "/openapi.json is there by default"
    (own,) = (route for route in app.routes if getattr(route, "path", None) == path)
    app.routes.remove(own)
    app.add_route(path, send, include_in_schema=False)
    docs = get_swagger_ui_html(openapi_url=f"{root_path}{path}", title=f"{app.title} - Swagger UI")

    async def show(_request: Request) -> Response:
        return docs

    app.add_route("/docs", show, include_in_schema=False)
