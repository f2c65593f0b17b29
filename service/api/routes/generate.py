"""POST /inference/v1/generate: a completion from token ids to token ids, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.admission.pipeline import Admitted
from service.api.errors import ApiError
from service.api.generation.logprobs import chat_logprobs, prompt_logprobs
from service.api.generation.sequence import OutputChunk
from service.api.http.json_body import JsonRoute
from service.api.openapi import GENERATION_ERRORS, streamed
from service.api.routes.answer import Answer, admitted, respond
from service.api.schema.generate import GenerateRequest, GenerateResponse
from service.api.schema.requests import CompletionRequest
from service.api.schema.responses import renamed
from service.api.state import Services, services_of

router = APIRouter(tags=["vLLM"], route_class=JsonRoute)
# Fields of a completion, and what they are called here.
_NAMES = {"prompt": "token_ids"}


@router.post(
    "/inference/v1/generate",
    response_model=GenerateResponse,
    responses={**GENERATION_ERRORS, **streamed("GenerateResponse")},
    summary="Generate tokens from tokens",
)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Complete token ids with the base or an adapter; the answer is in token ids alone."""
    asked = body.as_completion()
    try:
        held = await admitted(request, asked)
    except ApiError as error:
        raise renamed(error, _NAMES) from None
    return await respond(request, GenerateAnswer(services_of(request), asked, held, body.request_id))


class GenerateAnswer(Answer[CompletionRequest]):
    """A running request."""

    def __init__(self, services: Services, request: CompletionRequest, admitted: Admitted, request_id: str) -> None:
        super().__init__(services, request, admitted, prefix="generate", kind="generate")
        self._head["request_id"] = request_id or self._head["id"]

    def first(self) -> Iterator[dict[str, Any]]:
        """The stream begins with what comes."""
        yield from ()

    def added(self, index: int, piece: OutputChunk) -> Sequence[dict[str, Any]]:
        """The chunk of a piece that has tokens or an end."""
        if not piece.token_ids and piece.finish_reason is None:
            return ()
        return (self._chunk(self._choice(index, piece)),)

    def _written(self, pieces: Sequence[OutputChunk]) -> dict[str, Any]:
        entries, num_top = pieces[0].prompt_logprobs, self._request.prompt_logprobs
        of_prompt = None
        if num_top is not None and entries is not None:
            of_prompt = prompt_logprobs(self._services.tokenizer, entries, num_top)
        return {**super()._written(pieces), "prompt_logprobs": of_prompt}

    def _whole_choice(self, index: int, piece: OutputChunk) -> dict[str, Any]:
        return self._choice(index, piece)

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        raise AssertionError(f"text alone for choice {index} of an answer in tokens: {text!r}")

    def _choice(self, index: int, piece: OutputChunk) -> dict[str, Any]:
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = chat_logprobs(self._services.tokenizer, self._names, piece, with_chosen=True)
        return {"index": index, "logprobs": logprobs, "finish_reason": piece.finish_reason, **self._ended(piece)}
