"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.access.auth import caller_of
from service.api.admission.admission import Admitted, admit
from service.api.entry.request_log import note_job
from service.api.generation.chat_delta import ChatFormatter
from service.api.generation.job import GenerationJob
from service.api.generation.logprobs import chat_logprobs, cost_chars, prompt_logprobs, token_names
from service.api.generation.output_chunk import OutputChunk
from service.api.generation.stream import EventStream
from service.api.http.chunked_answers import json_answer
from service.api.http.json_body import JsonRoute
from service.api.http.sse import TextEvent, until_disconnect
from service.api.openapi import GENERATION_ERRORS, streamed
from service.api.run_in_thread import run_in_thread
from service.api.schema.generation_answers import ChatResponse
from service.api.schema.requests import ChatRequest, StreamOptions
from service.api.schema.tools import NamedTool
from service.api.state import Services, services_of

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    responses={**GENERATION_ERRORS, **streamed("ChatChunk")},
    summary="Answer a chat",
)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, with the base or an adapter."""
    services = services_of(request)
    answer = ChatAnswer(services, body, await until_disconnect(request, admit(services, caller_of(request), body)))
    note_job(request, answer.job)
    if body.stream:
        return EventStream(answer.job, answer)
    try:
        return json_answer(await until_disconnect(request, answer.whole()), answer.job.hand_over())
    finally:
        answer.job.close()


class ChatAnswer:
    """A running chat request and the form of its answer. Close `job` in the end; see it for `keeps_logprobs`."""

    def __init__(
        self, services: Services, request: ChatRequest, admitted: Admitted, *, keeps_logprobs: bool = False
    ) -> None:
        self._services = services
        self._request = request
        self._id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._names = token_names(services.tokenizer, request)
        last = request.messages[-1]
        self._echoed = last.text if request.echo and last.role == "assistant" else ""
        self.job = GenerationJob(services, admitted, bool(request.stream), keeps_logprobs=keeps_logprobs)
        self._options = request.stream_options or StreamOptions()
        # For each choice, the chunk of a delta that brings nothing but words.
        self._text_events: dict[int, TextEvent] = {}
        self._is_text_alone = not (request.return_token_ids or self._options.counts_each_chunk)
        self._chunk_head = self._head("chat.completion.chunk")
        self._speakers = [
            ChatFormatter(
                plan.prompt.reading,
                in_pieces=bool(request.stream),
                includes_thoughts=request.include_reasoning is not False,
                names_tool=isinstance(request.tool_choice, NamedTool),
            )
            for plan in self.job.plans
        ]

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        pieces = await self.job.collect()
        # A call is read when its answer is complete: up to 1 ms for 1,000 characters.
        size_chars = cost_chars(pieces) + sum(len(piece.text) for piece in pieces)
        return await run_in_thread(partial(self._written, pieces), size_chars=size_chars)

    def _written(self, pieces: Sequence[OutputChunk]) -> dict[str, Any]:
        choices = [self._whole_choice(index, piece) for index, piece in enumerate(pieces)]
        answer = {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}
        # As vLLM has it, these two are there whether they are asked for or not.
        answer["prompt_logprobs"] = answer["prompt_token_ids"] = None
        num_top, entries = self._request.prompt_logprobs, pieces[0].prompt_logprobs
        if num_top is not None and entries is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._services.tokenizer, entries, num_top)
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = list(self.job.plans[0].prompt.token_ids)
        return answer

    def first(self) -> Iterator[dict[str, Any]]:
        """For each choice the role, before what comes."""
        for index in range(len(self.job.runs)):
            delta = {"role": "assistant", "content": ""}
            prompt: dict[str, Any] = {}
            if index == 0 and self._request.return_token_ids:
                prompt = {"prompt_token_ids": list(self.job.plans[0].prompt.token_ids)}
            yield self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, **prompt)
            if self._echoed:
                yield self._chunk(self._choice(index, OutputChunk(), delta={"content": self._echoed}))

    def added(self, index: int, piece: OutputChunk) -> Iterable[dict[str, Any] | bytes]:
        """The chunks of a piece, possibly none."""
        if not self._is_text_alone or piece.logprobs or piece.finish_reason is not None:
            return self.chunks(index, piece)
        deltas = self._speakers[index].deltas(piece.text, is_last=False)
        self._speakers[index].count(piece.text_offsets)
        return [
            self._text_event(index, delta["content"])
            if "content" in delta
            else self._chunk(self._choice(index, piece, delta=delta))
            for delta in deltas
        ]

    def chunks(self, index: int, piece: OutputChunk) -> Iterator[dict[str, Any]]:
        """The same as plain data."""
        for choice in self._chunk_choices(index, piece):
            yield self._chunk(choice)

    def last(self) -> Iterator[dict[str, Any]]:
        """Token counts, if they are asked for."""
        if self._options.include_usage:
            yield {**self._chunk_head, "choices": [], "usage": self._usage()}

    def _text_event(self, index: int, text: str) -> bytes:
        event = self._text_events.get(index)
        if event is None:
            event = self._text_events[index] = TextEvent(
                lambda text: self._chunk(self._choice(index, OutputChunk(), delta={"content": text}))
            )
        return event(text)

    def _chunk(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        so_far = {"usage": self._usage()} if self._options.counts_each_chunk else {}
        return {**self._chunk_head, "choices": [choice], **more, **so_far}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.job.name,
            "system_fingerprint": self.job.fingerprint,
        }

    def _whole_choice(self, index: int, piece: OutputChunk) -> dict[str, Any]:
        speaker = self._speakers[index]
        message = speaker.message(piece.text, self._echoed, is_cut=piece.finish_reason == "length")
        speaker.count(piece.text_offsets)
        return {"token_ids": None, **self._choice(index, piece, message=message)}

    def _chunk_choices(self, index: int, piece: OutputChunk) -> Iterator[dict[str, Any]]:
        """The chunk's choices for new output. Only the last may have a finish_reason and the fields counted in
        tokens."""
        reason = piece.finish_reason
        deltas = self._speakers[index].deltas(piece.text, is_last=reason is not None, is_cut=reason == "length")
        self._speakers[index].count(piece.text_offsets)
        for delta in deltas[:-1]:
            yield self._choice(index, OutputChunk(), delta=delta)
        if deltas or piece.finish_reason or piece.logprobs or self._request.return_token_ids:
            yield self._choice(index, piece, delta=deltas[-1] if deltas else {})

    def _choice(self, index: int, piece: OutputChunk, **said: dict[str, Any]) -> dict[str, Any]:
        wanted = self._request.logprobs and (piece.logprobs or "message" in said)
        choice: dict[str, Any] = {
            "index": index,
            **said,
            "logprobs": self._logprobs(piece) if wanted else None,
            "finish_reason": self._speakers[index].finish_reason(piece.finish_reason),
        }
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _logprobs(self, piece: OutputChunk) -> dict[str, Any]:
        with_chosen = bool(self._request.logprob_token_ids)
        return chat_logprobs(self._services.tokenizer, self._names, piece, with_chosen=with_chosen)

    def _usage(self) -> dict[str, Any]:
        num_prompt = self.job.runs[0].num_prompt_tokens
        num_completion = self.job.num_completion_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": self.job.num_cached_tokens(self._request.n or 1)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(speaker.num_reasoning_tokens for speaker in self._speakers)
            },
        }
