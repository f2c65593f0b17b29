"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.access.auth import caller_of
from service.api.admission.admission import Admitted, admit
from service.api.admission.sequences import PlannedSequence
from service.api.entry.request_log import note_job
from service.api.generation.job import GenerationJob
from service.api.generation.logprobs import (
    completion_logprobs,
    cost_chars,
    echoed_logprobs,
    first_alternatives,
    join_columns,
    prompt_logprobs,
    token_names,
)
from service.api.generation.output_chunk import OutputChunk
from service.api.generation.stream import EventStream
from service.api.http.chunked_answers import json_answer
from service.api.http.json_body import JsonRoute
from service.api.http.sse import TextEvent, until_disconnect
from service.api.openapi import GENERATION_ERRORS, streamed
from service.api.run_in_thread import run_in_thread
from service.api.schema.generation_answers import CompletionResponse
from service.api.schema.requests import CompletionRequest, StreamOptions
from service.api.state import Services, services_of

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses={**GENERATION_ERRORS, **streamed("CompletionResponse")},
    summary="Complete a text",
)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Complete one prompt or several, with the base or an adapter."""
    services = services_of(request)
    answer = CompletionAnswer(
        services, body, await until_disconnect(request, admit(services, caller_of(request), body))
    )
    note_job(request, answer.job)
    if body.stream:
        return EventStream(answer.job, answer)
    try:
        return json_answer(await until_disconnect(request, answer.whole()), answer.job.hand_over())
    finally:
        answer.job.close()


class CompletionAnswer:
    """A running completion request and how its answer is written. Close `job` in the end."""

    def __init__(self, services: Services, request: CompletionRequest, admitted: Admitted) -> None:
        self._services = services
        self._request = request
        self._options = request.stream_options or StreamOptions()
        # For each choice that has begun, the chunk of a piece that brings nothing but text.
        self._texts: dict[int, TextEvent] = {}
        self._is_text_alone = request.logprobs is None and not (
            request.return_token_ids or self._options.counts_each_chunk
        )
        self.job = GenerationJob(services, admitted, bool(request.stream))
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.job.name,
            "system_fingerprint": self.job.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        pieces = await self.job.collect()
        return await run_in_thread(partial(self._written, pieces), size_chars=cost_chars(pieces))

    def _written(self, pieces: Sequence[OutputChunk]) -> dict[str, Any]:
        # As vLLM has it, these are there whether they are asked for or not.
        unasked = {"prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None}
        choices = [
            {**unasked, **self._choice(index, plan, piece, first=True)}
            for index, (plan, piece) in enumerate(zip(self.job.plans, pieces, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def first(self) -> Iterator[dict[str, Any]]:
        """The stream begins with what comes."""
        yield from ()

    def added(self, index: int, piece: OutputChunk) -> Sequence[dict[str, Any] | bytes]:
        """The chunk of a piece, if it is worth one. A choice's first chunk has the prompt if `echo` is asked."""
        text_event = self._texts.get(index)
        if text_event is None:
            if piece.finish_reason is None and self._waits_for_prompt(piece):
                return ()
            self._texts[index] = TextEvent(lambda text: self._chunk(index, OutputChunk(text), first=False))
        elif self._is_text_alone and piece.finish_reason is None and piece.prompt_logprobs is None:
            return (text_event(piece.text),) if piece.text else ()
        chunk = self._chunk(index, piece, first=text_event is None)
        return (chunk,) if _is_worth_sending(chunk["choices"][0]) else ()

    def last(self) -> Iterator[dict[str, Any]]:
        """Token counts, if they are asked for."""
        if self._options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _chunk(self, index: int, piece: OutputChunk, *, first: bool) -> dict[str, Any]:
        choice = self._choice(index, self.job.plans[index], piece, first=first)
        so_far = {"usage": self._usage()} if self._options.counts_each_chunk else {}
        return {**self._head, "choices": [choice]} | so_far

    def _waits_for_prompt(self, piece: OutputChunk) -> bool:
        """The prompt's log probabilities come with the engine's first message that has tokens or an end."""
        wanted = self._request.echo and self._request.logprobs is not None
        return bool(wanted) and piece.prompt_logprobs is None and not piece.token_ids

    def _choice(self, index: int, plan: PlannedSequence, piece: OutputChunk, *, first: bool) -> dict[str, Any]:
        echo = bool(self._request.echo)
        choice: dict[str, Any] = {
            "index": index,
            "text": (plan.prompt.text if echo and first else "") + piece.text,
            "logprobs": self._logprobs(plan, piece, first=first),
            "finish_reason": piece.finish_reason,
        }
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        num_top = self._request.prompt_logprobs
        if num_top is not None and piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._services.tokenizer, piece.prompt_logprobs, num_top)
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if first:
                choice["prompt_token_ids"] = list(plan.prompt.token_ids)
        return choice

    def _logprobs(self, plan: PlannedSequence, piece: OutputChunk, *, first: bool) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        tokenizer = self._services.tokenizer
        names = token_names(tokenizer, self._request)
        echo = bool(self._request.echo)
        columns = completion_logprobs(names, piece, len(plan.prompt.text) if echo else 0)
        if not (echo and first) or piece.prompt_logprobs is None:
            return columns
        is_text = isinstance(self._request.prompt, str) or (
            isinstance(self._request.prompt, list) and isinstance(self._request.prompt[0], str)
        )
        entries = first_alternatives(piece.prompt_logprobs, self._request.logprobs)
        before = echoed_logprobs(tokenizer, names, plan.prompt, entries, skip_special_tokens=is_text)
        return join_columns(before, columns)

    def _usage(self) -> dict[str, Any]:
        num_choices = self._request.n or 1
        num_prompt = sum(run.num_prompt_tokens for run in self.job.runs[::num_choices])
        num_completion = self.job.num_completion_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": self.job.num_cached_tokens(num_choices)},
        }


def _is_worth_sending(choice: dict[str, Any]) -> bool:
    """A chunk without text, tokens' probabilities, ids or an end tells nothing: its text is still being withheld."""
    logprobs = choice["logprobs"]
    return bool(
        choice["text"] or choice["finish_reason"] or choice.get("token_ids") or (logprobs and logprobs["tokens"])
    )
