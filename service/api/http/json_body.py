"""JSON bodies: bounded in size and in what they hold, parsed in a thread where they are large.

Small bodies take FastAPI's way, in the event loop.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from adapters.quota import ClientQuota
from service.api.errors import BodyTooLarge, QueueFull
from service.api.schema.base import refuse_query
from service.api.schema.error_messages import bad_request
from service.fairness.thread_pool import FairPool, in_turn

# Larger ones are parsed and validated in a thread: up to here that takes the event loop a few milliseconds.
LARGE_BODY_BYTES = 1 << 16
# Lists and objects of one body. Each takes a few hundred bytes once parsed, and as much again as part of a model: 4 MiB
# of empty lists took 0.4 s to parse, with Python's lock, and 120 MiB. Histories of some thousand messages with parts
# and calls have a few lists and objects for each.
MAX_CONTAINERS = 1 << 14
MAX_STRINGS = 1 << 18
MAX_VALUES = (1 << 20) + (1 << 16)
# Bytes that each client may hold whatever others do. Each client has a connection, which bounds their number.
ALWAYS_BYTES = 1 << 16
# One after the other, since parsed they take many times their size.
LARGE_BODIES = FairPool(1, "large-body")


class BodyBudget:
    """The bytes of all bodies that are in memory and not yet parsed, divided as `ClientQuota` are.

    most_of_one_bytes  of one client alone; all together hold twice as much, and as much again of small ones
    always_bytes       what each client may hold whatever others do
    """

    def __init__(self, most_of_one_bytes: int, always_bytes: int = 0) -> None:
        self._shares = ClientQuota(most_of_one_bytes, small=most_of_one_bytes // 32, always=always_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._shares.num_held

    def acquire(self, client: str, num_bytes: int) -> None:
        """QueueFull if the client may not have so many more."""
        if not self._shares.acquire(client, num_bytes):
            raise QueueFull(
                f"The requests that are being read hold {self.num_bytes} bytes, "
                f"{self._shares.refusal(client, unit='much')}; send this one again later.",
                headers={"Retry-After": "1"},
            )

    def release(self, client: str, num_bytes: int) -> None:
        """They are parsed, or thrown away."""
        self._shares.release(client, num_bytes)


class JsonRoute(APIRoute):
    """A route whose body is one of `schemas`, bounded as this module says, and says all: a query is refused."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, with bodies that parse and validate themselves."""
        handle = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation

        async def handle_bounded(request: Request) -> Response:
            if isinstance(model, type) and issubclass(model, BaseModel):
                refuse_query(request)
                request = _JsonRequest(request.scope, request.receive, model)
            return await handle(request)

        return handle_bounded


class _JsonRequest(Request):
    """A request whose `json` is plain data, or, where the body is large, the validated model itself: pydantic takes it
    as it is."""

    def __init__(self, scope: Any, receive: Any, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        body = await self.body()
        try:
            if len(body) <= LARGE_BODY_BYTES:
                return parsed(body)
            return await in_turn(_validated, self._model, body, pool=LARGE_BODIES)
        finally:
            # Nobody reads it again, and an answer may take minutes.
            self._body = b""
            self.scope["multilora.forget_body"]()


def parsed(body: bytes) -> Any:
    """The value. JSONDecodeError for all that cannot be parsed, whose message says why."""
    body = body.removeprefix(codecs.BOM_UTF8)
    # Of numbers, two to eight times as fast as Python's parser, which knows halves of surrogate pairs and better words.
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body)
    try:
        return json.loads(body.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("it is not in UTF-8", "", error.start) from error
    except RecursionError as error:
        raise json.JSONDecodeError("its lists and objects are nested too deeply", "", 0) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python's bound on the time that a number takes
        most = sys.get_int_max_str_digits()
        raise json.JSONDecodeError(f"a number has more than {most} digits", "", 0) from error


def _validated(model: type[BaseModel], body: bytes) -> BaseModel:
    check_counts(body)
    try:
        return model.model_validate(parsed(body))
    except ValidationError as error:
        refusal = bad_request(error.errors())
    # Behind the handler: what is raised in it has pydantic's error as its context, which holds the body.
    try:
        raise refusal
    finally:
        del refusal


def check_counts(body: bytes) -> None:
    """BodyTooLarge for a body that holds more lists, objects, texts or values than one may have; whether it is JSON is
    not checked. Brackets and commas inside of texts do not count."""
    if (
        body.count(b'"') <= 2 * MAX_STRINGS
        and body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS
        and body.count(b",") <= MAX_VALUES
    ):
        return
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    _bound((plain.count(b'"') + 1) // 2, MAX_STRINGS, "texts")
    outside = b"".join(plain.split(b'"')[::2])
    _bound(outside.count(b"[") + outside.count(b"{"), MAX_CONTAINERS, "lists and objects")
    _bound(outside.count(b","), MAX_VALUES, "values")


def check_inner_counts(texts: Sequence[str]) -> None:
    """The same for texts of a body that are JSON by themselves and will be parsed, all together; here what is inside of
    their own texts counts."""
    containers, commas = (sum(text.count(char) for text in texts for char in chars) for chars in ("[{", ","))
    _bound(containers, MAX_CONTAINERS, "lists and objects")
    _bound(commas, MAX_VALUES, "values")


def _bound(count: int, most: int, what: str) -> None:
    if count > most:
        raise BodyTooLarge(f"The body holds more than {most} {what}; send them in several requests.")
