"""Handlers from a request's exception to its error answer."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from service.api.entry.middleware import METHODS, Refusal
from service.api.errors import HANDLED, BadRequest, UnknownRoute, WrongMethod, quoted
from service.api.schema.error_messages import bad_request


def add_error_handlers(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape, by way of `EntryMiddleware`."""

    async def refuse(_request: Request, error: Exception) -> Response:
        return Refusal(error)

    async def refuse_body(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for nothing else"
        _forget_frames(error)
        return Refusal(bad_request(error.errors()))

    async def refuse_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for nothing else"
        _forget_frames(error)
        cause = error.__cause__
        if isinstance(cause, ClientDisconnect):
            raise cause
        if isinstance(cause, HANDLED):
            return Refusal(cause)
        return Refusal(_from_http(request, error))

    for kind in HANDLED:
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(HTTPException, refuse_http)
    app.add_exception_handler(Exception, refuse)


def _forget_frames(error: BaseException | None) -> None:
    """FastAPI's function keeps what it has raised of a body, whose traceback leads back to it, and to the body: they
    would wait for Python's collector together, which walks through all of them in one stretch."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _from_http(request: Request, error: HTTPException) -> Exception:
    path = f"{quoted(request.method)} {quoted(request.url.path)}"
    if error.status_code == 404:
        return UnknownRoute(f"There is no {path} here; /openapi.json lists what there is.")
    if error.status_code == 405:
        methods = _methods_of(request)
        return WrongMethod(
            f"{path} is not allowed; send {' or '.join(methods)}.", headers={"Allow": ", ".join(methods)}
        )
    return BadRequest(f"The request cannot be read: {error.detail}.")


def _methods_of(request: Request) -> list[str]:
    """Those that the path takes, of all its routes: the error itself knows of the first one alone."""

    def takes(method: str) -> bool:
        routed = "GET" if method == "HEAD" else method  # see `EntryMiddleware`
        return any(route.matches({**request.scope, "method": routed})[0] is Match.FULL for route in request.app.routes)

    return [method for method in sorted(METHODS) if takes(method)]
