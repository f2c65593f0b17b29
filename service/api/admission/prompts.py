"""The prompts of a request: its messages or texts rendered, then tokenised, and checked to fit the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.files.manifest import Manifest
from adapters.files.paths import DEFAULT_TEMPLATE
from service.api.admission.model_resolution import ResolvedModel
from service.api.admission.parsers import (
    is_effort_idle,
    left_out,
    reading_of,
    shown_tools,
    thinking_variables,
    writes_tools_of,
)
from service.api.errors import BadRequest, quoted
from service.api.http.json_body import check_inner_counts
from service.api.schema.pooled import InputRequest, texts_of
from service.api.schema.requests import (
    ChatRequest,
    CompletionRequest,
    PooledRequest,
    PromptRequest,
    TokenizeRequest,
)
from service.api.schema.tools import tools_chars
from service.api.state import Services
from service.engine.ipc.messages import Ready
from service.fairness.thread_pool import LONG_TEXT_CHARS, run_in_thread
from service.grammars.json_schemas import each_value
from service.text.answer_reader import PLAIN, ParserConfig
from service.text.chat_template import RESERVED_VARIABLES, ChatTemplate, chosen_name, shared_beginnings
from service.text.template_sandbox import TemplateError
from service.text.template_worker import AdapterTemplate, LimitError

DEFAULT_COMPLETION_TOKENS = 16
# Characters of a text that may exceed the context, far beyond most contexts: clients count tokens of such texts too.
# Tokenising takes 200 bytes for each.
MAX_TEXT_CHARS = 1 << 20
# And of one that should fit, for each token of the context: a vocabulary may have single tokens of hundreds of spaces,
# but no prompt is made of them alone.
_CHARS_PER_TOKEN = 16
# A message costs as much as so many characters of one, however short it is.
_MESSAGE_CHARS = 50
_VALUE_CHARS = 5


@dataclass(frozen=True)
class RenderedPrompt:
    """One prompt before it is tokenised: a text, or the client's own token ids.

    field     the request's field that it comes from, for errors
    reading   the way to read its answers
    left_out  names of the request's fields that its answers do without
    shared    characters that later prompts are likely to begin with, as `shared_beginnings` has them
    """

    text: str | list[int]
    field: str
    reading: ParserConfig = PLAIN
    left_out: tuple[str, ...] = ()
    shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and the text that `echo` gives back; `keep_at` as in `Submit`, the others as in
    `RenderedPrompt`."""

    token_ids: tuple[int, ...]
    text: str
    reading: ParserConfig = PLAIN
    left_out: tuple[str, ...] = ()
    keep_at: tuple[int, ...] = ()


async def rendered(
    services: Services, target: ResolvedModel, request: PromptRequest | TokenizeRequest
) -> list[RenderedPrompt]:
    """The request's prompts in order; of messages the one that the chat template makes of them."""
    if isinstance(request, ChatRequest | TokenizeRequest):
        return [await rendered_chat(services, target, request)]
    if isinstance(request, CompletionRequest):
        return [RenderedPrompt(text, "prompt") for text in raw_prompts(request)]
    assert isinstance(request, InputRequest), "pairs are made in `pooled`"
    is_one = isinstance(request.input, str) or (bool(request.input) and isinstance(request.input[0], int))
    return [RenderedPrompt(text, "input" if is_one else f"input[{index}]") for index, text in enumerate(request.inputs)]


def raw_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The four forms of `prompt` as one."""
    return texts_of(request.prompt, "prompt")


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
    if asked > limit:
        raise BadRequest(
            f"`truncate_prompt_tokens` is {asked}, but this server holds {limit} tokens for a request; lower it.",
            param="truncate_prompt_tokens",
        )
    wanted = wanted_tokens(request)
    most = asked if asked > 0 else max(1, limit - (1 if wanted is None else wanted))
    return token_ids[:most] if request.truncation_side == "right" else token_ids[-most:]


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
    too_high = next((token_id for token_id in token_ids if token_id >= ready.vocab_size), None)
    if too_high is not None:
        raise BadRequest(
            f"`{field}` holds the token {too_high}, which is out of vocabulary: the last token is "
            f"{ready.vocab_size - 1}.",
            param=field,
        )


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


def _cost_chars(variables: Any) -> int:
    """About the characters of plain data as text, or enough of them for `run_in_thread` to leave the loop."""
    num_chars = 0
    for one in each_value(variables):
        num_chars += len(one) if isinstance(one, str) else _VALUE_CHARS
        if num_chars >= LONG_TEXT_CHARS:
            break
    return num_chars


def templates_of(services: Services, target: ResolvedModel) -> dict[str, ChatTemplate | AdapterTemplate]:
    """The chat templates of a model by name: those that an adapter ships, and of the base all if it ships none, or else
    the usual one where it has none of its own. Reads files. BadRequest for a sum of adapters that have other ones."""
    if not target.parts:
        return dict(services.templates)
    first, *others = (_templates_with(services, part.manifest) for part in target.parts)
    for other, part in zip(others, target.parts[1:], strict=True):
        if _sources(other) != _sources(first) or part.manifest.special_tokens != target.changed_tokens:
            names = " and ".join(repr(one.shown_name) for one in (target.parts[0], part))
            raise BadRequest(
                f"The adapters {names} have different chat templates, and a chat has one; send the prompt to "
                "/v1/completions.",
                param="messages",
            )
    return first


def _sources(templates: Mapping[str, ChatTemplate | AdapterTemplate]) -> dict[str, str]:
    return {name: template.source for name, template in templates.items()}


def _templates_with(services: Services, manifest: Manifest) -> dict[str, ChatTemplate | AdapterTemplate]:
    """Those of an adapter."""
    changed = manifest.special_tokens
    # The special tokens that they see: the base's, or what the adapter has in their place.
    told = {name: text for name, text in {**services.tokenizer.special_tokens, **changed}.items() if text is not None}
    own: dict[str, ChatTemplate | AdapterTemplate] = {}
    if manifest.has_chat_template:
        own |= services.adapter_templates(manifest.digest, told)
    of_base = {name: one for name, one in services.templates.items() if not own or name == DEFAULT_TEMPLATE}
    if changed:
        of_base = {name: one.with_special_tokens(told) for name, one in of_base.items()}
    return {**of_base, **own}


def _required_template(
    services: Services, target: ResolvedModel, asked: str | None, *, has_tools: bool
) -> ChatTemplate | AdapterTemplate:
    """The chat template of a request that asks for one by name, or for none. BadRequest if there is no such one."""
    templates = templates_of(services, target)
    name = chosen_name(templates.keys(), asked, has_tools=has_tools)
    if name is not None:
        return templates[name]
    if not templates:
        raise BadRequest("This model has no chat template; send the prompt to /v1/completions instead of messages.")
    names = ", ".join(map(repr, sorted(templates)))
    which = "no default chat template" if asked is None else f"no chat template {quoted(asked)!r}"
    raise BadRequest(
        f"This model has {which}; let `chat_template_name` be one of {names}.",
        param="chat_template_name",
    )


async def rendered_chat(
    services: Services, target: ResolvedModel, request: ChatRequest | TokenizeRequest
) -> RenderedPrompt:
    messages, given = request.messages, request.chat_template_kwargs or {}
    assert messages is not None, "a request without messages has no chat"
    if taken := RESERVED_VARIABLES & given.keys():
        raise BadRequest(f"chat_template_kwargs may not hold {', '.join(sorted(taken))}.", param="chat_template_kwargs")
    final = bool(request.continue_final_message)
    generate = not final if request.add_generation_prompt is None else request.add_generation_prompt
    tools = shown_tools(request)

    def render() -> RenderedPrompt:
        check_inner_counts([text for message in messages for text in message.json_texts])
        plain = [message.for_template() for message in messages]
        template = _required_template(services, target, request.chat_template_name, has_tools=bool(tools))
        writes_tools = writes_tools_of(services, template, tools, plain)
        options: dict[str, Any] = {
            "add_generation_prompt": generate,
            "tools": [tool.for_template() for tool in tools] or None,
            "writes_tools": writes_tools,
        }
        choices = thinking_variables(services, request, template.source)
        text, seen = _first_rendered(template, choices, plain, given=given, continue_final_message=final, **options)
        if lost := next((message for message in messages if message.is_lost_in(text)), None):
            raise BadRequest(
                f"The chat template does not show messages of the role {quoted(lost.role)!r}; send one that it knows.",
                param="messages",
            )
        if isinstance(request, TokenizeRequest):
            return RenderedPrompt(text, "messages")
        names = left_out(request)
        if is_effort_idle(services, request, template.source, seen):
            names.append("reasoning_effort")
        reading = reading_of(services, request, template.source, text, writes_tools=writes_tools)
        ready, shared = services.engine.ready, tuple[int, ...]()
        if ready is not None and ready.keeps_states:
            shared = shared_beginnings(template.render, text, plain, variables={**seen, **given}, **options)
        return RenderedPrompt(text, "messages", reading, tuple(names), shared)

    if target.has_template:
        async with services.template_turn(target.turn):
            return await asyncio.wrap_future(services.template_workers.submit(render))
    size_chars = sum(_MESSAGE_CHARS + message.num_chars for message in messages) + tools_chars(tools)
    return await run_in_thread(render, size_chars=size_chars + _cost_chars(given))


def _first_rendered(
    template: ChatTemplate | AdapterTemplate,
    choices: Sequence[dict[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    *,
    given: Mapping[str, Any],
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    """(text, variables) of the first of `choices` with which the template renders; the first error if it does with
    none. `given`: the request's own variables, which go first."""
    refusal: TemplateError | None = None
    for variables in choices:
        try:
            return template.render(messages, variables={**variables, **given}, **options), variables
        except LimitError:
            raise
        except TemplateError as error:
            refusal = refusal or error
    assert refusal is not None, "there is one choice at least"
    raise refusal
