"""Checks before a router sees a request (key, size) and records after it (errors, metrics, the log line).

Plain ASGI, so that nothing of a body is read before the key and the announced size are checked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.access.auth import Access
from service.api.entry.request_log import RequestNotes
from service.api.errors import (
    TABLE,
    BadRequest,
    BodyTooLarge,
    RequestTimeout,
    error_body,
    message_error_body,
    quoted,
    status_of,
)
from service.api.http.json_body import BodyBudget
from service.api.http.sse import JsonResponse
from service.api.http_rules import MAX_REQUEST_ID_CHARS, PROBE_PATHS
from service.api.metrics.metrics import Metrics
from service.api.metrics.traces import Ended, RequestTrace, Tracing
from service.api.schema.base import without_inert
from service.fairness.client_identity import CLIENT, NOBODY, client_of
from service.logs import LOGGER, REFUSAL_LINES, REQUEST_LOGGER
from service.tenants.tenants import Caller

# The status in logs and metrics of a request whose client went before the answer; nothing is sent.
CLIENT_GONE = 499
# Those that routes may have, and that metrics name.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Asked every few seconds by machines; their lines are debug lines.
_PROBES = frozenset({*PROBE_PATHS, "/metrics"})
# Below it are the routes of Anthropic's API.
_MESSAGES = "/v1/messages"
_MAX_LENGTH_DIGITS = 20
# How much of a refused body is read and thrown away, so that the client gets to read why.
_DRAIN_BYTES = 64 << 20
_DRAIN_SECONDS = 10.0
# Default of every 503: its cause lasts seconds, if it ends at all.
_SOON = {"Retry-After": "1"}


class BodyRule(NamedTuple):
    """Bounds on the bodies of a path: most bytes, whether a body is held in memory until it is complete, and the flag
    of `multilora serve` that raises the bound, if one does."""

    limit_bytes: int
    is_buffered: bool = True
    flag: str = ""

    def refusal(self, num_bytes: str) -> BodyTooLarge:
        """The error of a body of so many bytes."""
        raised_by = f"; {self.flag} of the server raises that" if self.flag else ""
        return BodyTooLarge(f"The body has {num_bytes} bytes; this server takes {self.limit_bytes} here{raised_by}.")


class EntryMiddleware:
    """The outermost layer of the application but for CORS: what comes in and what goes out passes here.

    access     who may ask for what
    body_rule  by method and path
    budget     of all bodies that are held in memory
    tracing    None where there are no traces
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        metrics: Metrics,
        body_rule: Callable[[str, str], BodyRule],
        budget: BodyBudget,
        root_path: str = "",
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._root_path = root_path
        self._access = access
        self._metrics = metrics
        self._body_rule = body_rule
        self._budget = budget
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = _RequestScope(scope, receive, send, self._budget)
        # A HEAD is answered as the GET that it asks about, but for the body, which the HTTP server leaves out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        inner = {**scope, "method": method, "query_string": without_inert(scope["query_string"])}
        # Here, before anybody looks at the path: what a key is for goes by the same one as the routes.
        if self._root_path and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            inner["path"] = scope["path"][len(self._root_path) :] or "/"
        if self._tracing is not None:
            visit.trace = self._tracing.begin(method, inner["path"], visit.headers)
        visit.is_message = inner["path"] == _MESSAGES or inner["path"].startswith(f"{_MESSAGES}/")
        try:
            await self._pass(inner, visit)
        except ClientDisconnect:
            visit.status = CLIENT_GONE
        except Exception as error:
            if type(error) not in TABLE:
                LOGGER.exception("A request failed unexpectedly.", extra={"fields": visit.ids})
            if visit.status is None:
                await visit.refuse(error)
            elif not visit.answered:
                raise  # half an answer is out: only a broken connection can tell the client
        finally:
            visit.forget_body()
            self._write_down(scope["method"], inner, visit)

    async def _pass(self, scope: Scope, visit: _RequestScope) -> None:
        client = scope.get("client")
        address = client[0] if client else ""
        CLIENT.set(client_of("", address))  # of a refusal for want of a key
        if (connection := scope.get("multilora.connection")) is not None:  # there is none in tests
            await connection.wait_to_be_read(CLIENT.get())
        await self._access.refresh(scope["method"], scope["path"])
        caller = self._access.check(scope["method"], scope["path"], visit.headers)
        scope["multilora.caller"] = visit.caller = caller
        name = self._access.client_name(caller)
        CLIENT.set(client_of(name, address))
        if connection is not None:
            connection.is_paid_by(CLIENT.get())
            if name:
                connection.belong_to(name)
        visit.limit_body(self._body_rule(scope["method"], scope["path"]))
        await self._app(scope, visit.receive, visit.send)

    def _write_down(self, sent_method: str, scope: Scope, visit: _RequestScope) -> None:
        status = visit.status if visit.status is not None else CLIENT_GONE
        route = getattr(scope.get("route"), "path", "unknown")
        method = sent_method if sent_method in METHODS else "other"  # clients may invent methods without end
        self._metrics.http_requests.labels(method, route, str(status)).inc()
        if 400 <= status < CLIENT_GONE and not REFUSAL_LINES.may_write(CLIENT.get()):
            return
        fields = {
            "method": quoted(sent_method),
            "path": quoted(scope["path"]),
            "status": status,
            "ms": round((time.perf_counter() - visit.started) * 1e3, 1),
            **visit.ids,
            **visit.caller_lines(),
            **visit.notes.lines(),
        }
        if visit.trace is not None:
            try:
                self._end_trace(visit.trace, sent_method, route, visit)
            except Exception:  # the trace is lost, and nothing else
                LOGGER.exception("A trace was not taken.", extra={"fields": visit.ids})
        level = logging.DEBUG if route in _PROBES else logging.INFO
        REQUEST_LOGGER.log(level, "request", extra={"fields": fields})

    def _end_trace(self, trace: RequestTrace, method: str, route: str, visit: _RequestScope) -> None:
        """Hand over what there is to tell, once the last answer of the request is over: one in the background goes on
        without its client."""
        notes = visit.notes
        open_jobs = [job for job in notes.jobs if not job.is_closed]
        if open_jobs:
            open_jobs[-1].on_close = partial(self._end_trace, trace, method, route, visit)
            return
        assert self._tracing is not None, "a trace of nobody"
        attributes = {
            **notes.span,
            "gen_ai.request.id": visit.request_id,
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": visit.status if visit.status is not None else CLIENT_GONE,
        }
        if not visit.answered:
            attributes["error.type"] = "client_disconnected"
        elif notes.error_type is not None:
            attributes["error.type"] = notes.error_type
        elif visit.status is not None and visit.status >= 400:
            attributes["error.type"] = str(visit.status)
        self._tracing.end(Ended(trace, attributes, notes.answers(trace.operation), notes.phases, visit.started))


class _RequestScope:
    """One request: counts the bytes that come, remembers the status that goes."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, budget: BodyBudget) -> None:
        self._receive = receive
        self._send = send
        self._budget = budget
        self._rule, self._client = BodyRule(0), NOBODY
        self._num_bytes = self._num_buffered = 0
        self._body_complete = False
        self.headers = Headers(scope=scope)
        self.started = time.perf_counter()
        self.status: int | None = None
        self.answered = False
        self.request_id = _named_by_client(self.headers) or uuid4().hex
        self.is_message = False  # whether the path is of Anthropic's API, whose errors have a form of their own
        self.notes = RequestNotes()
        self.caller: Caller | None = None
        self.trace: RequestTrace | None = None
        scope["multilora.notes"] = self.notes
        scope["multilora.request_id"] = self.request_id
        scope["multilora.refuse"] = self.refuse
        scope["multilora.forget_body"] = self.forget_body

    @property
    def ids(self) -> dict[str, str]:
        """Log fields that name the request."""
        return {"request_id": self.request_id} | ({} if self.trace is None else {"trace_id": self.trace.trace_id})

    def caller_lines(self) -> dict[str, str]:
        """Log fields that name the caller, where keys are set."""
        if self.caller is None or not self.caller.key_id:
            return {}
        return {"tenant": self.caller.tenant.name, "key": self.caller.key_id}

    def limit_body(self, rule: BodyRule) -> None:
        """BodyTooLarge if the announced size is above the rule's; `receive` raises it if more comes than was announced,
        and QueueFull if all bodies together are too large to be held. BadRequest for one that is compressed, and for an
        announced size that is no number, which a server before the application need not refuse."""
        self._rule, self._client = rule, CLIENT.get()
        encoding = self.headers.get("content-encoding", "")
        if encoding.lower() not in ("", "identity") and _announces_body(self.headers):
            raise BadRequest(
                f"The body is sent with Content-Encoding {quoted(encoding)!r}; this server takes bodies that are not "
                "compressed, without that header."
            )
        announced, limit = self.headers.get("content-length", "0"), rule.limit_bytes
        if not (announced.isascii() and announced.isdigit() and len(announced) <= _MAX_LENGTH_DIGITS):
            raise BadRequest(f"Content-Length is {quoted(announced)!r}; send the number of the body's bytes.")
        if int(announced) > limit:
            raise rule.refusal(announced)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            num_bytes, limit = len(message.get("body", b"")), self._rule.limit_bytes
            self._num_bytes += num_bytes
            self._body_complete = not message.get("more_body", False)
            if self._num_bytes > limit:
                raise self._rule.refusal(f"more than {limit}")
            if self._rule.is_buffered:
                self._budget.acquire(self._client, num_bytes)
                self._num_buffered += num_bytes
        return message

    def forget_body(self) -> None:
        """Return the body's bytes to the budget: they are not held any more."""
        self._budget.release(self._client, self._num_buffered)
        self._num_buffered = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=message["headers"])
            headers["X-Request-Id"] = self.request_id
            if self.is_message:
                headers["request-id"] = self.request_id
            if self.trace is not None:
                headers["traceresponse"] = self.trace.header
            if (adapter := self.notes.adapter) is not None:
                headers["X-Multilora-Adapter"] = adapter
            if (left_out := self.notes.left_out) is not None:
                headers["X-Multilora-Left-Out"] = left_out
            if self.status == 200 and (num_cached := self.notes.num_cached_tokens) is not None:
                headers["X-Multilora-Cached-Tokens"] = str(num_cached)
            if self.caller is not None:
                headers.update(self.caller.tenant.headers())
            message = {**message, "headers": headers.raw}
        await self._send(message)
        if message["type"] == "http.response.body":
            self.answered = not message.get("more_body", False)

    async def refuse(self, error: Exception) -> None:
        """Answer with the error. If the body is still on its way, the connection is closed after it, and what comes
        until then is thrown away: a client that is still sending would otherwise see a reset and not the answer."""
        self.notes.failed(error)
        status = status_of(error)
        headers = {**(_SOON if status == 503 else {}), **getattr(error, "headers", {})}
        drain = not self._body_complete and _announces_body(self.headers)
        if drain:
            headers["Connection"] = "close"
        body = message_error_body(error, self.request_id) if self.is_message else error_body(error)
        response = JsonResponse(body, status_code=status, headers=headers)
        await self.send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self.send({"type": "http.response.body", "body": response.body, "more_body": drain})
        if drain:
            await self._drain()
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self) -> None:
        # A client that waits for "100 Continue" has its answer and sends no body.
        if self.headers.get("expect", "").lower() == "100-continue" and not self._num_bytes:
            return
        thrown_away = 0
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while thrown_away < _DRAIN_BYTES:
                    message = await self._receive()
                    thrown_away += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except (TimeoutError, RequestTimeout):
            return


def _named_by_client(headers: Headers) -> str | None:
    """The client's own name for its request, if it fits a header and a line of the log."""
    name = headers.get("x-request-id", "")
    return name if 0 < len(name) <= MAX_REQUEST_ID_CHARS and name.isascii() and name.isprintable() else None


def _announces_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class Refusal(Response):
    """An error as FastAPI's exception handlers return it; sent by `EntryMiddleware`, which
    knows what of the body is unread."""

    def __init__(self, error: Exception) -> None:
        super().__init__(status_code=status_of(error))
        self._error = error

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        await scope["multilora.refuse"](self._error)
