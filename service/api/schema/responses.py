"""The body of POST /v1/responses, and the chat that it asks for.

A response is a chat with other names, so that what chats can do, responses can: a request becomes a `ChatRequest`, and
what is wrong with that is told in the names that the client knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field, ValidationError, model_validator

from service.api.errors import ApiError, BadRequest, quoted
from service.api.schema.base import FIRST, HistoryPart, Request, field_error
from service.api.schema.chat_messages import TemplateVariables, TextPart
from service.api.schema.error_messages import bad_request
from service.api.schema.requests import ChatRequest, Decoding
from service.api.schema.tools import TYPE
from service.api.schema.unserved_fields import (
    RESPONSE_FIELDS,
    RESPONSE_REASONING_FIELDS,
    STREAM_FIELDS,
)
from service.fairness.thread_pool import LONG_TEXT_CHARS
from service.grammars.json_schemas import least_chars

_Texts = str | Annotated[list[TextPart], FIRST]
# Required fields of each item type.
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
# Calls of tools whose input is a text, and their results, under the names that functions have here.
_SAME_AS = {"custom_tool_call": "function_call", "custom_tool_call_output": "function_call_output"}
# Tools that Codex sends as an item, though they are none of the conversation.
_MORE_TOOLS = "additional_tools"
# Items that hold what a model must see: they are refused, not left out.
_REFERENCE, _SAYING = "item_reference", ("role", "content")
# How ids of items begin.
ITEM_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_LOGPROBS = "message.output_text.logprobs"
# An answer may be sent back as it is: what else it could hold is never there.
_NOTHING_TO_INCLUDE = "reasoning.encrypted_content"
# A chat's fields under the names that this API gives them.
NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tool_choice.allowed_tools": "tool_choice",
}


# Paths that are nested in the tools of chats and flat here.
_NESTED = re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b(?=\.)")


class InputItem(HistoryPart):
    """One item of the conversation so far."""

    type: str | None = Field(
        None, description=f"{', '.join(_NEEDED)}, custom_tool_call(_output), {_MORE_TOOLS}; others are left out"
    )
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Texts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = Field(None, description="JSON, as text")
    output: _Texts | None = Field(None, description="result of the function")
    tools: list[dict[str, Any]] | None = Field(None, description=f"of {_MORE_TOOLS}: beside those of the request")

    @model_validator(mode="before")
    @classmethod
    def _as_of_functions(cls, value: Any) -> Any:
        """Custom tools' calls as calls of functions, by which a model sees what another one did; and nothing of what is
        left out."""
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in _NEEDED:
            return value
        if kind == _MORE_TOOLS:
            return {"type": kind, "tools": value.get("tools")}
        if kind in _SAME_AS:
            value = {**value, "type": _SAME_AS[kind]}
            if isinstance(value.get("input"), str):
                value["arguments"] = json.dumps({"input": value["input"]})
            return value
        if kind == _REFERENCE:
            raise field_error("type", "`type` refers to an item that is not here; send the item itself.")
        if TYPE.fullmatch(kind) is None or any(value.get(name) is not None for name in _SAYING):
            raise field_error("type", f"`type` must be {', '.join(map(repr, _NEEDED))}.")
        return {"type": kind}

    @model_validator(mode="after")
    def _check_type(self) -> InputItem:
        kind = self.type or "message"
        for field in _NEEDED.get(kind, ()):
            if getattr(self, field) is None:
                raise field_error(field, f"`{field}` is missing from an item of type '{kind}'; send it.")
        return self

    @property
    def is_left_out(self) -> bool:
        """Whether it is no part of the conversation: what other services' tools did, tools, encrypted summaries."""
        return (self.type or "message") not in _NEEDED

    @property
    def stored(self) -> dict[str, Any]:
        """The item as it is stored and listed, with an id of its own."""
        kind = self.type or "message"
        item = {"id": f"{ITEM_PREFIXES[kind]}_{uuid4().hex}", "type": kind, "status": "completed"}
        if kind == "function_call":
            return item | {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        if kind == "function_call_output":
            return item | {"call_id": self.call_id, "output": _parts(self.output, "input_text", keep_text=True)}
        if kind == "reasoning":
            return item | {"summary": [], "content": _parts(self.content, "reasoning_text")}
        text = "output_text" if self.role == "assistant" else "input_text"
        return item | {"role": self.role, "content": _parts(self.content, text)}

    @property
    def num_containers(self) -> int:
        """The item, and each of its parts."""
        return 1 + sum(len(texts) for texts in (self.content, self.output) if isinstance(texts, list))

    @property
    def num_chars(self) -> int:
        """About the characters that become a message."""
        return len(_joined(self.content)) + len(_joined(self.output)) + len(self.arguments or "")


class ResponseStreamOptions(Request):
    """Options of a streamed response."""

    unserved = STREAM_FIELDS


class ReasoningOptions(Request):
    """How much to think."""

    unserved = RESPONSE_REASONING_FIELDS

    effort: str | None = Field(None, description="the chat template's `reasoning_effort`")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="left out: thoughts come as they are"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="as `summary`")


class TextOptions(Request):
    """Format of the answer's text."""

    format: dict[str, Any] | None = Field(None, description="a `response_format` of chats, written flat")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="left out: ask in the input")


class ResponsesRequest(Decoding):
    """Body of POST /v1/responses."""

    unserved = RESPONSE_FIELDS

    input: str | Annotated[list[InputItem], Field(min_length=1), FIRST] = Field(
        description="a text, or the conversation so far: messages, function calls and their results"
    )
    previous_response_id: str | None = Field(None, description="the stored response whose conversation goes on")
    store: bool | None = Field(None, description="false: the answer is not stored")
    background: bool | None = Field(None, description="answer at once, and go on without the client")
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="largest number of tokens of the answer; default: the rest of the context"
    )
    stream: bool | None = Field(None, description="answer with server-sent events")
    stream_options: ResponseStreamOptions | None = Field(None, description="only with `stream`")
    text: TextOptions | None = Field(None, description="`format` of the answer")
    reasoning: ReasoningOptions | None = Field(None, description="`effort`, for chat templates that take it")
    tools: list[dict[str, Any]] | None = Field(None, description="those of chats, written flat")
    tool_choice: str | dict[str, Any] | None = Field(None, description="that of chats, written flat")
    parallel_tool_calls: bool | None = Field(None, description="as in chats")
    include: Annotated[list[str], FIRST] | None = Field(
        None, description=f"`{_LOGPROBS}`: log probabilities of the answer's tokens"
    )
    top_logprobs: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="alternatives for each token, with log probabilities"
    )
    client_metadata: dict[str, Any] | None = Field(None, description="left out: what the client says of itself")
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(None, description="given back as it is")
    chat_template_kwargs: TemplateVariables = Field(None, description="variables for the chat template")
    chat_template_name: str | None = Field(
        None, max_length=64, description="which of the model's named chat templates; default: as in chats"
    )

    @model_validator(mode="after")
    def _check_include(self) -> ResponsesRequest:
        check_include(self.include)
        return self

    @model_validator(mode="after")
    def _check_background(self) -> ResponsesRequest:
        if self.background and self.stream:
            raise field_error("background", "`background` cannot be streamed here; leave out it or `stream`.")
        if self.background and self.store is False:
            raise field_error("background", "background can only be used when `store` is true; leave `store` out.")
        return self

    @property
    def items(self) -> list[InputItem]:
        """The input, of which a text is a message of the user."""
        if isinstance(self.input, str):
            return [InputItem.model_validate({"role": "user", "content": self.input})]
        return [item for item in self.input if not item.is_left_out]

    @property
    def more_tools(self) -> list[tuple[str, dict[str, Any]]]:
        """Tools that came as items, with their paths in the request."""
        items = enumerate([] if isinstance(self.input, str) else self.input)
        return [(f"input[{at}].tools[{n}]", tool) for at, item in items for n, tool in enumerate(item.tools or ())]

    @property
    def left_out(self) -> list[str]:
        """Fields that are accepted and that answers do without, beside those of the chat."""
        names = ["client_metadata"] if self.client_metadata else []
        for name in ("summary", "generate_summary"):
            if getattr(self.reasoning, name, None) is not None:
                names.append(f"reasoning.{name}")
        items = enumerate([] if isinstance(self.input, str) else self.input)
        names += [f"input[{at}] ({one.type})" for at, one in items if one.is_left_out and one.type != _MORE_TOOLS]
        others = [(path, one.get("type")) for path, one in self.more_tools if one.get("type") != "function"]
        return names + [f"{path} ({quoted(str(kind))})" for path, kind in others]

    @property
    def num_chars(self) -> int:
        """About the characters that become a chat, or enough of them for `run_in_thread` to leave the loop."""
        said = len(self.input) if isinstance(self.input, str) else sum(item.num_chars + 50 for item in self.input)
        form = None if self.text is None else self.text.format
        other = [self.tools, [tool for _, tool in self.more_tools], self.tool_choice, self.chat_template_kwargs, form]
        return said + len(self.instructions or "") + least_chars(other, LONG_TEXT_CHARS)


def check_include(names: list[str] | None) -> None:
    """A field error for what no answer has."""
    for index, name in enumerate(names or ()):
        if name not in (_LOGPROBS, _NOTHING_TO_INCLUDE):
            sentence = f"`include` names {quoted(name)!r}, which no answer of this server has; leave it out."
            raise field_error(f"include[{index}]", sentence)


def chat_of(request: ResponsesRequest) -> ChatRequest:
    """The chat that the request asks for. ApiError names the client's own field where something is wrong."""
    fields: dict[str, Any] = {
        name: getattr(request, name) for name in request.model_fields_set & Decoding.model_fields.keys()
    }
    same = (
        *("stream", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs"),
        *("chat_template_kwargs", "chat_template_name"),
    )
    fields |= {name: getattr(request, name) for name in same if getattr(request, name) is not None}
    fields["messages"] = _messages(request)
    fields["max_completion_tokens"] = request.max_output_tokens
    fields["reasoning_effort"] = request.reasoning.effort if request.reasoning is not None else None
    fields["logprobs"] = bool(request.top_logprobs) or _LOGPROBS in (request.include or ())
    if request.stream:
        fields["stream_options"] = {"include_usage": True}
    if request.text is not None:
        fields["verbosity"] = request.text.verbosity
        if request.text.format is not None:
            fields["response_format"] = _nested(request.text.format, "json_schema")
    more = [tool for _, tool in request.more_tools if tool.get("type") == "function"]
    if request.tools or more:
        fields["tools"] = [_nested(tool, "function") for tool in (*(request.tools or ()), *more)]
    if isinstance(request.tool_choice, dict):
        fields["tool_choice"] = _nested_choice(request.tool_choice)
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise renamed(bad_request(error.errors())) from None


def renamed(error: ApiError, names: Mapping[str, str] = NAMES) -> ApiError:
    """The chat's error under other names of its fields: those of the response's."""
    message, param = error.message, error.param or ""
    for ours, theirs in names.items():
        message = re.sub(rf"`{re.escape(ours)}(?=[`.[])", f"`{theirs}", message)
        if re.match(rf"{re.escape(ours)}(?=$|[.[])", param):
            # The messages are not the items: calls of functions are part of one.
            param = theirs if ours == "messages" else theirs + param[len(ours) :]
    message, param = (_NESTED.sub(r"\1", text) for text in (message, param))
    if not isinstance(error, BadRequest) or (message, param) == (error.message, error.param):
        return error
    return BadRequest(message, param=param or None, headers=error.headers)


def _nested(flat: dict[str, Any], kind: str) -> dict[str, Any]:
    """{"type": kind, ...} as chats have it: all but the type one level deeper. Other types are left for the chat to
    accept or refuse."""
    if flat.get("type") != kind or kind in flat:
        return flat
    return {"type": kind, kind: {name: value for name, value in flat.items() if name != "type"}}


def _nested_choice(flat: dict[str, Any]) -> dict[str, Any]:
    """A choice of tools as chats have it, the tools that it allows too."""
    tools = flat.get("tools")
    if flat.get("type") == "allowed_tools" and isinstance(tools, list):
        flat = {**flat, "tools": [_nested(tool, "function") if isinstance(tool, dict) else tool for tool in tools]}
    return _nested(_nested(flat, "function"), "allowed_tools")


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation as a chat has it: what the assistant thought, said and called one after the other is one
    message."""
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for item in request.items:
        if item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        elif item.type in ("function_call", "reasoning") or item.role == "assistant":
            _add_to_answer(messages, item)
        else:
            content = item.content
            parts = content if isinstance(content, str) else [part.model_dump() for part in content or ()]
            messages.append({"role": item.role, "content": parts})
    # Pieces until now: added to a text one by one, each would copy all before it.
    for answer in messages:
        for name in ("content", "reasoning_content"):
            if answer["role"] == "assistant" and answer.get(name) is not None:
                answer[name] = "".join(answer[name])
    return messages


def _add_to_answer(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Add to what the assistant said last, or begin with it if it was another's turn; texts as lists of pieces."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    answer = messages[-1]
    if item.type == "function_call":
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        answer.setdefault("tool_calls", []).append(call)
    elif item.type == "reasoning":
        answer.setdefault("reasoning_content", []).append(_joined(item.content))
    elif answer["content"] is None:
        answer["content"] = [_joined(item.content)]
    else:
        answer["content"].append(_joined(item.content))


def _parts(texts: str | list[TextPart] | None, kind: str, *, keep_text: bool = False) -> Any:
    """The texts as a list of parts, of which a text alone is one of this kind."""
    if isinstance(texts, str):
        return texts if keep_text else [{"type": kind, "text": texts}]
    return [part.model_dump(exclude_none=True) for part in texts or ()]


def _joined(texts: str | list[TextPart] | None) -> str:
    return texts if isinstance(texts, str) else "".join(part.said for part in texts or ())
