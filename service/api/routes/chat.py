"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.admission.pipeline import Admitted
from service.api.generation.chat_delta import ChatFormatter
from service.api.generation.logprobs import chat_logprobs, prompt_logprobs
from service.api.generation.sequence import OutputChunk
from service.api.http.json_body import JsonRoute
from service.api.openapi import GENERATION_ERRORS, streamed
from service.api.routes.answer import Answer, admitted, respond
from service.api.schema.generation_answers import ChatResponse
from service.api.schema.requests import ChatRequest
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
    return await respond(request, ChatAnswer(services_of(request), body, await admitted(request, body)))


class ChatAnswer(Answer[ChatRequest]):
    """A running chat."""

    def __init__(
        self, services: Services, request: ChatRequest, admitted: Admitted, *, keeps_logprobs: bool = False
    ) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(services, request, admitted, prefix="chatcmpl", kind=kind, keeps_logprobs=keeps_logprobs)
        last = request.messages[-1]
        self._echoed = last.text if request.echo and last.role == "assistant" else ""
        self._speakers = [
            ChatFormatter(
                plan.prompt.reading,
                in_pieces=bool(request.stream),
                includes_thoughts=request.include_reasoning is not False,
                names_tool=isinstance(request.tool_choice, NamedTool),
            )
            for plan in self.job.plans
        ]
        self.job.speakers = self._speakers

    def _written(self, pieces: Sequence[OutputChunk]) -> dict[str, Any]:
        # As vLLM has it, these two are there whether they are asked for or not.
        answer = {**super()._written(pieces), "prompt_logprobs": None, "prompt_token_ids": None}
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
        if not self._is_text_alone or piece.finish_reason is not None or piece.versions:
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

    def _whole_choice(self, index: int, piece: OutputChunk) -> dict[str, Any]:
        speaker = self._speakers[index]
        message = speaker.message(piece.text, self._echoed, is_cut=piece.is_cut)
        speaker.count(piece.text_offsets)
        return {"token_ids": None, **self._choice(index, piece, message=message)}

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, OutputChunk(), delta={"content": text})

    def _chunk_choices(self, index: int, piece: OutputChunk) -> Iterator[dict[str, Any]]:
        """The chunk's choices for new output. Only the last may have a finish_reason and the fields counted in
        tokens."""
        reason = piece.finish_reason
        deltas = self._speakers[index].deltas(piece.text, is_last=reason is not None, is_cut=piece.is_cut)
        self._speakers[index].count(piece.text_offsets)
        for delta in deltas[:-1]:
            yield self._choice(index, OutputChunk(), delta=delta)
        if deltas or piece.finish_reason or piece.logprobs or piece.versions or self._request.return_token_ids:
            yield self._choice(index, piece, delta=deltas[-1] if deltas else {})

    def _choice(self, index: int, piece: OutputChunk, **said: dict[str, Any]) -> dict[str, Any]:
        wanted = self._request.logprobs and (piece.logprobs or "message" in said)
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(piece) if wanted else None,
            "finish_reason": self._speakers[index].finish_reason(piece.finish_reason),
            **self._ended(piece),
        }

    def _logprobs(self, piece: OutputChunk) -> dict[str, Any]:
        with_chosen = bool(self._request.logprob_token_ids)
        return chat_logprobs(self._services.tokenizer, self._names, piece, with_chosen=with_chosen)

    def _usage(self) -> dict[str, Any]:
        num_reasoning = sum(speaker.num_reasoning_tokens for speaker in self._speakers)
        return {**super()._usage(), "completion_tokens_details": {"reasoning_tokens": num_reasoning}}
