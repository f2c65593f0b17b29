"""The base of answers in OpenAI's shapes, and how a route sends one: as events or in one piece."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

import msgspec
from fastapi import Request
from fastapi.responses import Response

from service.api.access.auth import caller_of
from service.api.admission.pipeline import Admitted, admit
from service.api.entry.request_log import note_job
from service.api.generation.job import GenerationJob
from service.api.generation.logprobs import cost_chars, token_names
from service.api.generation.sequence import OutputChunk
from service.api.generation.stream import Chunks, EventStream
from service.api.http.sse import TextEvent, json_answer, until_disconnect
from service.api.schema.requests import ChatRequest, CompletionRequest, PromptRequest, StreamOptions
from service.api.state import Services, services_of
from service.fairness.thread_pool import run_in_thread

AnyRequest = TypeVar("AnyRequest", bound=CompletionRequest | ChatRequest)


class Running(Chunks, Protocol):
    """A running request, whose answer is written whole or as the chunks of a stream."""

    @property
    def job(self) -> GenerationJob: ...

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""


async def admitted(request: Request, body: PromptRequest) -> Admitted:
    """The request, admitted unless its client goes. Raises as `admit` does."""
    return await until_disconnect(request, admit(services_of(request), caller_of(request), body))


async def respond(
    request: Request, answer: Running, *, names: Mapping[str, str] = MappingProxyType({}), **stream: Any
) -> Response:
    """Send the answer, and close its job.

    names   see `note_job`
    stream  options of `EventStream`, for a request that streams
    """
    note_job(request, answer.job, names)
    if answer.job.is_streamed:
        return EventStream(answer.job, answer, **stream)
    try:
        return json_answer(await until_disconnect(request, answer.whole()), answer.job.hand_over())
    finally:
        answer.job.close()


class Answer(ABC, Generic[AnyRequest]):
    """A running request and its answer in one of OpenAI's two shapes, whose choices a subclass writes. Close `job` in
    the end.

    prefix, kind    of `id`, and `object`
    keeps_logprobs  see `GenerationJob`
    """

    def __init__(
        self,
        services: Services,
        request: AnyRequest,
        admitted: Admitted,
        *,
        prefix: str,
        kind: str,
        keeps_logprobs: bool = False,
    ) -> None:
        self._services, self._request = services, request
        self._options = request.stream_options or StreamOptions()
        self._names = token_names(services.tokenizer, request)
        # Whether a piece of text without logprobs needs nothing of its chunk but the text.
        has_logprobs = not (request.logprobs is None or request.logprobs is False)
        self._is_text_alone = not (has_logprobs or request.return_token_ids or self._options.counts_each_chunk)
        self._text_events: dict[int, TextEvent] = {}
        self.job = GenerationJob(services, admitted, bool(request.stream), keeps_logprobs=keeps_logprobs)
        self.job.answer_id = f"{prefix}-{uuid4().hex}"
        self._head = {
            "id": self.job.answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.job.name,
            "system_fingerprint": self.job.fingerprint,
        }

    @abstractmethod
    def first(self) -> Iterable[dict[str, Any]]:
        """The chunks before any output."""

    @abstractmethod
    def added(self, index: int, piece: OutputChunk) -> Iterable[dict[str, Any] | bytes]:
        """The chunks of new output of the choice `index`, possibly none."""

    def last(self) -> Iterator[dict[str, Any]]:
        """Token counts, if they are asked for."""
        if self._options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        pieces = await self.job.collect()
        # A call is read when its answer is complete: up to 1 ms for 1,000 characters.
        size_chars = cost_chars(pieces) + sum(len(piece.text) for piece in pieces)
        return await run_in_thread(partial(self._written, pieces), size_chars=size_chars)

    def _written(self, pieces: Sequence[OutputChunk]) -> dict[str, Any]:
        choices = [self._whole_choice(index, piece) for index, piece in enumerate(pieces)]
        fingerprint = self.job.fingerprint  # of the last version, where there are several
        return {**self._head, "system_fingerprint": fingerprint, "choices": choices, "usage": self._usage()}

    @abstractmethod
    def _whole_choice(self, index: int, piece: OutputChunk) -> dict[str, Any]: ...

    @abstractmethod
    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        """The chunk's choice for text alone."""

    def _text_event(self, index: int, text: str) -> bytes:
        event = self._text_events.get(index)
        if event is None:
            event = self._text_events[index] = TextEvent(lambda text: self._chunk(self._text_choice(index, text)))
        return event(text)

    def _chunk(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        so_far = {"usage": self._usage()} if self._options.counts_each_chunk else {}
        return {**self._head, "choices": [choice], **more, **so_far}

    def _ended(self, piece: OutputChunk) -> dict[str, Any]:
        """The fields of a choice that both shapes have, if there are any."""
        reason: dict[str, Any] = {} if piece.finish_reason is None else {"stop_reason": piece.stop_reason}
        if piece.versions:
            reason["adapter_versions"] = msgspec.to_builtins(piece.versions)
        return reason | ({"token_ids": piece.token_ids} if self._request.return_token_ids else {})

    def _usage(self) -> dict[str, Any]:
        num_choices = self._request.n or 1
        num_prompt = sum(run.num_prompt_tokens for run in self.job.runs[::num_choices])
        num_completion = self.job.num_completion_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": self.job.num_cached_tokens},
        }
