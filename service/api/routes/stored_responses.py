"""Stored responses: to read, delete, cancel and continue them, and those that run in the background."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO, Literal, Protocol

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.convertors import StringConvertor, register_url_convertor

from service.api.access.auth import caller_of
from service.api.adapter_routes.listing import Digits
from service.api.errors import ApiError, BadRequest, BodyTooLarge, UnknownResponse, quoted
from service.api.generation.job import GenerationJob
from service.api.http.json_body import MAX_CONTAINERS, JsonRoute
from service.api.http.sse import json_answer
from service.api.openapi import errors
from service.api.response_store import ResponseStore, StoredResponse
from service.api.routes.tokenize import CHARS_PER_SLOT, num_slots
from service.api.schema.base import each_once, field_error, no_query
from service.api.schema.requests import ChatRequest
from service.api.schema.response_answers import DeletedResponse, InputItemList, ResponseObject
from service.api.schema.responses import InputItem, ResponsesRequest, chat_of, check_include
from service.api.state import Services, services_of
from service.fairness.thread_pool import in_turn, run_in_thread
from service.logs import LOGGER
from service.text.tokenizer import NotUnicode

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


class _Id(StringConvertor):
    """In a path: an id, but for the names of OpenAI's routes beside it."""

    regex = "(?!(?:input_tokens|compact)$)[^/]+"


register_url_convertor("response", _Id())

NOT_STORED = "needs stored responses, which this server does not keep (--responses-store-bytes)"
_ERRORS = errors((400, 401, 403, 404, 429, 503))
# How soon a response in the background ends that another server has cancelled or deleted.
_LOOK_SECONDS = 1.0


class Background(Protocol):
    """A running response, see `service.api.routes.responses.ResponseAnswer`."""

    id: str
    items: list[dict[str, Any]]
    job: GenerationJob

    async def whole(self) -> dict[str, Any]: ...
    def begun(self) -> dict[str, Any]: ...
    def broken_off(self, error: Exception | None) -> dict[str, Any]: ...


class _Included(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=False)

    include: list[str] | None = Field(None, description="as in requests; nothing depends on it")
    include_in_brackets: list[str] | None = Field(
        None, alias="include[]", description="the same, as OpenAI's client writes it"
    )

    @model_validator(mode="after")
    def _check_include(self) -> _Included:
        check_include([*(self.include or ()), *(self.include_in_brackets or ())])
        return self


class RetrieveQuery(_Included):
    stream: bool | None = Field(None, description="only false: a stored response is not streamed again")
    starting_after: Digits | None = Field(None, description="not served, as `stream`")
    include_obfuscation: bool | None = Field(None, description="without effect")

    @model_validator(mode="after")
    def _check_stream(self) -> RetrieveQuery:
        for name in ("stream", "starting_after"):
            if getattr(self, name) not in (None, False):
                raise field_error(name, f"`{name}` is not served for stored responses; leave it out.")
        return self


class InputItemsQuery(_Included):
    limit: Digits = Field(20, ge=1, le=100, description="most items of a page")
    order: Literal["asc", "desc"] = Field("desc", description="asc: the oldest first")
    after: str | None = Field(None, max_length=256, description="the last item of the page before (its `last_id`)")


@router.get(
    "/v1/responses/{response_id:response}",
    dependencies=[each_once],
    response_model=ResponseObject,
    responses=_ERRORS,
    summary="A stored response",
)
async def get_response(request: Request, response_id: str, query: Annotated[RetrieveQuery, Query()]) -> Response:  # noqa: ARG001
    """The response as it was answered, or as far as it is in the background."""
    stored = await _stored(request, response_id)
    return _answer_of(request, stored.response, stored.num_bytes)


@router.get(
    "/v1/responses/{response_id:response}/input_items",
    dependencies=[each_once],
    response_model=InputItemList,
    responses=_ERRORS,
    summary="What a stored response answers",
)
async def list_input_items(request: Request, response_id: str, query: Annotated[InputItemsQuery, Query()]) -> Response:
    """The items of the conversation that it answers, from those before `previous_response_id` on, the last first."""
    stored = await _stored(request, response_id)
    items = stored.input if query.order == "asc" else stored.input[::-1]
    if query.after is not None:
        found = [at for at, item in enumerate(items) if item["id"] == query.after]
        if not found:
            raise BadRequest(f"`after` names {quoted(query.after)!r}, which is no item of it.", param="after")
        items = items[found[0] + 1 :]
    page = items[: query.limit]
    ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    answer = {"object": "list", "data": page, **ids, "has_more": len(items) > len(page)}
    return _answer_of(request, answer, stored.num_bytes)


@router.delete(
    "/v1/responses/{response_id:response}",
    dependencies=[no_query],
    response_model=DeletedResponse,
    responses=_ERRORS | errors((413,)),
    summary="Delete a stored response",
)
async def delete_response(request: Request, response_id: str) -> Response:
    """The response and its input. Those that continue it hold what they need of it, and stay."""
    store, tenant = _store(request), caller_of(request).tenant.name
    if not await in_turn(store.delete, tenant, response_id):
        raise _unknown(response_id)
    await _end(store, response_id)
    return _answer_of(request, {"id": response_id, "object": "response", "deleted": True}, 0)


@router.post(
    "/v1/responses/{response_id:response}/cancel",
    dependencies=[no_query],
    response_model=ResponseObject,
    responses=_ERRORS | errors((413,)),
    summary="Cancel a response in the background",
)
async def cancel_response(request: Request, response_id: str) -> Response:
    """The response as it is from now on: cancelled, or as it had ended before."""
    store, tenant = _store(request), caller_of(request).tenant.name
    stored = await _stored(request, response_id)
    if not stored.response["background"]:
        raise BadRequest("Cannot cancel a synchronous response; close its connection.")
    if stored.response["status"] == "in_progress":
        await _end(store, response_id)
        stored = await _stored(request, response_id)
    if stored.response["status"] == "in_progress":  # on another server, which looks for this
        stored.response["status"] = "cancelled"
        await in_turn(store.put, tenant, stored)
    return _answer_of(request, stored.response, stored.num_bytes)


async def conversation_of(
    request: Request, body: ResponsesRequest, held: ExitStack
) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """The chat behind the conversation that the body continues, whose slots are held, and the items to store. Raises
    as `_conversation_before` and `chat_of` do."""
    services, before, size_chars = services_of(request), list[dict[str, Any]](), body.num_chars
    if body.previous_response_id is not None:
        previous = await _conversation_before(services, caller_of(request).tenant.name, body.previous_response_id)
        held.enter_context(services.calls.holding(num_slots(previous.num_bytes, CHARS_PER_SLOT)))
        before, size_chars = previous.items, size_chars + previous.num_bytes
    stores = services.responses is not None and body.store is not False

    def read() -> tuple[ChatRequest, list[dict[str, Any]]]:
        items = before + [item.stored for item in body.items] if stores else []
        _check_unicode(items, body)
        return chat_of(_continued(body, before) if before else body), items

    return await run_in_thread(read, size_chars=size_chars)


async def _conversation_before(services: Services, tenant: str, response_id: str) -> StoredResponse:
    """The stored response that a request continues. BadRequest, UnknownResponse, BodyTooLarge."""
    param = "previous_response_id"
    if services.responses is None:
        raise BadRequest(f"`{param}` {NOT_STORED}; send the whole conversation as `input`.", param=param)
    stored = await in_turn(services.responses.get, tenant, response_id)
    if stored is None:
        raise _unknown(response_id, param)
    if stored.response["status"] == "in_progress":
        raise BadRequest(f"`{param}` names a response that is still running; wait for its end.", param=param)
    if stored.num_bytes > (most := int(services.settings.max_body_bytes)):
        raise BodyTooLarge(
            f"The conversation of `{param}` has {stored.num_bytes} bytes; this server continues up to {most} "
            "(--max-body-bytes). Send what still matters of it as `input`.",
            param=param,
        )
    return stored


def _continued(request: ResponsesRequest, before: list[dict[str, Any]]) -> ResponsesRequest:
    """The request with a conversation before its input. BodyTooLarge for more than one body may hold."""
    items = [*(InputItem.model_validate(item) for item in before), *request.items]
    if sum(item.num_containers for item in items) > MAX_CONTAINERS:
        raise BodyTooLarge(
            f"The conversation of `previous_response_id` has more than {MAX_CONTAINERS} items and parts; send what "
            "still matters of it as `input`.",
            param="previous_response_id",
        )
    return request.model_copy(update={"input": items})


def _check_unicode(items: list[dict[str, Any]], body: ResponsesRequest) -> None:
    """NotUnicode for what could not be written again, whether the model sees it or not."""
    fields = body.metadata, body.tools, body.tool_choice, None if body.text is None else body.text.format
    try:
        msgspec.json.encode((items, fields))
    except UnicodeEncodeError:
        raise NotUnicode("The request holds half of a surrogate pair; send valid Unicode.") from None


async def put(services: Services, tenant: str, stored: StoredResponse) -> bool:
    """Store a response; whether that could be done."""
    assert services.responses is not None, "nothing is stored here"
    return await in_turn(services.responses.put, tenant, stored)


async def run_in_background(services: Services, tenant: str, answer: Background) -> dict[str, Any]:
    """Let the answer go on without its client; the response as it is now, queued. ApiError, with the job closed, if it
    cannot be stored."""
    store, begun = services.responses, answer.begun()
    assert store is not None, "nothing is stored here"
    try:
        if not await put(services, tenant, StoredResponse(begun, answer.items)):
            raise BadRequest(
                "`background` needs a stored response, and this one does not fit the server's store; send `stream`.",
                param="background",
            )
        claim = await in_turn(store.claim, tenant, answer.id)
    except BaseException:
        answer.job.close()
        raise
    task = asyncio.create_task(_run(store, tenant, answer, claim), name="background response")
    store.running[answer.id] = task
    task.add_done_callback(lambda _task: store.running.pop(answer.id))
    return {**begun, "status": "queued"}


async def _run(store: ResponseStore, tenant: str, answer: Background, claim: BinaryIO) -> None:
    """Until the answer is whole and stored, or somebody has deleted or cancelled it."""
    with claim:
        work = asyncio.ensure_future(answer.whole())
        try:
            while not (await asyncio.wait({work}, timeout=_LOOK_SECONDS))[0]:
                if not await in_turn(store.is_claimed, tenant, answer.id, claim):
                    return
            response = work.result()
        except asyncio.CancelledError:
            response = answer.broken_off(None)
        except Exception as error:
            if not isinstance(error, ApiError):
                LOGGER.exception("A response in the background failed unexpectedly.")
            response = answer.broken_off(error)
        finally:
            work.cancel()
            answer.job.close()
        if await in_turn(store.is_claimed, tenant, answer.id, claim):
            await in_turn(store.put, tenant, StoredResponse(response, answer.items))
        fields = {"response": answer.id, "status": response["status"], "request_id": answer.job.request_id}
        LOGGER.info("background response", extra={"fields": fields})


async def _end(store: ResponseStore, response_id: str) -> None:
    """Cancel it if it runs here, and wait for its end."""
    if (task := store.running.get(response_id)) is not None:
        if not task.cancelling():
            task.cancel()
        await asyncio.wait({task})


def _store(request: Request) -> ResponseStore:
    store = services_of(request).responses
    if store is None:
        raise UnknownResponse(f"This {NOT_STORED}.")
    return store


async def _stored(request: Request, response_id: str) -> StoredResponse:
    store = _store(request)
    stored = await in_turn(store.get, caller_of(request).tenant.name, response_id)
    if stored is None:
        raise _unknown(response_id)
    return stored


def _unknown(response_id: str, param: str | None = None) -> UnknownResponse:
    sentence = f"Response with id {quoted(response_id)!r} not found; it may have made room for newer ones."
    return UnknownResponse(sentence, param=param)


def _answer_of(request: Request, answer: dict[str, Any], num_bytes: int) -> Response:
    """The answer, which holds slots of calls until it has been sent."""
    with ExitStack() as held:
        held.enter_context(services_of(request).calls.holding(num_slots(num_bytes, CHARS_PER_SLOT)))
        return json_answer(answer, held.pop_all().close)
