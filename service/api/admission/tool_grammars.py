"""Where calls are enforced: what a chat's answers are constrained to on account of its tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from service.api.admission.parsers import shown_tools
from service.api.errors import BadRequest
from service.api.schema.requests import ChatRequest
from service.api.schema.tools import AllowedToolsChoice, callable_tools, may_skip_calls
from service.grammars.constraints import Constraint, text_constraint
from service.grammars.tool_calls import Beside, lark_of_calls, lark_of_thoughts
from service.text.answer_reader import ParserConfig


def chat_constraint(
    request: ChatRequest,
    reading: ParserConfig,
    answer: Constraint | None,
    special_ids: Mapping[str, int],
    *,
    closes_objects: bool = True,
) -> Constraint | None:
    """The constraint on a chat's answer, with thoughts before it where the model thinks; None where answers are free.
    ConstraintError for tools that are too large for a grammar, BadRequest for a call and another constraint at once.

    `required`, a named tool and a choice among some of the tools are enforced with all schemas. Where the model
    chooses, a tool that is `strict` has all calls enforced. An answer that is constrained may be calls instead.

    answer       what other fields of the request constrain the answer to
    special_ids  ids of the special tokens by their texts
    closes_objects  of the tools' arguments, as `schema_constraint` does
    """
    choice = request.tool_choice
    tools = callable_tools(shown_tools(request), choice)
    thoughts = {"thinks": reading.thinks, "is_thinking": reading.is_thinking}
    if reading.calls is None:
        if answer is None or not reading.thinks:
            return answer
        return replace(answer, around=lark_of_thoughts(special_ids, is_thinking=reading.is_thinking))
    is_free = may_skip_calls(choice)
    if answer is not None and not is_free:
        raise BadRequest(
            "`tool_choice` asks for a call, and another field says what the answer must be; send one of them.",
            param="tool_choice",
        )
    is_enforced = isinstance(choice, AllowedToolsChoice) or any(tool.function.strict for tool in tools)
    if answer is None and is_free and not is_enforced:
        return None
    beside: Beside = "answer" if answer is not None else "text" if is_free else None
    lark = lark_of_calls(
        reading.calls.name,
        [(tool.function.name, tool.schema_of_arguments) for tool in tools],
        special_ids,
        beside=beside,
        is_several=reading.max_calls is None,
        closes_objects=closes_objects,
        **thoughts,
    )
    constraint = text_constraint("lark", lark)
    return constraint if answer is None else replace(answer, around=lark)
