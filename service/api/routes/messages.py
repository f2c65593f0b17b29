"""POST /v1/messages and its token count: a chat in the shapes of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.access.auth import caller_of
from service.api.admission.pipeline import Admitted
from service.api.entry.request_log import notes_of
from service.api.errors import ApiError, message_error_body
from service.api.generation.chat_delta import ChatFormatter
from service.api.generation.job import GenerationJob
from service.api.generation.sequence import OutputChunk
from service.api.http.json_body import JsonRoute
from service.api.http.sse import TextEvent, encode_typed_event, json_answer, until_disconnect
from service.api.openapi import GENERATION_ERRORS, TEXT_ERRORS, streamed
from service.api.routes.answer import admitted, respond
from service.api.routes.tokenize import CHARS_PER_SLOT, num_slots, prompt_of
from service.api.schema.messages import CountTokensRequest, MessagesRequest, chat_of, names_in
from service.api.schema.requests import ChatRequest
from service.api.schema.response_answers import MessageObject, TokenCount
from service.api.schema.responses import renamed
from service.api.state import Services, services_of
from service.fairness.thread_pool import run_in_thread

router = APIRouter(tags=["Anthropic"], route_class=JsonRoute)

_PING = {"type": "ping"}
# Of each type of block, the field that grows, and the type and field of the delta that it grows by.
_GROWING = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}
# Clients want one of thoughts that they send back. Here any will do.
_SIGNATURE = "unsigned"


@router.post(
    "/v1/messages",
    response_model=MessageObject,
    responses={**GENERATION_ERRORS, **streamed("MessageEvent", ends_with_done=False, error_schema="MessageError")},
    summary="Answer in the Messages API",
)
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation, with the base or an adapter."""
    chat = await run_in_thread(lambda: chat_of(body), size_chars=body.num_chars)
    try:
        held = await admitted(request, chat)
    except ApiError as error:
        raise renamed(error, names_in(body)) from None
    answer = MessageAnswer(services_of(request), chat, held)
    notes_of(request).leave_out(body.left_out)
    request_id = request.scope["multilora.request_id"]
    return await respond(
        request,
        answer,
        names=names_in(body),
        encode=encode_typed_event,
        body_of=lambda error: message_error_body(error, request_id),
        last=b"",
        ping=encode_typed_event(_PING),
    )


@router.post(
    "/v1/messages/count_tokens", response_model=TokenCount, responses=TEXT_ERRORS, summary="Count a message's tokens"
)
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """The number of tokens of the prompt that a message with this body would have."""
    services = services_of(request)
    with ExitStack() as held:
        held.enter_context(services.calls.holding(num_slots(body.num_chars, CHARS_PER_SLOT)))
        chat = await run_in_thread(lambda: chat_of(body), size_chars=body.num_chars)
        try:
            prompt = await until_disconnect(request, prompt_of(services, caller_of(request), chat))
        except ApiError as error:
            raise renamed(error, names_in(body)) from None
        return json_answer({"input_tokens": len(prompt.token_ids)}, held.pop_all().close)


class MessageAnswer:
    """A running message and how its answer is written. Close `job` in the end."""

    def __init__(self, services: Services, chat: ChatRequest, admitted: Admitted) -> None:
        self.job = GenerationJob(services, admitted, bool(chat.stream))
        self._id = f"msg_{uuid4().hex}"
        self._formatter = ChatFormatter(
            self.job.plans[0].prompt.reading,
            in_pieces=bool(chat.stream),
            includes_thoughts=chat.include_reasoning is not False,
        )
        self.job.speakers, self.job.answer_id = [self._formatter], self._id
        self._has_calls = self._is_begun = False
        self._last: OutputChunk | None = None
        # Of the block that is written: its index, its type, and the event of more of it.
        self._index, self._kind = -1, ""
        self._more: TextEvent | None = None

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        (piece,) = await self.job.collect()
        return await run_in_thread(lambda: self._written(piece), size_chars=len(piece.text))

    def _written(self, piece: OutputChunk) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        texts: list[list[str]] = []
        for delta in self._deltas(piece):
            begun, text = self._read(delta)
            if begun is not None:
                blocks.append(begun)
                texts.append([])
            texts[-1].append(text)
        for block, parts in zip(blocks, texts, strict=True):
            name, _, _ = _GROWING[block["type"]]
            block[name] = _input("".join(parts)) if name == "input" else "".join(parts)
            if block["type"] == "thinking":
                block["signature"] = _SIGNATURE
        return self._message(blocks)

    def first(self) -> Iterable[dict[str, Any]]:
        """Nothing: `message_start` has the tokens that the prefix cache had, which the first token tells."""
        return ()

    def added(self, index: int, piece: OutputChunk) -> Iterable[dict[str, Any] | bytes]:  # noqa: ARG002
        """The events of a piece, possibly none."""
        events: list[dict[str, Any] | bytes] = []
        if not self._is_begun:
            self._is_begun = True
            events += [{"type": "message_start", "message": self._message([])}, _PING]
        for delta in self._deltas(piece):
            if self._kind == "text" and self._more is not None and "content" in delta:  # as nearly all are
                events.append(self._more(delta["content"]))
                continue
            begun, text = self._read(delta)
            if begun is not None:
                events += self._begin(begun)
            if text:
                assert self._more is not None, "a delta of no block"
                events.append(self._more(text))
        return events

    def last(self) -> Iterator[dict[str, Any]]:
        """The end of the last block and of the message."""
        yield from self._finish_block()
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _deltas(self, piece: OutputChunk) -> list[dict[str, Any]]:
        """The chat's deltas of a piece."""
        reason = piece.finish_reason
        deltas = self._formatter.deltas(piece.text, is_last=reason is not None, is_cut=piece.is_cut)
        self._formatter.count(piece.text_offsets)
        if reason is not None:
            self._last = piece
        return deltas

    def _read(self, delta: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """(the block that a delta begins, its text)."""
        if calls := delta.get("tool_calls"):
            (call,) = calls
            arguments = call["function"].get("arguments") or ""
            if "id" not in call:
                return None, arguments
            self._kind, self._has_calls = "tool_use", True
            return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}, arguments
        kind, text = ("text", delta["content"]) if "content" in delta else ("thinking", delta["reasoning_content"])
        if kind == self._kind:
            return None, text
        self._kind = kind
        return {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}, text

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._finish_block()
        self._index += 1
        _, kind, name = _GROWING[block["type"]]
        event = {"type": "content_block_delta", "index": self._index}
        self._more = TextEvent(lambda text: {**event, "delta": {"type": kind, name: text}}, encode_typed_event)
        self._is_thinking = block["type"] == "thinking"
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _finish_block(self) -> Iterator[dict[str, Any]]:
        if self._more is None:
            return
        self._more = None
        if self._is_thinking:
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}
        yield {"type": "content_block_stop", "index": self._index}

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.job.name,
            "content": blocks,
            **self._end(),
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, Any]:
        """Why the answer ended, once it has."""
        reason, sequence = None, None
        if self._last is not None and self._last.finish_reason == "abort":
            reason = "pause_turn"  # what is there can be sent back, and goes on
        elif self._last is not None and self._last.is_cut:
            reason = "max_tokens"
        elif self._last is not None and isinstance(self._last.stop_reason, str):
            reason, sequence = "stop_sequence", self._last.stop_reason
        elif self._last is not None:
            reason = "tool_use" if self._has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        num_cached = self.job.num_cached_tokens
        return {
            "input_tokens": self.job.runs[0].num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self.job.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._formatter.num_reasoning_tokens},
        }


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; none where the answer was cut before they were complete."""
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
