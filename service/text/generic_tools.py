"""Tools for chat templates that know none: a prompt of ours lists them, and calls and results are written into texts.

Calls are spelt as in `service.text.calls.hermes`, so that the parser and the grammar of that format hold for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from service.text.calls.hermes import END, START
from service.text.content_parts import SYSTEM_ROLES, Message, text_of

_PROMPT = f"""# Tools

You may call functions to answer the user. Each line within <tools></tools> describes one, as JSON:
<tools>
%s
</tools>

To call a function, write its name and its arguments as a JSON object within {START}{END}, once for each call:
{START}
{{"name": <name of the function>, "arguments": <object of arguments>}}
{END}
What the call returns then comes within <tool_response></tool_response>."""


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tools were called or have answered in the messages."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def written_into_texts(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
) -> list[Message]:
    """The messages with tools, calls and results as texts, in the roles user, assistant and system alone.

    A result is a user's message, one with the user's messages and the results beside it, since many templates want
    user and assistant to alternate.

    tools         descriptions as templates know them; none: no prompt is written
    takes_system  whether the template shows a system message; the prompt begins the first user message where not
    """
    written: list[Message] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message.get("role") == "tool"
        one = _result(message) if is_result else _with_calls(message)
        if (is_result or was_result) and one["role"] == "user" and written and written[-1]["role"] == "user":
            text = f"{text_of(written[-1].get('content'))}\n{text_of(one.get('content'))}"
            written[-1] = {**written[-1], "content": text}
        else:
            written.append(one)
    return _with_prompt(written, tools, takes_system=takes_system) if tools else written


def _with_prompt(messages: list[Message], tools: Sequence[Mapping[str, Any]], *, takes_system: bool) -> list[Message]:
    prompt = _PROMPT % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if takes_system:
        if messages and messages[0].get("role") in SYSTEM_ROLES:
            first = {**messages[0], "content": f"{text_of(messages[0].get('content'))}\n\n{prompt}"}
            return [first, *messages[1:]]
        return [{"role": "system", "content": prompt}, *messages]
    at = next((at for at, message in enumerate(messages) if message.get("role") == "user"), None)
    if at is None:
        return [{"role": "user", "content": prompt}, *messages]
    asked = {**messages[at], "content": f"{prompt}\n\n{text_of(messages[at].get('content'))}"}
    return [*messages[:at], asked, *messages[at + 1 :]]


def _result(message: Mapping[str, Any]) -> Message:
    return {"role": "user", "content": f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"}


def _with_calls(message: Mapping[str, Any]) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    said = text_of(message.get("content"))
    texts = [*([said] if said else []), *(_call(call["function"]) for call in calls)]
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(texts)}


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{START}\n{{"name": {json.dumps(function["name"])}, "arguments": {text}}}\n{END}'
