"""How a chat's answer is to be read: from its chat template, the settings and the request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from service.api.errors import BadRequest
from service.api.schema.requests import ChatRequest, TokenizeRequest
from service.api.schema.tools import NamedTool, OtherTool, Tool, callable_tools, functions_of, may_skip_calls
from service.api.state import Services
from service.text.answer_reader import END_OF_THOUGHT, THINK, ParserConfig
from service.text.calls.formats import FORMATS, GENERIC, CallFormat, format_of_template
from service.text.chat_template import ChatTemplate
from service.text.generic_tools import has_calls
from service.text.template_worker import AdapterTemplate

# From the least to the most, as OpenAI's models have them.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
# DeepSeek's and Granite's switch.
_THINKING_VARIABLE = re.compile(r"\bif (not )?thinking\b|\bthinking is (not )?defined\b|\bset thinking\b")


def shown_tools(request: ChatRequest | TokenizeRequest) -> list[Tool]:
    """The tools that the model is told of: where it may call none, it is told of none."""
    if isinstance(request, ChatRequest) and request.tool_choice == "none":
        return []
    return functions_of(request.tools)


def writes_tools_of(
    services: Services,
    template: ChatTemplate | AdapterTemplate,
    tools: Sequence[Tool],
    messages: Sequence[Mapping[str, Any]],
) -> bool:
    """Whether tools, calls and results are written into the texts of the messages, for a chat template that would not
    show them. BadRequest where the settings forbid it and the model would not be told of the tools."""
    chosen, source = services.settings.tool_parser, template.source
    if chosen == "generic":
        return bool(tools) or has_calls(messages)
    are_hidden = bool(tools) and not ("tools" in source and template.shows_tools())
    if chosen not in ("template", "none"):
        return are_hidden or (not tools and "tool_calls" not in source and has_calls(messages))
    if are_hidden:
        raise BadRequest(
            "This model's chat template does not know `tools`; describe them in a message, use a model or an adapter "
            "whose template takes them, or start the server with --tool-parser auto.",
            param="tools",
        )
    return False


def left_out(request: ChatRequest | TokenizeRequest) -> list[str]:
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


def thinking_variables(services: Services, request: ChatRequest | TokenizeRequest, source: str) -> list[dict[str, Any]]:
    """The template's variables for `reasoning_effort` (as in vLLM) and `enable_thinking`: the requested value first,
    then the nearest one, for a template that raises an error at unknown values; for a word that nobody knows the
    template's own default before that. None if it reads neither, or has a switch alone for such a word. BadRequest if
    `enable_thinking` asks for something that the template ignores."""
    effort, is_wanted = request.reasoning_effort, request.enable_thinking
    has_switch = "enable_thinking" in source
    choices: list[dict[str, Any]] = [{}]
    if effort and "reasoning_effort" in source:
        switch = {"enable_thinking": effort != "none", "thinking": effort != "none"} if effort in _EFFORTS else {}
        first, *others = [{"reasoning_effort": word, **switch} for word in (effort, *_nearest(effort, source))]
        choices = [first, *others, switch] if switch else [first, {}, *others]
    elif effort in _EFFORTS and (has_switch or _THINKING_VARIABLE.search(source)):
        choices = [{"enable_thinking": effort != "none", "thinking": effort != "none"}]
    if is_wanted is None:
        return choices
    if not has_switch and (is_wanted or not _never_thinks(services, source)):
        value = str(is_wanted).lower()
        raise BadRequest(
            f"`enable_thinking` is {value}, which this model's chat template does not take; leave it out.",
            param="enable_thinking",
        )
    return [{**choice, "enable_thinking": is_wanted} for choice in choices]


def is_effort_idle(
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


def reading_of(
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
            'generic for a format that the server explains to the model, or send `tool_choice`: "none".',
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
