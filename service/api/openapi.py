"""OpenAPI beyond the routes' own types: errors, streams, uploads and keys."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from threading import Lock
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service import server_version
from service.api.access.auth import Access, Need
from service.api.schema.answers import ErrorResponse
from service.api.schema.generation_answers import ChatChunk
from service.api.schema.response_answers import MessageError, MessageEvent, ResponseEvent
from service.fairness.thread_pool import in_turn

_REASONS = {
    400: "The request is wrong; the message says what to change.",
    401: "No API key, or an unknown one.",
    403: "The API key, or a setting of the server, does not allow this.",
    404: "No such model or adapter.",
    409: "The name is taken by other content, or is the base model's.",
    412: "The name stands for another version than the condition says; nothing was changed.",
    413: "The body has more bytes or items than the server allows.",
    429: "As much is under way as may be, or a limit of yours is reached; `Retry-After` says when to try again.",
    500: "The server or its engine failed on this request.",
    503: "The server is starting, shutting down, without an engine, or cannot reach its adapter store.",
    507: "The server's disk would become too full.",
}


def errors(statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for these error statuses, to which `finish` gives their one shape: of a model FastAPI
    would build two validators for each of these 400."""
    return {status: {"description": _REASONS[status]} for status in statuses}


TEXT_ERRORS = errors((400, 401, 404, 413, 429, 500, 503))
GENERATION_ERRORS = errors((400, 401, 404, 413, 429, 500, 503))
# Unknown models and failures are told in the item's place, with 200.
BATCH_ERRORS = errors((400, 401, 413, 429, 503))
DELETE_ERRORS = errors((400, 401, 403, 404, 413, 429, 500, 503, 507))
UPLOAD_ERRORS = errors((400, 401, 403, 409, 413, 429, 500, 503, 507))
# Where a setting forbids things too; elsewhere 403 speaks of keys alone.
_FORBIDDEN_BY_SETTING = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"}
)


def streamed(
    chunk_schema: str, *, ends_with_done: bool = True, error_schema: str = "ErrorResponse"
) -> dict[int | str, dict[str, Any]]:
    """The second form of a 200: events whose data is a chunk or an error."""
    end = ", the last one `data: [DONE]`" if ends_with_done else ""
    data = {
        "anyOf": [
            {"$ref": f"#/components/schemas/{chunk_schema}"},
            {"$ref": f"#/components/schemas/{error_schema}"},
        ]
    }
    # As OpenAPI 3.2 has it, and FastAPI before that: the schema of each event, whose data is JSON in a text.
    texts = [{"type": "string", "contentMediaType": "application/json", "contentSchema": data}]
    if ends_with_done:
        texts.append({"const": "[DONE]"})
    event = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": texts}}}
    return {
        200: {
            "description": "The answer; with `stream` as server-sent events, each with one JSON object after `data: `"
            f"{end}.",
            "content": {"text/event-stream": {"itemSchema": event}},
        }
    }


UPLOAD_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["name"],
                "description": "Send `name`, and either `adapter_config` and `adapter_model` or `archive`. These names "
                "need no file name; parts of other names are recognised by theirs.",
                "properties": {
                    "name": {
                        "type": "string",
                        "pattern": "^([a-z0-9][a-z0-9-]{0,62}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
                    },
                    "note": {"type": "string", "description": "kept in the history of the name"},
                    "visibility": {
                        "type": "string",
                        "enum": ["private", "shared", "public"],
                        "description": "who beside its tenant may use the name; without it a name that is there keeps "
                        "its own, and a new one is private where there are tenants",
                    },
                    "shared_with": {
                        "type": "string",
                        "description": "with `shared`: the tenants who may use it, with commas between them",
                    },
                    "adapter_config": {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "description": "PEFT's adapter_config.json",
                    },
                    "adapter_model": {
                        "type": "string",
                        "contentMediaType": "application/octet-stream",
                        "description": "PEFT's adapter_model.safetensors",
                    },
                    "archive": {
                        "type": "string",
                        "contentMediaType": "application/octet-stream",
                        "description": ".tar.gz or .zip of a PEFT directory",
                    },
                    "chat_template": {
                        "type": "string",
                        "contentMediaType": "text/plain",
                        "description": "the adapter's own chat_template.jinja, if it has one; others by name are parts "
                        "called additional_chat_templates/NAME.jinja",
                    },
                },
                "additionalProperties": {"type": "string", "contentMediaType": "application/octet-stream"},
            }
        }
    },
}
REPLACE_BODY = deepcopy(UPLOAD_BODY)
del REPLACE_BODY["content"]["multipart/form-data"]["schema"]["required"]


def finish(schema: dict[str, Any], *, access: Access | None, chunks: dict[str, Any]) -> None:
    """Complete FastAPI's schema in place: our 400 instead of its 422, what batches hold, the chunks of streams, and the
    security scheme where keys are set (`access`). Without keys no operation tells of errors that only keys cause."""
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for name, chunk in chunks.items():
        schemas.setdefault(name, chunk)
    # The items are looked at one by one, so that their model says nothing of what they are.
    item = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("CompletionRequest", "ChatRequest")]}
    schemas["BatchRequest"]["properties"]["items"]["items"] = item
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            if access is not None:
                _add_key_scheme(operation, access.need(method.upper(), path), has_tenants=access.has_tenants)
            else:
                operation["responses"].pop("401", None)
                if path not in _FORBIDDEN_BY_SETTING:
                    operation["responses"].pop("403", None)
            _errors_are_json(
                operation["responses"], "MessageError" if "Anthropic" in operation["tags"] else "ErrorResponse"
            )
    if access is not None:
        schema["components"]["securitySchemes"] = {
            "apiKey": {
                "type": "http",
                "scheme": "bearer",
                "description": "A key with the scope of the route: infer, upload, delete, download, control, or admin, "
                "which has all. The header `x-api-key` may hold it instead.",
            }
        }


def _add_key_scheme(operation: dict[str, Any], need: Need, *, has_tenants: bool) -> None:
    """Which key the operation wants, and the errors that follow from it."""
    operation["security"] = [] if need == "open" else [{"apiKey": []}]
    statuses = {401} if need != "open" else set()
    statuses |= {403} if need not in ("open", "any") else set()
    statuses |= {429} if need == "upload" and has_tenants else set()
    for status in sorted(statuses):
        operation["responses"].setdefault(str(status), {"description": _REASONS[status]})


def _errors_are_json(responses: dict[str, Any], schema: str) -> None:
    """FastAPI gives the errors of a route that answers with text the route's own media type."""
    for status, response in responses.items():
        if status >= "400":
            response["content"] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def serve_openapi(app: FastAPI, access: Access | None, root_path: str = "") -> None:
    """Have `app` tell its schema, instead of FastAPI's own way to, and show it at /docs. `access` is None where no
    key is needed; `root_path` stands before all paths for clients.

    To build and write the schema takes 0.2 s, so a thread does it, once, when it is first asked for.
    """
    lock, written = Lock(), list[bytes]()

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=server_version(), routes=app.routes)
            chunks: dict[str, Any] = {}
            for model in (ErrorResponse, ChatChunk, ResponseEvent, MessageEvent, MessageError):
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
