"""Errors that a client may receive, and the one table from error to HTTP status.

ApiError
├── BadRequest          the request itself is wrong
├── InvalidUserInput    the same, where vLLM has its own word for it
├── Unauthorized        no key, or a wrong one
├── Forbidden           the key's scopes, or a setting, do not allow it
├── UnknownModel        no base model or adapter of that name
├── UnknownResponse     no stored response of that id
├── UnknownRoute        no such path
├── WrongMethod         the path is there, but not for this method
├── RequestTimeout      head or body of the request did not come in time
├── BodyTooLarge        more bytes or items than the operator allows
├── QueueFull           as many requests as the operator allows are waiting or running
├── NotReady            the engine is starting, restarting, draining or down
└── EngineFailed        the engine died, or failed, while it worked on the request

Errors of the adapter store (`adapters.errors`), of tenants' limits (`service.tenants.limits`) and of the texts
(`service.text`) are in the table too.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from adapters import errors as store_errors
from service.tenants.limits import LimitReached
from service.text.template_sandbox import TemplateError
from service.text.template_worker import LimitError
from service.text.tokenizer import NotUnicode, TextError


class ApiError(Exception):
    """Base of the tree. `param` names the field that is wrong; the message says what to do about it."""

    def __init__(self, message: str, *, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}


class BadRequest(ApiError):
    """400: the request itself is wrong."""


class InvalidUserInput(ApiError):
    """400: the request itself is wrong, with the `type` that vLLM gives it; its clients look for that."""


class Unauthorized(ApiError):
    """401: no key, or a wrong one."""


class Forbidden(ApiError):
    """403: the key's scopes, or a setting, do not allow it."""


class UnknownModel(ApiError):
    """404: no base model or adapter of that name."""


class UnknownResponse(ApiError):
    """404: no stored response of that id."""


class UnknownRoute(ApiError):
    """404: no such path."""


class WrongMethod(ApiError):
    """405: the path is there, but not for this method."""


class RequestTimeout(ApiError):
    """408: head or body of the request did not come in time."""


class BodyTooLarge(ApiError):
    """413: more bytes or items than the operator allows."""


class QueueFull(ApiError):
    """429: as many requests as the operator allows are waiting or running."""


class NotReady(ApiError):
    """503: the engine is starting, restarting, draining or down."""


class EngineFailed(ApiError):
    """500: the engine died, or failed, while it worked on the request."""


class Answer(NamedTuple):
    """How one class of errors is answered: HTTP status, and `type` and `code` of OpenAI's error object."""

    status: int
    type: str
    code: str | None


_INVALID = "invalid_request_error"
_MAX_QUOTED_CHARS = 200

# Looked up by the class itself, never by a base class: a new error without a row fails the table's test.
TABLE: dict[type[Exception], Answer] = {
    BadRequest: Answer(400, _INVALID, "bad_request"),
    InvalidUserInput: Answer(400, "InvalidUserInput", "bad_request"),
    Unauthorized: Answer(401, "authentication_error", "invalid_api_key"),
    Forbidden: Answer(403, "permission_error", "forbidden"),
    UnknownModel: Answer(404, "NotFoundError", "model_not_found"),
    UnknownResponse: Answer(404, "NotFoundError", "response_not_found"),
    UnknownRoute: Answer(404, "NotFoundError", "unknown_path"),
    WrongMethod: Answer(405, _INVALID, "method_not_allowed"),
    RequestTimeout: Answer(408, _INVALID, "request_timeout"),
    BodyTooLarge: Answer(413, _INVALID, "too_large"),
    QueueFull: Answer(429, "rate_limit_error", "queue_full"),
    LimitReached: Answer(429, "rate_limit_error", "rate_limit_exceeded"),
    NotReady: Answer(503, "service_unavailable_error", "not_ready"),
    EngineFailed: Answer(500, "server_error", "engine_failed"),
    NotUnicode: Answer(400, _INVALID, "bad_request"),
    TextError: Answer(400, _INVALID, "unusable_text_files"),
    TemplateError: Answer(400, _INVALID, "chat_template_refused"),
    LimitError: Answer(400, _INVALID, "chat_template_refused"),
    store_errors.Malformed: Answer(400, _INVALID, store_errors.Malformed.code),
    store_errors.Unsupported: Answer(400, _INVALID, store_errors.Unsupported.code),
    store_errors.BindingError: Answer(400, _INVALID, store_errors.BindingError.code),
    store_errors.InvalidName: Answer(400, _INVALID, store_errors.InvalidName.code),
    store_errors.RowsExceeded: Answer(400, _INVALID, store_errors.RowsExceeded.code),
    store_errors.TooLarge: Answer(413, _INVALID, store_errors.TooLarge.code),
    store_errors.NotFound: Answer(404, "NotFoundError", store_errors.NotFound.code),
    store_errors.Conflict: Answer(409, _INVALID, store_errors.Conflict.code),
    store_errors.QuotaExceeded: Answer(429, "rate_limit_error", store_errors.QuotaExceeded.code),
    store_errors.Stale: Answer(412, _INVALID, store_errors.Stale.code),
    store_errors.Damaged: Answer(500, "server_error", store_errors.Damaged.code),
    store_errors.StagingFull: Answer(429, "rate_limit_error", store_errors.StagingFull.code),
    store_errors.StorageFull: Answer(507, "server_error", store_errors.StorageFull.code),
    store_errors.StoreUnreachable: Answer(503, "service_unavailable_error", store_errors.StoreUnreachable.code),
    store_errors.StoreBusy: Answer(503, "service_unavailable_error", store_errors.StoreBusy.code),
}
HANDLED = tuple(TABLE)
# A path of this machine, and its last part; routes have other beginnings.
_PATH = re.compile(r"(?<![\w.:/])/(?!v1/)(?:[^\s'\":,;/]+/)+([^\s'\":,;/]*)")
_UNEXPECTED = Answer(500, "server_error", "internal_error")


def status_of(error: Exception) -> int:
    """The HTTP status that answers `error`."""
    return TABLE.get(type(error), _UNEXPECTED).status


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's error object for `error`. What is not in the table is our own bug: its words stay inside. So do the
    paths of this machine, but for their last part."""
    answer = TABLE.get(type(error))
    if answer is None:
        message = "The server failed on this request; its log says why. The request itself may be fine."
        return shape(message, _UNEXPECTED.type, None, _UNEXPECTED.code)
    message = str(error)
    if answer.status >= 500:  # perhaps in the words of the engine or of the operating system
        message = _PATH.sub(r"\1", message)
    body = shape(message, answer.type, getattr(error, "param", None), answer.code)
    if isinstance(error, store_errors.BindingError):
        problems = [{"name": _unicode(name), "reason": _unicode(reason)} for name, reason in error.problems]
        body["error"]["problems"] = problems
    return body


# Anthropic's error types by status; others are 4xx as 400, and 5xx as 500.
_MESSAGE_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_error_body(error: Exception, request_id: str) -> dict[str, Any]:
    """Anthropic's error object for `error`, with the sentence of OpenAI's."""
    status = status_of(error)
    kind = _MESSAGE_ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = {"type": kind, "message": error_body(error)["error"]["message"]}
    # Tool runners of Anthropic's clients ask for a conversation that is kept, and do without if they are told so.
    details = (
        {"details": {"error_code": "thread_unsupported_request"}} if getattr(error, "param", "") == "thread" else {}
    )
    return {"type": "error", "error": {**detail, **details}, "request_id": request_id}


def shape(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}; what is not Unicode in what may quote the client is replaced."""
    param = None if param is None else _unicode(param)
    return {"error": {"message": _unicode(message), "type": kind, "param": param, "code": code}}


def quoted(text: str) -> str:
    """A client's text, cut so that an error message does not grow with the request it refuses."""
    return text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + "…"


def _unicode(text: str) -> str:
    """The text with `?` for halves of surrogate pairs: JSON can spell them, but an answer's UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
