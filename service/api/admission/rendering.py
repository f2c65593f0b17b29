"""A request's prompts as texts: a chat's messages through its template, and how its answer is to be read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.files.manifest import Manifest
from adapters.files.paths import DEFAULT_TEMPLATE
from service.api.admission.model_resolution import ResolvedModel
from service.api.errors import BadRequest, quoted
from service.api.http.json_body import check_inner_counts
from service.api.schema.pooled import texts_of
from service.api.schema.requests import ChatRequest, CompletionRequest, TokenizeRequest
from service.api.schema.tools import (
    NamedTool,
    OtherTool,
    Tool,
    callable_tools,
    functions_of,
    may_skip_calls,
    tools_chars,
)
from service.api.state import Services
from service.fairness.thread_pool import LONG_TEXT_CHARS, run_in_thread
from service.grammars.json_schemas import each_value
from service.text.answer_reader import END_OF_THOUGHT, PLAIN, THINK, ParserConfig
from service.text.calls.formats import FORMATS, GENERIC, CallFormat, format_of_template
from service.text.chat_template import RESERVED_VARIABLES, ChatTemplate, chosen_name, shared_beginnings
from service.text.generic_tools import has_calls
from service.text.template_sandbox import TemplateError
from service.text.template_worker import AdapterTemplate, LimitError

# A message costs as much as so many characters of one, however short it is.
_MESSAGE_CHARS = 50
_VALUE_CHARS = 5
# From the least to the most, as OpenAI's models have them.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
# DeepSeek's and Granite's switch.
_THINKING_VARIABLE = re.compile(r"\bif (not )?thinking\b|\bthinking is (not )?defined\b|\bset thinking\b")


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


async def rendered(
    services: Services, target: ResolvedModel, request: CompletionRequest | ChatRequest
) -> list[RenderedPrompt]:
    """The request's prompts in order; of messages the one that the chat template makes of them."""
    if isinstance(request, CompletionRequest):
        return [RenderedPrompt(text, "prompt") for text in raw_prompts(request)]
    return [await rendered_chat(services, target, request)]


def raw_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The four forms of `prompt` as one."""
    return texts_of(request.prompt, "prompt")


async def rendered_chat(
    services: Services, target: ResolvedModel, request: ChatRequest | TokenizeRequest
) -> RenderedPrompt:
    """The messages through the chat template, in a thread where that takes long. BadRequest names a wrong field."""
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
        writes_tools = _writes_tools_of(services, template, tools, plain)
        options: dict[str, Any] = {
            "add_generation_prompt": generate,
            "tools": [tool.for_template() for tool in tools] or None,
            "writes_tools": writes_tools,
        }
        choices = _thinking_variables(services, request, template.source)
        text, seen = _first_rendered(template, choices, plain, given=given, continue_final_message=final, **options)
        if lost := next((message for message in messages if message.is_lost_in(text)), None):
            raise BadRequest(
                f"The chat template does not show messages of the role {quoted(lost.role)!r}; send one that it knows.",
                param="messages",
            )
        if isinstance(request, TokenizeRequest):
            return RenderedPrompt(text, "messages")
        names = _left_out(request)
        if _is_effort_idle(services, request, template.source, seen):
            names.append("reasoning_effort")
        reading = _reading_of(services, request, template.source, text, writes_tools=writes_tools)
        ready, shared = services.engine.ready, tuple[int, ...]()
        if ready is not None and ready.keeps_states:
            shared = shared_beginnings(template.render, text, plain, variables={**seen, **given}, **options)
        return RenderedPrompt(text, "messages", reading, tuple(names), shared)

    if target.has_template:
        async with services.template_lock(target.template_owner):
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
    tokens = {name: text for name, text in {**services.tokenizer.special_tokens, **changed}.items() if text is not None}
    own: dict[str, ChatTemplate | AdapterTemplate] = {}
    if manifest.has_chat_template:
        own |= services.adapter_templates(manifest.digest, tokens)
    of_base = {name: one for name, one in services.templates.items() if not own or name == DEFAULT_TEMPLATE}
    if changed:
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


def shown_tools(request: ChatRequest | TokenizeRequest) -> list[Tool]:
    """The tools that the model is told of: where it may call none, it is told of none."""
    if isinstance(request, ChatRequest) and request.tool_choice == "none":
        return []
    return functions_of(request.tools)


def _writes_tools_of(
    services: Services,
    template: ChatTemplate | AdapterTemplate,
    tools: Sequence[Tool],
    messages: Sequence[Mapping[str, Any]],
) -> bool:
    """Whether tools, calls and results are written into the texts of the messages, for a chat template that would not
    show them, or asks for calls in a format that nothing here reads. BadRequest where the settings forbid it and the
    model would not be told of the tools."""
    chosen, source = services.settings.tool_parser, template.source
    if chosen == "generic":
        return bool(tools) or has_calls(messages)
    are_hidden = bool(tools) and not (
        "tools" in source and template.shows_tools() and (chosen != "auto" or format_of_template(source) is not None)
    )
    if chosen not in ("template", "none"):
        return are_hidden or (not tools and "tool_calls" not in source and has_calls(messages))
    if are_hidden:
        raise BadRequest(
            "This model's chat template does not know `tools`; describe them in a message, use a model or an adapter "
            "whose template takes them, or start the server with --tool-parser auto.",
            param="tools",
        )
    return False


def _left_out(request: ChatRequest | TokenizeRequest) -> list[str]:
    """The parts of a request that have no effect: tools of types that this server does not run, a `response_format`
    where a call must come, since the tool's schema decides then, and `verbosity`, which no chat template knows."""
    tools = [one for one in enumerate(request.tools or ()) if isinstance(one[1], OtherTool)]
    names = [f"tools[{index}] ({tool.type})" for index, tool in tools]
    if isinstance(request, ChatRequest) and is_format_idle(request):
        names.append("response_format")
    if isinstance(request, ChatRequest) and request.verbosity in ("low", "high"):
        names.append("verbosity")
    return names


def is_format_idle(request: ChatRequest) -> bool:
    """Whether `response_format` is about an answer in words, and a call must come."""
    is_asked = request.response_format is not None and request.response_format.type != "text"
    return is_asked and bool(shown_tools(request)) and not may_skip_calls(request.tool_choice)


def _thinking_variables(
    services: Services, request: ChatRequest | TokenizeRequest, source: str
) -> list[dict[str, Any]]:
    """The template's variables for `reasoning_effort` (as in vLLM) and `enable_thinking`: the requested value first,
    then the nearest one, for a template that raises an error at unknown values; for a word that nobody knows the
    template's own default before that. None if it reads neither, or has a switch alone for such a word. BadRequest if
    `enable_thinking` asks for something that the template ignores."""
    effort, is_wanted = request.reasoning_effort, request.enable_thinking
    is_named_thinking = _THINKING_VARIABLE.search(source) is not None
    has_switch = is_named_thinking or "enable_thinking" in source
    choices: list[dict[str, Any]] = [{}]
    if effort and "reasoning_effort" in source:
        switch = {"enable_thinking": effort != "none", "thinking": effort != "none"} if effort in _EFFORTS else {}
        first, *others = [{"reasoning_effort": word, **switch} for word in (effort, *_nearest(effort, source))]
        choices = [first, *others, switch] if switch else [first, {}, *others]
    elif effort in _EFFORTS and has_switch:
        choices = [{"enable_thinking": effort != "none", "thinking": effort != "none"}]
    if is_wanted is None:
        return choices
    if not has_switch and (is_wanted or not _never_thinks(services, source)):
        value = str(is_wanted).lower()
        raise BadRequest(
            f"`enable_thinking` is {value}, which this model's chat template does not take; leave it out.",
            param="enable_thinking",
        )
    wanted = {"enable_thinking": is_wanted, **({"thinking": is_wanted} if is_named_thinking else {})}
    return [choice | wanted for choice in choices]


def _is_effort_idle(
    services: Services, request: ChatRequest | TokenizeRequest, source: str, seen: Mapping[str, Any]
) -> bool:
    """Whether `reasoning_effort` changes nothing: the template looks at neither it nor a switch. That nothing be
    thought asks for nothing where no template speaks of thoughts."""
    effort = request.reasoning_effort
    if not effort or (effort == "none" and _never_thinks(services, source)):
        return False
    return not {"reasoning_effort", "thinking"} & seen.keys()


def _never_thinks(services: Services, source: str) -> bool:
    return END_OF_THOUGHT not in source and services.settings.reasoning_parser != "think"


def _nearest(effort: str, source: str) -> list[str]:
    """Other efforts that the template names, the nearest first; of two as near the one that thinks. To a word that
    nobody knows those in the middle are."""
    at = _EFFORTS.index(effort if effort in _EFFORTS else "medium")
    named = [one for one in _EFFORTS if one != effort and (f"'{one}'" in source or f'"{one}"' in source)]
    return sorted(named, key=lambda one: (abs(_EFFORTS.index(one) - at), one == "none"))


def _reading_of(
    services: Services, request: ChatRequest, source: str, prompt: str, *, writes_tools: bool
) -> ParserConfig:
    """The parser configuration for answers to `prompt`, which a template of this source rendered. `writes_tools`: the
    tools are written into texts. BadRequest for tools whose calls could not be told from text."""
    tools = shown_tools(request)
    form = (GENERIC if writes_tools else _call_format(services, source)) if tools else None
    thinks = request.separate_reasoning is not False and _thinks(services, source)
    marks = (*(form.marks if form is not None else ()), *((THINK, END_OF_THOUGHT) if thinks else ()))
    ids = {services.tokenizer.token_id(mark) for mark in marks}
    one = request.parallel_tool_calls is False or isinstance(request.tool_choice, NamedTool)
    return ParserConfig(
        calls=form,
        tools={tool.function.name: tool.schema_of_arguments for tool in callable_tools(tools, request.tool_choice)},
        max_calls=1 if one else None,
        must_call=bool(tools) and not may_skip_calls(request.tool_choice),
        thinks=thinks,
        is_thinking=thinks and _is_thinking(request, prompt),
        seen_ids=services.tokenizer.special_ids & ids,
    )


def _call_format(services: Services, source: str) -> CallFormat:
    chosen = services.settings.tool_parser
    form = format_of_template(source) if chosen in ("auto", "template") else FORMATS.get(chosen)
    if form is None:
        why = "is turned off (--tool-parser none)" if chosen == "none" else "does not know how this model writes calls"
        raise BadRequest(
            f"`tools` are not served here: the server {why}; start it with --tool-parser {'|'.join(FORMATS)}, with "
            'auto for a format that the server explains to the model, or send `tool_choice`: "none".',
            param="tools",
        )
    return form


def _thinks(services: Services, source: str) -> bool:
    chosen = services.settings.reasoning_parser
    return chosen == "think" or (chosen == "auto" and END_OF_THOUGHT in source)


def _is_thinking(request: ChatRequest, prompt: str) -> bool:
    """Whether the prompt ends in the middle of a thought: templates begin one, and a client may continue one."""
    if request.continue_final_message:
        text = request.messages[-1].text
        return text.rfind(THINK) > text.rfind(END_OF_THOUGHT)
    return prompt.rstrip().endswith(THINK)
