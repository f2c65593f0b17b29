"""POST /invocations: the one route that Amazon SageMaker sends to, as vLLM serves it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, RootModel, Tag

from service.api.http.json_body import JsonRoute
from service.api.openapi import GENERATION_ERRORS
from service.api.routes.chat import create_chat_completion
from service.api.routes.completions import create_completion
from service.api.routes.embeddings import create_embeddings
from service.api.schema.answers import EmbeddingList
from service.api.schema.error_messages import BODY_TAG
from service.api.schema.generation_answers import ChatResponse, CompletionResponse
from service.api.schema.pooled import EmbeddingRequest
from service.api.schema.requests import ChatRequest, CompletionRequest

router = APIRouter(tags=["vLLM"], route_class=JsonRoute)


def _tag(body: Any) -> str | None:
    fields = body if isinstance(body, dict) else {}
    names = (name for name in ("messages", "prompt", "input") if fields.get(name) is not None)
    return next((f"{BODY_TAG}{name}" for name in names), None)


class InvocationRequest(
    RootModel[
        Annotated[
            Annotated[ChatRequest, Tag(f"{BODY_TAG}messages")]
            | Annotated[CompletionRequest, Tag(f"{BODY_TAG}prompt")]
            | Annotated[EmbeddingRequest, Tag(f"{BODY_TAG}input")],
            Discriminator(
                _tag,
                custom_error_type="field",
                custom_error_message="{sentence}",
                custom_error_context={
                    "field": "messages",
                    "sentence": "Send `messages` for a chat, `prompt` for a completion or `input` for embeddings.",
                },
            ),
        ]
    ]
):
    """Body of POST /invocations: that of a chat, a completion or embeddings, by the field that it has."""


@router.post(
    "/invocations",
    response_model=ChatResponse | CompletionResponse | EmbeddingList,
    responses=GENERATION_ERRORS,
    summary="Answer a chat, a completion or embeddings",
)
async def invoke(request: Request, body: InvocationRequest) -> Response:
    """The answer of /v1/chat/completions, /v1/completions or /v1/embeddings to the same body."""
    match body.root:
        case ChatRequest() as chat:
            return await create_chat_completion(request, chat)
        case CompletionRequest() as completion:
            return await create_completion(request, completion)
        case EmbeddingRequest() as embedding:
            return await create_embeddings(request, embedding)
