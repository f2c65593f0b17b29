"""A request's messages or prompts to tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adapters.files.paths import DEFAULT_TEMPLATE
from service.api.admission.lengths import refuse_hopeless, wanted_tokens
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
from service.api.run_in_thread import LONG_TEXT_CHARS, run_in_thread
from service.api.schema.requests import ChatRequest, CompletionRequest, TokenizeRequest
from service.api.schema.tools import tools_chars
from service.api.state import Services
from service.engine.ipc.messages import Ready
from service.grammars.json_size import each_value
from service.text.answer_reader import PLAIN, ParserConfig
from service.text.chat_template import RESERVED_VARIABLES, ChatTemplate, chosen_name
from service.text.template_sandbox import TemplateError
from service.text.template_worker import AdapterTemplate, LimitError

# A message costs as much as so many characters of one, however short it is.
_MESSAGE_CHARS = 50
_VALUE_CHARS = 5


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, the text that `echo` gives back, and how its answers are to be read.

    left_out  names of the request's fields that its answers do without
    """

    token_ids: tuple[int, ...]
    text: str
    reading: ParserConfig = PLAIN
    left_out: tuple[str, ...] = ()


async def request_prompts(
    services: Services, ready: Ready, target: ResolvedModel, request: CompletionRequest | ChatRequest
) -> list[Prompt]:
    if isinstance(request, CompletionRequest):
        return await completion_prompts(services, ready, request)
    return [await chat_prompt(services, target, request)]


def truncated(services: Services, ready: Ready, request: CompletionRequest | ChatRequest, prompt: Prompt) -> Prompt:
    """The prompt after `truncate_prompt_tokens`. BadRequest if it keeps more tokens than fit."""
    asked = request.truncate_prompt_tokens
    if asked is None:
        return prompt
    limit = min(ready.max_model_len_tokens, ready.kv_capacity_tokens)
    if asked > limit:
        raise BadRequest(
            f"`truncate_prompt_tokens` is {asked}, but this server holds {limit} tokens for a request; lower it.",
            param="truncate_prompt_tokens",
        )
    most = asked if asked > 0 else max(1, limit - (wanted_tokens(request) or 1))
    if len(prompt.token_ids) <= most:
        return prompt
    token_ids = prompt.token_ids[:most] if request.truncation_side == "right" else prompt.token_ids[-most:]
    text = services.tokenizer.decode(token_ids, skip_special_tokens=False) if request.echo else ""
    return replace(prompt, token_ids=token_ids, text=text)


def _cost_chars(variables: Any) -> int:
    """About the characters of plain data as text, or enough of them for `run_in_thread` to leave the loop."""
    num_chars = 0
    for one in each_value(variables):
        num_chars += len(one) if isinstance(one, str) else _VALUE_CHARS
        if num_chars >= LONG_TEXT_CHARS:
            break
    return num_chars


def special_tokens_of(services: Services, target: ResolvedModel) -> dict[str, str]:
    """The special tokens that a model's chat templates see: the base's, or what an adapter has in their place."""
    tokens = {**services.tokenizer.special_tokens, **target.changed_tokens}
    return {name: text for name, text in tokens.items() if text is not None}


def templates_of(services: Services, target: ResolvedModel) -> dict[str, ChatTemplate | AdapterTemplate]:
    """The chat templates of a model by name: those that an adapter ships, and of the base all if it ships none, or else
    the usual one where it has none of its own. Reads files."""
    tokens, own = special_tokens_of(services, target), dict[str, ChatTemplate | AdapterTemplate]()
    if target.digest is not None and target.has_template:
        own |= services.adapter_templates(target.digest, tokens)
    of_base = {name: one for name, one in services.templates.items() if not own or name == DEFAULT_TEMPLATE}
    if target.changed_tokens:
        of_base = {name: one.with_special_tokens(tokens) for name, one in of_base.items()}
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


async def chat_prompt(services: Services, target: ResolvedModel, request: ChatRequest | TokenizeRequest) -> Prompt:
    """The request's messages, which it must have, through the chat template to tokens."""
    messages, given = request.messages, request.chat_template_kwargs
    assert messages is not None, "a request without messages has no chat"
    taken = RESERVED_VARIABLES & set(given or ())
    if taken:
        raise BadRequest(f"chat_template_kwargs may not hold {', '.join(sorted(taken))}.", param="chat_template_kwargs")
    final = bool(request.continue_final_message)
    generate = not final if request.add_generation_prompt is None else request.add_generation_prompt

    tools = shown_tools(request)

    def render() -> tuple[str, ParserConfig, tuple[str, ...]]:
        check_inner_counts([text for message in messages for text in message.json_texts])
        plain = [message.for_template() for message in messages]
        template = _required_template(services, target, request.chat_template_name, has_tools=bool(tools))
        writes_tools = writes_tools_of(services, template, tools, plain)
        text, seen = _first_rendered(
            template,
            thinking_variables(services, request, template.source),
            plain,
            add_generation_prompt=generate,
            continue_final_message=final,
            tools=[tool.for_template() for tool in tools] or None,
            given=given or {},
            writes_tools=writes_tools,
        )
        names = left_out(request)
        if is_effort_idle(services, request, template.source, seen):
            names.append("reasoning_effort")
        if lost := next((message for message in messages if message.is_lost_in(text)), None):
            raise BadRequest(
                f"The chat template does not show messages of the role {quoted(lost.role)!r}; send one that it knows.",
                param="messages",
            )
        if isinstance(request, TokenizeRequest):
            return text, PLAIN, ()
        reading = reading_of(services, request, template.source, text, writes_tools=writes_tools)
        return text, reading, tuple(names)

    def encode(text: str, reading: ParserConfig, names: tuple[str, ...]) -> Prompt:
        refuse_hopeless(services, request, text, "messages")
        prompt = encoded(services, text, special=bool(request.add_special_tokens))
        return replace(prompt, reading=reading, left_out=names)

    if target.has_template:
        async with services.template_turn(target.turn):
            rendered = await asyncio.wrap_future(services.template_workers.submit(render))
        return await run_in_thread(lambda: encode(*rendered), size_chars=len(rendered[0]))
    size_chars = sum(_MESSAGE_CHARS + message.num_chars for message in messages) + tools_chars(tools)
    return await run_in_thread(lambda: encode(*render()), size_chars=size_chars + _cost_chars(given))


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


async def completion_prompts(services: Services, ready: Ready, request: CompletionRequest) -> list[Prompt]:
    """The four forms of `prompt` to tokens."""
    texts = raw_prompts(request)
    special = request.add_special_tokens is None or request.add_special_tokens

    for text in texts:
        if isinstance(text, str):
            refuse_hopeless(services, request, text, "prompt")

    def work() -> list[Prompt]:
        return [_completion_prompt(services, ready, text, special=special, echo=bool(request.echo)) for text in texts]

    return await run_in_thread(work, size_chars=sum(len(text) for text in texts))


def raw_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The four forms of `prompt` as one."""
    raw = request.prompt
    if isinstance(raw, str):
        return [raw]
    if not raw:
        raise BadRequest("`prompt` is an empty list; send at least one token or text.", param="prompt")
    return [raw] if isinstance(raw[0], int) else list(raw)


def encoded(services: Services, text: str, *, special: bool) -> Prompt:
    """Text to tokens, with the special tokens of the tokenizer's post-processor if `special`."""
    return Prompt(tuple(services.tokenizer.encode(text, add_special_tokens=special)), text)


def _completion_prompt(services: Services, ready: Ready, raw: str | list[int], *, special: bool, echo: bool) -> Prompt:
    tokenizer = services.tokenizer
    if isinstance(raw, str):
        return encoded(services, raw, special=special)
    # The text is needed for `echo` only; a prompt that cannot be served is refused once the limits are checked.
    if not echo or len(raw) > ready.max_model_len_tokens or max(raw, default=0) >= ready.vocab_size:
        return Prompt(tuple(raw), "")
    return Prompt(tuple(raw), tokenizer.decode(raw, skip_special_tokens=False))
