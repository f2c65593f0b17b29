"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from adapters.files.paths import DEFAULT_TEMPLATE
from service.api.access.auth import caller_of
from service.api.adapter_routes.listing import listing
from service.api.admission.model_resolution import resolve, resolve_request
from service.api.admission.prompts import MAX_TEXT_CHARS, Prompt, encoded, tokenized
from service.api.admission.rendering import rendered_chat, templates_of
from service.api.errors import BadRequest
from service.api.http.json_body import JsonRoute
from service.api.http.sse import json_answer, until_disconnect
from service.api.openapi import TEXT_ERRORS, errors
from service.api.schema.answers import DetokenizeResponse, TokenizeResponse, TokenizerInfo
from service.api.schema.error_messages import out_of_vocabulary
from service.api.schema.requests import ChatRequest, DetokenizeRequest, TokenizeRequest
from service.api.state import Services, services_of
from service.fairness.thread_pool import LONG_TEXTS, in_turn, run_in_thread
from service.tenants.tenants import Caller

router = APIRouter(tags=["text"], route_class=JsonRoute)

# Fields of older configs that name paths of the machine that wrote them.
_PATHS = frozenset({"name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"})
# Characters per slot of `Services.calls`, which bounds the memory of all calls together.
CHARS_PER_SLOT = 1 << 16
_TOKENS_PER_SLOT = 1 << 14


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    responses=TEXT_ERRORS,
    summary="Text or messages to token ids",
)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The token ids that a completion or chat request with this prompt or these messages would run."""
    services = services_of(request)
    with ExitStack() as held:
        held.enter_context(services.calls.holding(num_slots(_num_chars(body), CHARS_PER_SLOT)))
        prompt = await until_disconnect(request, prompt_of(services, caller_of(request), body))
        ready = services.engine.ready
        answer = {
            "tokens": list(prompt.token_ids),
            "count": len(prompt.token_ids),
            "max_model_len": None if ready is None else ready.max_model_len_tokens,
            "token_strs": await _token_names(services, prompt) if body.return_token_strs else None,
        }
        return json_answer(answer, held.pop_all().close)


def num_slots(size: int, size_per_slot: int) -> int:
    """One slot for as long a text as this, and for the rest."""
    return 1 + size // size_per_slot


def _num_chars(body: TokenizeRequest) -> int:
    return len(body.prompt or "") + sum(message.num_chars for message in body.messages or ())


async def _token_names(services: Services, prompt: Prompt) -> list[str]:
    """The tokens as the vocabulary spells them: as many look-ups as tokens, so off the loop where the text is long."""
    work = lambda: [services.tokenizer.token_name(token_id) for token_id in prompt.token_ids]  # noqa: E731
    return await run_in_thread(work, size_chars=len(prompt.text))


async def prompt_of(services: Services, caller: Caller, body: TokenizeRequest | ChatRequest) -> Prompt:
    """The prompt that the body makes. Raises as admission does."""
    if isinstance(body, ChatRequest):
        target = resolve_request(services, caller, body)
    else:
        target = resolve(services, caller, body.model)
    try:
        if isinstance(body, ChatRequest) or body.messages is not None:
            return (await tokenized(services, body, [await rendered_chat(services, target, body)]))[0]
        text = body.prompt or ""
        if len(text) > MAX_TEXT_CHARS:
            raise BadRequest(
                f"`prompt` has {len(text)} characters; /tokenize takes {MAX_TEXT_CHARS}. Send it in parts.",
                param="prompt",
            )
        special = body.add_special_tokens is not False
        return await run_in_thread(lambda: Prompt(encoded(services, text, special=special), text), size_chars=len(text))
    finally:
        target.release()


class _TokenizerQuery(BaseModel, extra="forbid"):
    model: str | None = Field(None, description="the base, or an adapter; default: the base")


@router.get(
    "/tokenizer_info",
    response_model=TokenizerInfo,
    responses=errors((400, 401, 404, 429, 500, 503)),
    summary="A model's tokenizer",
)
async def tokenizer_info(request: Request, query: Annotated[_TokenizerQuery, Query()]) -> Response:
    """The model's tokenizer_config.json, with its special tokens as texts and its chat template, which of an adapter is
    its own if it ships one: what clients need who count tokens and render chats by themselves, as lm-eval does."""
    services = services_of(request)
    target = resolve(services, caller_of(request), query.model)

    def info() -> TokenizerInfo:
        sources = {name: template.source for name, template in templates_of(services, target).items()}
        return TokenizerInfo.model_validate(
            {
                **{name: value for name, value in services.tokenizer.config.items() if name not in _PATHS},
                **services.tokenizer.special_tokens,
                **target.changed_tokens,
                "chat_template": sources.pop(DEFAULT_TEMPLATE, None),
                "additional_chat_templates": sources,
            }
        )

    try:
        with services.calls.holding():
            return await listing(info)
    finally:
        target.release()


@router.post("/detokenize", response_model=DetokenizeResponse, responses=TEXT_ERRORS, summary="Token ids to text")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included."""
    services = services_of(request)
    if body.model is not None:
        resolve(services, caller_of(request), body.model).release()
    with ExitStack() as held:
        held.enter_context(services.calls.holding(num_slots(len(body.tokens), _TOKENS_PER_SLOT)))
        text = await in_turn(_text, services, body.tokens, pool=LONG_TEXTS)
        return json_answer({"prompt": text}, held.pop_all().close)


def _text(services: Services, token_ids: list[int]) -> str:
    ready = services.engine.ready
    # A model may answer with ids that its tokenizer has no text for.
    vocab_size = max(services.tokenizer.vocab_size, 0 if ready is None else ready.vocab_size)
    highest = max(token_ids, default=-1)
    if highest >= vocab_size:
        raise out_of_vocabulary("tokens", highest, vocab_size)
    return services.tokenizer.decode(token_ids, skip_special_tokens=False)
