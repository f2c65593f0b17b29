"""POST /v1/completions/batch and /v1/chat/completions/batch: requests in one call, all admitted at once."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, ValidationError, model_validator

from service.api.access.auth import caller_of
from service.api.admission.model_resolution import shared_name
from service.api.admission.pipeline import Admitted, QueueSlots, admit, most_queue_slots, num_queue_slots, reserve
from service.api.admission.plans import num_logprobs, too_many_logprobs
from service.api.entry.request_log import note, note_job
from service.api.errors import HANDLED, BadRequest, BodyTooLarge, error_body
from service.api.http.json_body import JsonRoute
from service.api.http.sse import json_answer, until_disconnect
from service.api.openapi import BATCH_ERRORS, GENERATION_ERRORS
from service.api.routes.chat import ChatAnswer
from service.api.routes.completions import CompletionAnswer
from service.api.schema.base import FIRST, field_error
from service.api.schema.chat_messages import ChatMessage
from service.api.schema.error_messages import bad_request
from service.api.schema.generation_answers import BatchResponse, ChatResponse
from service.api.schema.requests import MAX_HELD_LOGPROBS, BatchRequest, ChatRequest, CompletionRequest
from service.api.state import Services, services_of
from service.fairness.thread_pool import in_turn
from service.logs import LOGGER
from service.tenants.limits import Tenant
from service.tenants.tenants import Caller

router = APIRouter(tags=["multilora"], route_class=JsonRoute)

_Conversations = Annotated[list[Annotated[list[ChatMessage], Field(min_length=1), FIRST]], Field(min_length=1), FIRST]


class ChatBatchRequest(ChatRequest):
    """Body of POST /v1/chat/completions/batch, vLLM's: a chat completion request for several conversations."""

    messages: _Conversations = Field(  # type: ignore[assignment]
        description="the conversations, each answered by the choice of its index"
    )

    @model_validator(mode="after")
    def _check_one_answer_each(self) -> ChatBatchRequest:
        if self.stream:
            raise field_error("stream", "`stream` is not allowed in a batch; leave it out.")
        if (self.n or 1) > 1:
            raise field_error("n", "`n` must be 1 in a batch: each conversation has one choice.")
        return self

    def each(self) -> list[ChatRequest]:
        """A request for each conversation."""
        return [self.model_copy(update={"messages": messages}) for messages in self.messages]


_Answer = ChatAnswer | CompletionAnswer
_Parsed = ChatRequest | CompletionRequest | Exception
_Checked = tuple[ChatRequest | CompletionRequest, Admitted]


@router.post(
    "/v1/completions/batch",
    response_model=BatchResponse,
    responses=BATCH_ERRORS,
    summary="Several requests in one call",
)
async def create_batch(request: Request, body: BatchRequest) -> Response:
    """Each item is a completion or chat completion request with its own `model`. The answers come in the items' order;
    an item that fails has an error in its place and the others go on."""
    services = services_of(request)
    _check_size(len(body.items), services.settings.max_batch_items, "items")
    services.require_ready()
    tenant = caller_of(request).tenant
    # A thread: all items together may be as large as a body.
    parsed = await in_turn(parse_all, services, tenant, body)
    with ExitStack() as until_sent:
        answers = await _answers(request, parsed, until_sent)
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            note(request, failed_items=len(failed), error=failed[0]["message"], param=failed[0]["param"])
        return json_answer({"items": answers}, until_sent.pop_all().close)


@router.post(
    "/v1/chat/completions/batch",
    tags=["vLLM"],
    response_model=ChatResponse,
    responses=GENERATION_ERRORS,
    summary="Answer several chats alike",
)
async def create_chat_batch(request: Request, body: ChatBatchRequest) -> Response:
    """vLLM's: one request for several conversations, of which each has the choice of its index. One that fails fails
    all."""
    services = services_of(request)
    _check_size(len(body.messages), services.settings.max_batch_items, "conversations", "messages")
    services.require_ready()
    num_queue_slots(services, caller_of(request).tenant, body)
    with ExitStack() as until_sent:
        answers = await _answers(request, list(body.each()), until_sent, fails_whole=True)
        return json_answer(_joined(answers), until_sent.pop_all().close)


def _joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Several chat completions as one, with a choice of each."""
    own = ("prompt_logprobs", "prompt_token_ids")
    choices = [
        {**one["choices"][0], "index": index, **{name: one[name] for name in own if one.get(name) is not None}}
        for index, one in enumerate(answers)
    ]
    shared = {name: value for name, value in answers[0].items() if name not in own}
    return {**shared, "choices": choices, "usage": _summed([one["usage"] for one in answers])}


def _summed(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Token counts added up by name, and so are the details inside them."""
    columns = {name: [one[name] for one in counts] for name in counts[0]}
    return {name: _summed(each) if isinstance(each[0], dict) else sum(each) for name, each in columns.items()}


async def _answers(
    request: Request, parsed: list[_Parsed], until_sent: ExitStack, *, fails_whole: bool = False
) -> list[dict[str, Any]]:
    """The answers, in the order of the requests; an error instead of one that fails, or, with `fails_whole`, what
    it raises. `until_sent` gives back what they hold in memory."""
    services = services_of(request)
    checked = await until_disconnect(request, admit_all(services, caller_of(request), parsed))
    if fails_whole and (failed := next((one for one in checked if isinstance(one, Exception)), None)):
        release_all(checked)
        raise failed
    running = _start_all(services, checked)
    answer = partial(_answer, until_sent=until_sent, fails_whole=fails_whole)
    try:
        for one in running:
            if not isinstance(one, Exception):
                note_job(request, one.job)
        return await until_disconnect(request, asyncio.gather(*map(answer, running)))
    finally:
        # Those that have no answer, since the client is gone.
        for one in running:
            if not isinstance(one, Exception):
                one.job.close()


def _check_size(count: int, limit: int, what: str, param: str = "items") -> None:
    if count > limit:
        raise BodyTooLarge(f"The batch has {count} {what}; it may have {limit}.", param=param)


def parse_all(services: Services, tenant: Tenant, body: BatchRequest) -> list[_Parsed]:
    """The requests that the items are, or what is wrong with them."""
    return [_parse(services, tenant, item) for item in body.items]


async def admit_all(services: Services, caller: Caller, parsed: list[_Parsed]) -> list[_Checked | Exception]:
    """Each request admitted, or what is wrong with it. QueueFull or LimitReached, with nothing left behind, if there is
    no room for all of them."""
    tenant = caller.tenant
    shares = [0 if isinstance(one, Exception) else num_queue_slots(services, tenant, one) for one in parsed]
    _check_size(sum(shares), most_queue_slots(services, tenant), "sequences")
    first = next((_model_of(services, one) for one in parsed if not isinstance(one, Exception)), "")
    slots = reserve(services, tenant, sum(shares), first)
    checked: list[_Checked | Exception] = []
    try:
        for one, share in zip(parsed, shares, strict=True):
            checked.append(await _admit(services, caller, one, slots.split(share)))
            await asyncio.sleep(0)  # each may tokenise in the loop as much as a request by itself
    except BaseException:
        slots.release()
        release_all(checked)
        raise
    _bound_logprobs(checked)
    return checked


def _bound_logprobs(checked: list[_Checked | Exception]) -> None:
    """Items that ask, with those before them, for more log probabilities than one request may have, fail; in place."""
    num_sequences = sum(len(one[1].plans) for one in checked if not isinstance(one, Exception))
    wanted = 0
    for index, one in enumerate(checked):
        if isinstance(one, Exception):
            continue
        share = num_logprobs(one[1].plans, with_answers=num_sequences > 1)
        if share and wanted and wanted + share > MAX_HELD_LOGPROBS:
            one[1].release()
            checked[index] = too_many_logprobs(wanted + share)
        else:
            wanted += share


def _model_of(services: Services, request: ChatRequest | CompletionRequest) -> str:
    """The name of what the item asks for, known or not."""
    try:
        return shared_name(services, request)
    except BadRequest:
        return ""  # the item will be refused for it


async def _admit(services: Services, caller: Caller, request: _Parsed, slots: QueueSlots) -> _Checked | Exception:
    if isinstance(request, Exception):
        return request
    try:
        return request, await admit(services, caller, request, slots)
    except Exception as error:
        return _surprise(error)


def _parse(services: Services, tenant: Tenant, item: Any) -> _Parsed:
    """The request that an item is, once it is known that the tenant could have as many sequences."""
    request: ChatRequest | CompletionRequest
    try:
        if not isinstance(item, dict):
            raise BadRequest("An item must be an object: a completion or chat completion request.")
        if item.get("stream"):
            raise BadRequest("`stream` is not allowed inside a batch; leave it out.", param="stream")
        if item.get("messages") is not None:
            if item.get("prompt") is not None:
                raise BadRequest("`messages` and `prompt` are both given; send one of them.", param="messages")
            request = ChatRequest.model_validate(item)
        else:
            request = CompletionRequest.model_validate(item)
        num_queue_slots(services, tenant, request)
        return request
    except ValidationError as error:
        return bad_request(error.errors())
    except Exception as error:
        return _surprise(error)


def _surprise(error: Exception) -> Exception:
    """The error of one item, which the others survive; one that nobody foresaw is logged."""
    if not isinstance(error, HANDLED):
        LOGGER.error("An item of a batch failed unexpectedly.", exc_info=error)
    return error


def _start_all(services: Services, checked: list[_Checked | Exception]) -> list[_Answer | Exception]:
    """Submit all sequences of the batch between two steps."""
    return [one if isinstance(one, Exception) else _start(services, *one) for one in checked]


def _start(services: Services, request: ChatRequest | CompletionRequest, admitted: Admitted) -> _Answer | Exception:
    try:
        if isinstance(request, ChatRequest):
            return ChatAnswer(services, request, admitted)
        return CompletionAnswer(services, request, admitted)
    except Exception as error:  # the job has given everything back
        return _surprise(error)


def release_all(checked: list[_Checked | Exception]) -> None:
    """Give back what those hold that were admitted."""
    for one in checked:
        if not isinstance(one, Exception):
            one[1].release()


async def _answer(running: _Answer | Exception, until_sent: ExitStack, fails_whole: bool) -> dict[str, Any]:
    """The item's answer, or its error, which `fails_whole` raises. Its queue slots and its adapter are given
    back then, not when the longest item ends; what it holds in memory by `until_sent`."""
    if isinstance(running, Exception):
        if fails_whole:
            raise running
        return error_body(running)
    try:
        answer = await running.whole()
        until_sent.callback(running.job.hand_over())
        return answer
    except Exception as error:
        if fails_whole:
            raise
        return error_body(_surprise(error))
    finally:
        running.job.close()
