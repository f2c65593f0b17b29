"""The prompts of a request, tokenised and checked to fit the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.api.admission.rendering import RenderedPrompt
from service.api.errors import BadRequest
from service.api.schema.error_messages import out_of_vocabulary
from service.api.schema.requests import (
    ChatRequest,
    CompletionRequest,
    PooledRequest,
    PromptRequest,
    TokenizeRequest,
)
from service.api.state import Services
from service.engine.ipc.messages import Ready
from service.fairness.thread_pool import run_in_thread
from service.text.answer_reader import PLAIN, ParserConfig

DEFAULT_COMPLETION_TOKENS = 16
# Characters of a text that may exceed the context, far beyond most contexts: clients count tokens of such texts too.
# Tokenising takes 200 bytes for each.
MAX_TEXT_CHARS = 1 << 20
# And of one that should fit, for each token of the context: a vocabulary may have single tokens of hundreds of spaces,
# but no prompt is made of them alone.
_CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and the text that `echo` gives back; `keep_at` as in `Submit`, the others as in
    `RenderedPrompt`."""

    token_ids: tuple[int, ...]
    text: str
    reading: ParserConfig = PLAIN
    left_out: tuple[str, ...] = ()
    keep_at: tuple[int, ...] = ()


async def tokenized(
    services: Services,
    request: PromptRequest | TokenizeRequest,
    prompts: Sequence[RenderedPrompt],
    ready: Ready | None = None,
) -> list[Prompt]:
    """The prompts' tokens, of which this engine can run all. BadRequest names the field of one that cannot fit.

    ready  None: nothing is to be run, and tokens beyond the context are right too
    """
    for one in prompts:
        if isinstance(one.text, str):
            refuse_hopeless(services, request, one.text, one.field)

    def work() -> list[Prompt]:
        return [_tokenized(services, request, one, ready) for one in prompts]

    return await run_in_thread(work, size_chars=sum(len(one.text) for one in prompts))


def _tokenized(
    services: Services, request: PromptRequest | TokenizeRequest, prompt: RenderedPrompt, ready: Ready | None
) -> Prompt:
    text, echo = prompt.text, isinstance(request, CompletionRequest) and bool(request.echo)
    if isinstance(text, str):
        # A chat's template writes the tokenizer's own special tokens.
        special = (
            bool(request.add_special_tokens)
            if hasattr(request, "messages")
            else request.add_special_tokens is not False
        )
        token_ids = encoded(services, text, special=special)
    else:
        token_ids = tuple(text)
    if ready is None or isinstance(request, TokenizeRequest):
        return Prompt(token_ids, text if isinstance(text, str) else "", prompt.reading, prompt.left_out)
    kept = _truncated(ready, request, token_ids)
    check_fits(ready, request, kept, prompt.field)
    if not isinstance(text, str) or len(kept) < len(token_ids):
        text = services.tokenizer.decode(kept, skip_special_tokens=False) if echo else ""
        return Prompt(kept, text, prompt.reading, prompt.left_out)
    keep_at = tuple(services.tokenizer.num_tokens_before(text, at, len(kept)) for at in prompt.shared)
    return Prompt(kept, text, prompt.reading, prompt.left_out, keep_at)


def encoded(services: Services, text: str, *, special: bool) -> tuple[int, ...]:
    """Text to tokens, with the special tokens of the tokenizer's post-processor if `special`."""
    return tuple(services.tokenizer.encode(text, add_special_tokens=special))


def context_limit(ready: Ready) -> int:
    """Tokens of a prompt and its answer that the engine can hold."""
    return min(ready.max_model_len_tokens, ready.kv_capacity_tokens)


def refuse_hopeless(services: Services, request: PromptRequest | TokenizeRequest, text: str, field: str) -> None:
    """BadRequest for a text that is too long however its tokens fall, before they are looked for."""
    ready, most_chars = services.engine.ready, services.tokenizer.max_chars_per_token
    has = f"{_subject(field)} has {len(text)} characters"
    if not isinstance(request, TokenizeRequest) and request.truncate_prompt_tokens is not None:
        if len(text) > MAX_TEXT_CHARS:
            raise BadRequest(f"{has}; to be truncated it may have {MAX_TEXT_CHARS}: shorten it.", param=field)
        return
    longest = MAX_TEXT_CHARS
    if ready is not None:
        limit = context_limit(ready)
        if most_chars is not None and len(text) > limit * most_chars:
            raise BadRequest(
                f"{has}, which cannot be within the {limit} tokens that this server holds for a request; shorten it.",
                param=field,
            )
        longest = max(MAX_TEXT_CHARS, limit * _CHARS_PER_TOKEN)
    if len(text) > longest:
        raise BadRequest(f"{has}, of which this server takes {longest}; shorten it.", param=field)


def _subject(field: str) -> str:
    """The prompt in a sentence; of several inputs the one that is wrong."""
    return "The prompt" if field in ("prompt", "messages") else f"`{field}`"


def _truncated(ready: Ready, request: PromptRequest, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The prompt after `truncate_prompt_tokens`. BadRequest if that is more tokens than fit."""
    asked, limit = request.truncate_prompt_tokens, context_limit(ready)
    if asked is None:
        return token_ids
    check_truncation(asked, limit)
    wanted = wanted_tokens(request)
    most = asked if asked > 0 else max(1, limit - (1 if wanted is None else wanted))
    return token_ids[:most] if request.truncation_side == "right" else token_ids[-most:]


def check_truncation(asked: int, limit: int) -> None:
    """BadRequest for a `truncate_prompt_tokens` of more tokens than fit."""
    if asked > limit:
        raise BadRequest(
            f"`truncate_prompt_tokens` is {asked}, but this server holds {limit} tokens for a request; send less, or "
            "-1.",
            param="truncate_prompt_tokens",
        )


def check_fits(
    ready: Ready, request: PromptRequest, token_ids: Sequence[int], field: str, limit: int | None = None
) -> None:
    """BadRequest for a prompt without tokens, with unknown ones, or too long to have its answer beside it.

    limit  of its tokens; default: the engine's
    """
    num_prompt, limit, subject = len(token_ids), limit or context_limit(ready), _subject(field)
    if num_prompt == 0:
        raise BadRequest(f"{subject} has no tokens; send at least one.", param=field)
    wanted = num_answer_tokens(ready, request, num_prompt)
    if num_prompt > limit and isinstance(request, PooledRequest):
        raise BadRequest(
            f"{subject} has {num_prompt} tokens, but this server holds {limit} for a request; shorten it, or send "
            "`truncate_prompt_tokens`.",
            param=field,
        )
    if num_prompt + wanted > limit:
        what = "context length" if limit == ready.max_model_len_tokens else "KV cache (--kv-bytes)"
        raise BadRequest(
            f"The {what} holds {limit} tokens, but the prompt has {num_prompt} and up to {wanted} are to be generated; "
            "shorten the prompt or lower the number of tokens.",
            param=field if num_prompt >= limit else _limit_field(request),
        )
    # After the length: this walks through all of them.
    if max(token_ids) >= ready.vocab_size:
        too_high = next(token_id for token_id in token_ids if token_id >= ready.vocab_size)
        raise out_of_vocabulary(field, too_high, ready.vocab_size)


def num_answer_tokens(ready: Ready, request: PromptRequest, num_prompt_tokens: int) -> int:
    """The request's token limit, or the rest of the context."""
    wanted = wanted_tokens(request)
    return max(1, context_limit(ready) - num_prompt_tokens) if wanted is None else wanted


def wanted_tokens(request: PromptRequest) -> int | None:
    """The largest number of tokens of an answer; None for the rest of the context."""
    if isinstance(request, PooledRequest):
        return 0
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if request.max_tokens is None and request.fills_context:
        return None
    wanted = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if wanted == 0 and not request.echo:
        raise BadRequest("`max_tokens` is 0; that is allowed with `echo` only.", param="max_tokens")
    return wanted


def _limit_field(request: PromptRequest) -> str:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "max_tokens"
