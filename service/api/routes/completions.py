"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.admission.pipeline import Admitted
from service.api.admission.plans import PlannedSequence
from service.api.generation.logprobs import (
    completion_logprobs,
    echoed_logprobs,
    first_alternatives,
    join_columns,
    prompt_logprobs,
)
from service.api.generation.sequence import OutputChunk
from service.api.http.json_body import JsonRoute
from service.api.openapi import GENERATION_ERRORS, streamed
from service.api.routes.answer import Answer, admitted, respond
from service.api.schema.generation_answers import CompletionResponse
from service.api.schema.requests import CompletionRequest
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
    return await respond(request, CompletionAnswer(services_of(request), body, await admitted(request, body)))


class CompletionAnswer(Answer[CompletionRequest]):
    """A running completion."""

    def __init__(self, services: Services, request: CompletionRequest, admitted: Admitted) -> None:
        super().__init__(services, request, admitted, prefix="cmpl", kind="text_completion")
        self._begun: set[int] = set()  # choices that have had a chunk

    def first(self) -> Iterator[dict[str, Any]]:
        """The stream begins with what comes."""
        yield from ()

    def added(self, index: int, piece: OutputChunk) -> Sequence[dict[str, Any] | bytes]:
        """The chunk of a piece, if it is worth one. A choice's first chunk has the prompt if `echo` is asked."""
        first = index not in self._begun
        if first:
            if piece.finish_reason is None and self._waits_for_prompt(piece):
                return ()
            self._begun.add(index)
        elif self._is_text_alone and not (piece.finish_reason or piece.prompt_logprobs or piece.versions):
            return (self._text_event(index, piece.text),) if piece.text else ()
        choice = self._choice(index, piece, first=first)
        return (self._chunk(choice),) if _is_worth_sending(choice) else ()

    def _whole_choice(self, index: int, piece: OutputChunk) -> dict[str, Any]:
        # As vLLM has it, these are there whether they are asked for or not.
        unasked = {"prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None}
        return {**unasked, **self._choice(index, piece, first=True)}

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, OutputChunk(text), first=False)

    def _waits_for_prompt(self, piece: OutputChunk) -> bool:
        """The prompt's log probabilities come with the engine's first message that has tokens or an end."""
        wanted = self._request.echo and self._request.logprobs is not None
        return bool(wanted) and piece.prompt_logprobs is None and not piece.token_ids

    def _choice(self, index: int, piece: OutputChunk, *, first: bool) -> dict[str, Any]:
        plan, num_top = self.job.plans[index], self._request.prompt_logprobs
        choice: dict[str, Any] = {
            "index": index,
            "text": (plan.prompt.text if self._request.echo and first else "") + piece.text,
            "logprobs": self._logprobs(plan, piece, first=first),
            "finish_reason": piece.finish_reason,
            **self._ended(piece),
        }
        if num_top is not None and piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._services.tokenizer, piece.prompt_logprobs, num_top)
        if self._request.return_token_ids and first:
            choice["prompt_token_ids"] = list(plan.prompt.token_ids)
        return choice

    def _logprobs(self, plan: PlannedSequence, piece: OutputChunk, *, first: bool) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        echo = bool(self._request.echo)
        columns = completion_logprobs(self._names, piece, len(plan.prompt.text) if echo else 0)
        if not (echo and first) or piece.prompt_logprobs is None:
            return columns
        is_text = isinstance(self._request.prompt, str) or (
            isinstance(self._request.prompt, list) and isinstance(self._request.prompt[0], str)
        )
        entries = first_alternatives(piece.prompt_logprobs, self._request.logprobs)
        before = echoed_logprobs(
            self._services.tokenizer, self._names, plan.prompt, entries, skip_special_tokens=is_text
        )
        return join_columns(before, columns)


def _is_worth_sending(choice: dict[str, Any]) -> bool:
    """A chunk without text, tokens' probabilities, ids or an end tells nothing: its text is still being withheld."""
    logprobs, others = choice["logprobs"], choice.get("token_ids") or choice.get("adapter_versions")
    return bool(choice["text"] or choice["finish_reason"] or others or (logprobs and logprobs["tokens"]))
