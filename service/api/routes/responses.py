"""POST /v1/responses and its token count: a chat in the shapes of OpenAI's Responses API, stored where the operator
wants that."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.access.auth import caller_of
from service.api.admission.pipeline import Admitted
from service.api.admission.plans import sampling_parameters
from service.api.entry.request_log import note_job, notes_of
from service.api.errors import ApiError, BadRequest, error_body, status_of
from service.api.generation.sequence import OutputChunk
from service.api.http.json_body import JsonRoute
from service.api.http.sse import JsonResponse, encode_typed_event, json_answer, until_disconnect
from service.api.openapi import GENERATION_ERRORS, TEXT_ERRORS, streamed
from service.api.response_store import StoredResponse, new_id
from service.api.routes.answer import admitted, respond
from service.api.routes.chat import ChatAnswer
from service.api.routes.stored_responses import NOT_STORED, conversation_of, put, run_in_background
from service.api.routes.tokenize import CHARS_PER_SLOT, num_slots, prompt_of
from service.api.schema.requests import ChatRequest
from service.api.schema.response_answers import InputTokens, ResponseObject
from service.api.schema.responses import ITEM_PREFIXES, NAMES, ResponsesRequest, renamed
from service.api.state import Services, services_of

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

EventFields = dict[str, Any]
# Item type to the type of its only part, for items that are text.
_PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}
# Why an answer is incomplete, by the chat's reason.
_CUTS = {"length": "max_output_tokens", "abort": "abort"}


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses={**GENERATION_ERRORS, **streamed("ResponseEvent", ends_with_done=False)},
    summary="Answer in the Responses API",
)
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input, with the base or an adapter, behind the conversation of a stored response if one is named. The
    answer is stored where the server stores any, unless `store` is false."""
    services, tenant = services_of(request), caller_of(request).tenant.name
    if body.background and services.responses is None:
        raise BadRequest(f"`background` {NOT_STORED}; send `stream`.", param="background")
    answer = await _begun(request, body)
    notes = notes_of(request)
    notes.leave_out(body.left_out)
    if answer.items and body.background:
        note_job(request, answer.job, NAMES)
        return JsonResponse(await run_in_background(services, tenant, answer))

    async def keep(response: dict[str, Any]) -> bool:
        is_kept = await put(services, tenant, StoredResponse(response, answer.items))
        notes.leave_out([] if is_kept else ["store"])
        return is_kept

    answer.keep = keep if answer.items else None
    stream: dict[str, Any] = {"encode": encode_typed_event, "body_of": answer.failure_event, "settle": answer.settle}
    return await respond(request, answer, names=NAMES, last=b"", **stream)


@router.post(
    "/v1/responses/input_tokens",
    response_model=InputTokens,
    responses=TEXT_ERRORS,
    summary="Count a response's input tokens",
)
async def count_input_tokens(request: Request, body: ResponsesRequest) -> Response:
    """The number of tokens of the prompt that a response with this body would have."""
    services = services_of(request)
    with ExitStack() as held:
        held.enter_context(services.calls.holding(num_slots(body.num_chars, CHARS_PER_SLOT)))
        chat, _ = await conversation_of(request, body, held)
        try:
            prompt = await until_disconnect(request, prompt_of(services, caller_of(request), chat))
        except ApiError as error:
            raise renamed(error) from None
        answer = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
        return json_answer(answer, held.pop_all().close)


async def _begun(request: Request, body: ResponsesRequest) -> ResponseAnswer:
    """The request, running. Raises as `conversation_of` and `admit` do."""
    with ExitStack() as slots:
        chat, items = await conversation_of(request, body, slots)
        try:
            held = await admitted(request, chat)
        except ApiError as error:
            raise renamed(error) from None
    return ResponseAnswer(services_of(request), body, chat, held, items)


class ResponseAnswer:
    """A running response and how its answer is written. Close `job` in the end.

    keep   stores the whole answer, and returns whether that could be done; None for one that is not to be stored
    items  the input of one that is to be stored, see `StoredResponse`; empty for another one
    """

    def __init__(
        self,
        services: Services,
        request: ResponsesRequest,
        chat: ChatRequest,
        admitted: Admitted,
        items: list[dict[str, Any]],
    ) -> None:
        self._defaults = services.sampling_defaults
        self._request = request
        self._chat = ChatAnswer(services, chat, admitted, keeps_logprobs=True)
        self._output = ResponseOutput()
        self.id, self._created = new_id(), int(time.time())
        self._num_events = 0
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._ending: list[dict[str, Any]] = []
        self.keep: Callable[[dict[str, Any]], Awaitable[bool]] | None = None
        self.items = items
        self.job = self._chat.job
        self.job.answer_id = self.id

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        chat = await self._chat.whole()
        choice = chat["choices"][0]
        for _ in self._output.add(choice["message"], _logprobs(choice)):
            pass
        self._finish_reason = choice["finish_reason"]
        for _ in self._output.finish(self._status):
            pass
        return await self._kept(self._response(self._status, chat["usage"]))

    def first(self) -> Iterator[dict[str, Any]]:
        """The events `response.created` and `response.in_progress`, with the request's fields."""
        for kind in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{kind}", "response": self.begun()})
        yield from self._events(self._chat.first())

    def added(self, index: int, piece: OutputChunk) -> Iterator[dict[str, Any]]:
        """The events of a piece, possibly none."""
        yield from self._events(self._chat.chunks(index, piece))

    async def settle(self, error: Exception | None) -> None:
        """Store the answer whose stream ends, whole or as far as it came: a client that has heard of the end may ask
        for it at once."""
        if error is not None or self._finish_reason is None:
            await self._kept(self.broken_off(error))
            return
        self._ending = list(self._events(self._chat.last()))
        self._ending += map(self._numbered, self._output.finish(self._status))
        response = await self._kept(self._response(self._status, self._usage))
        self._ending.append(self._numbered({"type": f"response.{self._status}", "response": response}))

    def last(self) -> list[dict[str, Any]]:
        """The end of the last item, and the whole answer."""
        return self._ending

    def begun(self) -> dict[str, Any]:
        """The answer before there is any."""
        return self._response("in_progress", None)

    def broken_off(self, error: Exception | None) -> dict[str, Any]:
        """The answer as far as it came: failed by the error, or cancelled."""
        if self._output.items:
            for _ in self._output.finish("incomplete"):
                pass
        if error is None:
            return self._response("cancelled", None)
        code = "server_error" if status_of(error) >= 500 else "invalid_prompt"
        detail = {"code": code, "message": error_body(error)["error"]["message"]}
        return {**self._response("failed", None), "error": detail}

    async def _kept(self, response: dict[str, Any]) -> dict[str, Any]:
        if self.keep is not None and not await self.keep(response):
            self.keep = None
            response["store"] = False
        return response

    def _events(self, chunks: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The chat's chunks in this API's form."""
        for chunk in chunks:
            self._usage = chunk.get("usage", self._usage)
            for choice in chunk["choices"]:
                for event in self._output.add(choice["delta"], _logprobs(choice)):
                    yield self._numbered(event)
                if choice["finish_reason"] is not None:
                    self._finish_reason = choice["finish_reason"]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason in _CUTS else "completed"

    def failure_event(self, error: Exception) -> dict[str, Any]:
        """An error that ends the stream: as this API writes it, and under `error` as all others do, where its clients
        look too."""
        body = error_body(error)
        detail = {name: body["error"][name] for name in ("message", "param", "code")}
        return self._numbered({"type": "error", **detail, **body})

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        request = self._request
        sampling = sampling_parameters(request, self._defaults)
        text = request.text
        text_form = {
            "format": (text and text.format) or {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status in ("completed", "incomplete") else None,
            "status": status,
            "background": request.background is True,
            "error": None,
            "incomplete_details": {"reason": _CUTS[self._finish_reason or ""]} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.job.name,
            "output": list(self._output.items),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": bool(self.items),
            "system_fingerprint": self.job.fingerprint,
            "temperature": sampling["temperature"],
            "text": text_form,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling["top_p"],
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


class ResponseOutput:
    """The items of a response, made from the deltas of a chat. `add` and `finish` yield the events of what they add.

    An item is a text, a reasoning or the call of a function. The next one begins when the chat says something of
    another kind. Each has its id from its first event to its last, and is whole with the last.

    items  the last one has its text when it has ended
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._logprobs: list[Any] = []
        # Text of the open item, joined when it ends: appending each part would copy all before it.
        self._texts: list[str] = []
        # The open item's index among the chat's calls.
        self._call: int | None = None

    def add(self, delta: Mapping[str, Any], logprobs: Sequence[Any] = ()) -> Iterator[EventFields]:
        """A chat's message, or a delta of one, with the log probabilities of its tokens."""
        if delta.get("reasoning_content"):
            yield from self._add_text("reasoning", delta["reasoning_content"], ())
        # A token's log probability may come before its text does; of calls and thoughts this API tells none.
        if delta.get("content") or not (delta.get("tool_calls") or delta.get("reasoning_content")):
            self._logprobs.extend(logprobs)
        if delta.get("content"):
            logprobs, self._logprobs = self._logprobs, []
            yield from self._add_text("message", delta["content"], logprobs)
        for index, call in enumerate(delta.get("tool_calls") or ()):
            yield from self._add_call(call.get("index", index), call)

    def finish(self, status: str) -> Iterator[EventFields]:
        """End the last item, which is there even if nothing was said; status "completed" or "incomplete"."""
        if not self.items:
            yield from self._begin({"type": "message", "role": "assistant", "content": []})
            yield from self._begin_part()
        yield from self._end(status)

    def _add_text(self, kind: str, text: str, logprobs: Sequence[Any]) -> Iterator[EventFields]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._end("completed")
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin({"type": kind, **own, "content": []})
            yield from self._begin_part()
        part = self.items[-1]["content"][0]
        self._texts.append(text)
        event = {"type": f"response.{part['type']}.delta", **self._position(content_index=0), "delta": text}
        if kind == "message":
            part["logprobs"].extend(logprobs)
            event["logprobs"] = list(logprobs)
        yield event

    def _add_call(self, index: int, call: Mapping[str, Any]) -> Iterator[EventFields]:
        function = call.get("function") or {}
        if not self._is_open or self._call != index:
            yield from self._end("completed")
            yield from self._begin(
                {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": ""}
            )
            self._call = index
        arguments = function.get("arguments") or ""
        self._texts.append(arguments)
        if arguments:
            yield {"type": "response.function_call_arguments.delta", **self._position(), "delta": arguments}

    def _begin(self, item: dict[str, Any]) -> Iterator[EventFields]:
        item |= {"id": f"{ITEM_PREFIXES[item['type']]}_{uuid4().hex}", "status": "in_progress"}
        self.items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)}

    def _begin_part(self) -> Iterator[EventFields]:
        item = self.items[-1]
        part: dict[str, Any] = {"type": _PART_TYPES[item["type"]], "text": ""}
        if item["type"] == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        yield {"type": "response.content_part.added", **self._position(content_index=0), "part": _copy(part)}

    def _end(self, status: str) -> Iterator[EventFields]:
        if not self._is_open:
            return
        self._is_open, self._call = False, None
        item = self.items[-1]
        text, self._texts = "".join(self._texts), []
        if item["type"] == "function_call":
            item["arguments"] = text
        else:
            item["content"][0]["text"] = text
        if item["type"] == "message":
            item["content"][0]["logprobs"].extend(self._logprobs)
        self._logprobs = []
        item["status"] = status
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._position(), **whole}
        else:
            part, position = item["content"][0], self._position(content_index=0)
            whole = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            yield {"type": f"response.{part['type']}.done", **position, **whole}
            yield {"type": "response.content_part.done", **position, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _position(self, **more: int) -> dict[str, Any]:
        """Where the open item is."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: what it holds may grow before the event is written."""
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}


def _logprobs(choice: dict[str, Any]) -> list[Any]:
    return choice["logprobs"]["content"] if choice.get("logprobs") else []


def _usage(chat: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {**chat["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": chat["completion_tokens_details"],
        "total_tokens": chat["total_tokens"],
    }
