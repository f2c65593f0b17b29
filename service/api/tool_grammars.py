"""Where calls are enforced: what a chat's answers are constrained to on account of its tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from service.api.errors import BadRequest
from service.api.reading import shown_tools
from service.api.schemas import ChatRequest
from service.api.tools import NamedTool
from service.grammars.constraints import Constraint, text_constraint
from service.grammars.tool_calls import Beside, lark_of_calls, lark_of_thoughts
from service.text.answer_reader import Reading


def chat_constraint(
    request: ChatRequest, reading: Reading, answer: Constraint | None, special_ids: Mapping[str, int]
) -> Constraint | None:
    """What a chat is constrained to, with thoughts before it where the model thinks; None where answers are free.
    ConstraintError for tools that are too large for a grammar, BadRequest for a call and another constraint at once.

    `required` and a named tool are enforced with all schemas. Where the model chooses, a tool that is `strict` has all
    calls enforced. An answer that is constrained may be calls instead.

    answer       what other fields of the request constrain the answer to
    special_ids  ids of the special tokens by their texts
    """
    tools, choice = shown_tools(request), request.tool_choice
    thoughts = {"thinks": reading.thinks, "is_thinking": reading.is_thinking}
    if reading.calls is None:
        if answer is None or not reading.thinks:
            return answer
        return replace(answer, around=lark_of_thoughts(special_ids, is_thinking=reading.is_thinking))
    is_free = choice in (None, "auto")
    if answer is not None and not is_free:
        raise BadRequest(
            "`tool_choice` asks for a call, and another field says what the answer must be; send one of them.",
            param="tool_choice",
        )
    is_strict = any(tool.function.strict for tool in tools)
    if answer is None and is_free and not is_strict:
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    beside: Beside = "answer" if answer is not None else "text" if is_free else None
    lark = lark_of_calls(
        reading.calls.name,
        [(tool.function.name, tool.schema_of_arguments) for tool in tools],
        special_ids,
        beside=beside,
        is_several=reading.max_calls is None,
        **thoughts,
    )
    constraint = text_constraint("lark", lark)
    return constraint if answer is None else replace(answer, around=lark)
