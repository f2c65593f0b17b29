"""Whether a prompt and its answer fit: into the context, the KV cache, and what is tokenised at all."""

from __future__ import annotations

from collections.abc import Sequence

from service.api.errors import BadRequest
from service.api.schema.requests import ChatRequest, CompletionRequest, TokenizeRequest
from service.api.state import Services
from service.engine.ipc.messages import Ready

DEFAULT_COMPLETION_TOKENS = 16
# Characters of a text that may exceed the context, far beyond most contexts: clients count tokens of such texts too.
# Tokenising takes 200 bytes for each.
MAX_TEXT_CHARS = 1 << 20
# And of one that should fit, for each token of the context: a vocabulary may have single tokens of hundreds of spaces,
# but no prompt is made of them alone.
_CHARS_PER_TOKEN = 16


def refuse_hopeless(
    services: Services, request: CompletionRequest | ChatRequest | TokenizeRequest, text: str, field: str
) -> None:
    """BadRequest for a text that is too long however its tokens fall, before they are looked for."""
    ready, most_chars = services.engine.ready, services.tokenizer.max_chars_per_token
    if not isinstance(request, TokenizeRequest) and request.truncate_prompt_tokens is not None:
        if len(text) > MAX_TEXT_CHARS:
            raise BadRequest(
                f"The prompt has {len(text)} characters; to be truncated it may have {MAX_TEXT_CHARS}: shorten it.",
                param=field,
            )
        return
    longest = MAX_TEXT_CHARS
    if ready is not None:
        limit = min(ready.max_model_len_tokens, ready.kv_capacity_tokens)
        if most_chars is not None and len(text) > limit * most_chars:
            raise BadRequest(
                f"The prompt has {len(text)} characters, which cannot be within the {limit} tokens that this server "
                "holds for a request; shorten it.",
                param=field,
            )
        longest = max(MAX_TEXT_CHARS, limit * _CHARS_PER_TOKEN)
    if len(text) > longest:
        raise BadRequest(
            f"The prompt has {len(text)} characters, of which this server takes {longest}; shorten it.", param=field
        )


def checked_max_tokens(ready: Ready, request: CompletionRequest | ChatRequest, token_ids: Sequence[int]) -> int:
    """The request's token limit or its default, once prompt and answer are known to fit."""
    num_prompt = len(token_ids)
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    if num_prompt == 0:
        raise BadRequest("The prompt has no tokens; send at least one.", param=field)
    limit = min(ready.max_model_len_tokens, ready.kv_capacity_tokens)
    wanted = wanted_tokens(request)
    if wanted is None:
        wanted = max(1, limit - num_prompt)
    if num_prompt + wanted > limit:
        what = "context length" if limit == ready.max_model_len_tokens else "KV cache (--kv-bytes)"
        raise BadRequest(
            f"The {what} holds {limit} tokens, but the prompt has {num_prompt} and up to {wanted} are to be generated; "
            "shorten the prompt or lower the number of tokens.",
            param=field if num_prompt >= limit else _limit_field(request),
        )
    # After the length: this walks through all of them.
    too_high = next((token_id for token_id in token_ids if token_id >= ready.vocab_size), None)
    if too_high is not None:
        raise BadRequest(
            f"`prompt` holds the token {too_high}, which is out of vocabulary: the last token is "
            f"{ready.vocab_size - 1}.",
            param=field,
        )
    return wanted


def wanted_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    wanted = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if wanted == 0 and not request.echo:
        raise BadRequest("`max_tokens` is 0; that is allowed with `echo` only.", param="max_tokens")
    return wanted


def _limit_field(request: CompletionRequest | ChatRequest) -> str:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "max_tokens"
