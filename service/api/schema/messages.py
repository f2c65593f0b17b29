"""The bodies of Anthropic's Messages API, and the chat that a request asks for.

As a response is (`service.api.schema.responses`), a message is a chat with other names: a request becomes a
`ChatRequest`, and what is wrong with that is told in the names that the client knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from service.api.errors import quoted
from service.api.schema.base import FIRST, HistoryPart, Request, field_error
from service.api.schema.chat_messages import TemplateVariables
from service.api.schema.error_messages import bad_request
from service.api.schema.requests import ChatRequest, Decoding, StopString
from service.api.schema.responses import renamed
from service.api.schema.tools import MAX_TOOLS, MessageTool, MessageToolChoice
from service.api.schema.unserved_fields import MESSAGE_FIELDS
from service.fairness.thread_pool import LONG_TEXT_CHARS
from service.grammars.json_schemas import least_chars

# A chat's fields under the names that this API gives them.
NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop": "stop_sequences",
}
# Role and required fields of each block type but text, which all roles have.
_BLOCKS = {
    "thinking": ("assistant", ("thinking",)),
    "redacted_thinking": ("assistant", ()),
    "tool_use": ("assistant", ("id", "name", "input")),
    "tool_result": ("user", ("tool_use_id",)),
    "tool_addition": ("system", ("tool",)),
    "tool_removal": ("system", ("tool",)),
}
# What their fields must be, but for texts.
_FORMS = {
    "input": "an object",
    "content": "a text or a list of parts of type 'text'",
    "is_error": "true or false",
    "tool": 'an object {"type": "tool_reference", "name": ...}',
}
# Claude Code's version and session, which differ from request to request: as the prompt's beginning they would keep
# the prefix cache from anything behind them.
_BILLING = "x-anthropic-billing-header"


class SystemBlock(HistoryPart):
    """A text."""

    type: Literal["text"]
    text: str


class ResultBlock(HistoryPart):
    """A part of a tool's result: a text, or the name of a tool that a search has found."""

    type: Literal["text", "tool_reference"]
    text: str | None = None
    tool_name: str | None = Field(
        None, description="of a `tool_reference`: the deferred tool that the model sees from now on"
    )

    @model_validator(mode="after")
    def _check_type(self) -> ResultBlock:
        _check_needed(self, ("text",) if self.type == "text" else ("tool_name",))
        return self

    @property
    def said(self) -> str:
        """The text for the model."""
        return self.text or "" if self.type == "text" else f"The tool {self.tool_name} is there now."


class ToolReference(HistoryPart):
    """One of the `tools`."""

    type: Literal["tool_reference"]
    name: str


class ContentBlock(HistoryPart):
    """A part of a message."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_addition", "tool_removal"]
    text: str | None = None
    thinking: str | None = Field(None, description="for templates that show earlier thoughts")
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = Field(None, description="the arguments of a `tool_use`")
    tool_use_id: str | None = None
    content: str | Annotated[list[ResultBlock], FIRST] | None = Field(None, description="the result of a tool")
    is_error: bool | None = Field(None, description="whether the tool failed; the model sees it")
    tool: ToolReference | None = Field(None, description="the tool that the model sees from now on, or no longer")

    @model_validator(mode="wrap")
    @classmethod
    def _check_form(cls, value: Any, read: ModelWrapValidatorHandler[ContentBlock]) -> ContentBlock:
        try:
            return read(value)
        except ValidationError as error:  # which would be told as of a chat's `content`
            faults = error.errors(include_input=False)
            name = str(faults[0]["loc"][0]) if faults[0]["loc"] else ""
            has_own = any(fault["type"] in ("field", "literal_error", "string_unicode") for fault in faults)
            if has_own or name not in cls.model_fields or not isinstance(value.get("type"), str):
                raise
            sentence = f"`{name}` of a part of type {quoted(value['type'])!r} must be {_FORMS.get(name, 'a text')}."
            raise field_error(name, sentence) from None

    @model_validator(mode="after")
    def _check_type(self) -> ContentBlock:
        _check_needed(self, _BLOCKS[self.type][1] if self.type in _BLOCKS else ("text",))
        return self

    @property
    def results(self) -> list[str]:
        """The texts of a tool's result."""
        given = [self.content or ""] if not isinstance(self.content, list) else [part.said for part in self.content]
        return ["Error:", *given] if self.is_error else given

    @property
    def num_chars(self) -> int:
        """About the characters that become a message."""
        own = len(self.text or "") + len(self.thinking or "") + least_chars(self.input or {}, LONG_TEXT_CHARS)
        return own + sum(map(len, self.results))


class TurnConfig(Request):
    """How much to think."""

    effort: str | None = Field(None, description="the chat template's `reasoning_effort`")


class MessageParam(HistoryPart):
    """One turn of the conversation so far. A `system` turn behind the first user's is shown with what stands before
    it."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], FIRST]
    clear_at: Literal["next_user_message", "never"] | None = Field(
        None, description="of a `system` turn: whether its texts are left out behind the next turn of the user"
    )
    output_config: TurnConfig | None = Field(
        None, description="of a `system` turn: the effort up to the next turn of the user"
    )

    @model_validator(mode="before")
    @classmethod
    def _check_system(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("role") == "system":
            return {"content": [], **value} if value.get("output_config") else value
        for name in ("clear_at", "output_config"):
            if value.get(name) is not None:
                raise field_error(name, f"`{name}` is only allowed in messages of role 'system'.")
        return value

    @model_validator(mode="after")
    def _check_roles(self) -> MessageParam:
        for index, block in enumerate(self.content if isinstance(self.content, list) else ()):
            role = _BLOCKS.get(block.type, (self.role, ()))[0]
            if role != self.role:
                sentence = f"A block of type '{block.type}' belongs into a message of role '{role}'."
                raise field_error(f"content[{index}]", sentence)
        return self

    @property
    def blocks(self) -> list[ContentBlock]:
        """The content, without empty texts beside other blocks."""
        if isinstance(self.content, str):
            return [ContentBlock.model_validate({"type": "text", "text": self.content})]
        return [block for block in self.content if block.type != "text" or block.text]


class ThinkingParam(Request):
    """Whether to think first, for chat templates that take it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="left out: thoughts count for `max_tokens`"
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted`: answer without the thoughts; else they come as they are"
    )


class OutputFormat(Request):
    """The form of an answer in words."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(TurnConfig):
    """How much to think, and the form of the answer."""

    format: OutputFormat | None = Field(None, description="a JSON schema that the answer follows")


class MessagesRequest(Decoding):
    """Body of POST /v1/messages."""

    unserved = MESSAGE_FIELDS

    messages: Annotated[list[MessageParam], Field(min_length=1), FIRST] = Field(
        description="the conversation so far; an answer continues a last message of the assistant"
    )
    system: str | Annotated[list[SystemBlock], FIRST] | None = Field(None, description="the system message")
    max_tokens: Annotated[int, Field(ge=1)] = Field(description="largest number of tokens of the answer")
    stop_sequences: Annotated[list[StopString], FIRST] | None = Field(None, description="the same as `stop`")
    stream: bool | None = Field(None, description="answer with server-sent events")
    tools: Annotated[list[MessageTool], FIRST] | None = Field(
        None, description=f"tools that the model may call, up to {MAX_TOOLS}"
    )
    tool_choice: MessageToolChoice | None = Field(None, description="`auto`, `any`, `none`, or one `tool`")
    thinking: ThinkingParam | None = Field(None, description="whether to think first")
    output_config: OutputConfig | None = Field(None, description="`effort` and `format`")
    context_management: dict[str, Any] | None = Field(None, description="left out: the client's history stays whole")
    chat_template_kwargs: TemplateVariables = Field(None, description="variables for the chat template")
    chat_template_name: str | None = Field(
        None, max_length=64, description="which of the model's named chat templates; default: as in chats"
    )

    @model_validator(mode="after")
    def _check_turns(self) -> MessagesRequest:
        """As Anthropic's API: the user says something, and results answer calls of the assistant's last turn."""
        calls: set[str | None] = set()
        before = ""
        for index, message in enumerate(self.messages):
            field = f"messages[{index}].content"
            if message.role == "user" and not any(block.type != "text" or block.text for block in message.blocks):
                raise field_error(field, f"`{field}` is empty; send a text or a tool's result.")
            if message.role == "assistant" and before != "assistant":
                calls.clear()
            for block in message.blocks:
                if block.type == "tool_use":
                    calls.add(block.id)
                elif block.type == "tool_result" and block.tool_use_id not in calls:
                    raise field_error(
                        field,
                        f"`{field}` has a result of {quoted(block.tool_use_id or '')!r}, which is no `tool_use` of the "
                        "assistant's turn before it; send both, or neither.",
                    )
            before = message.role if message.role != "system" else before
        if not any(message.blocks for message in self.messages):
            raise field_error("messages", "`messages` hold no text; send a turn of the user.")
        return self

    @property
    def left_out(self) -> list[str]:
        """Fields and parts that are accepted and that answers do without, beside those of the chat."""
        names = ["context_management"] if self.context_management else []
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            names.append("thinking.budget_tokens")
        if not isinstance(self.system, str):
            blocks = enumerate(self.system or ())
            names += [f"system[{index}] ({_BILLING})" for index, block in blocks if block.text.startswith(_BILLING)]
        tools = enumerate(self.tools or ())
        names += [f"tools[{index}].input_examples" for index, tool in tools if tool.input_examples]
        if any(block.type == "redacted_thinking" for message in self.messages for block in message.blocks):
            names.append("messages (redacted_thinking)")
        return names

    @property
    def last_user_index(self) -> int:
        """Index of the user's last turn, -1 if there is none."""
        return max((index for index, message in enumerate(self.messages) if message.role == "user"), default=-1)

    @property
    def effort(self) -> str | None:
        """The last that is asked for: in system turns behind the user's last one, or else by the request."""
        turns = [one.output_config for one in self.messages[self.last_user_index + 1 :]]
        asked = [one.effort for one in (self.output_config, *turns) if one is not None and one.effort is not None]
        return asked[-1] if asked else None

    @property
    def num_chars(self) -> int:
        """About the characters that become a chat, or enough of them for `run_in_thread` to leave the loop."""
        said = sum(block.num_chars + 50 for message in self.messages for block in message.blocks)
        own = self.system if isinstance(self.system, str) else "".join(block.text for block in self.system or ())
        schemas = [tool.input_schema for tool in self.tools or ()]
        return said + len(own) + least_chars([schemas, self.chat_template_kwargs], LONG_TEXT_CHARS)


class CountTokensRequest(MessagesRequest):
    """Body of POST /v1/messages/count_tokens: that of a message, of which all counts that becomes the prompt."""

    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="changes no count")  # type: ignore[assignment]


def _check_needed(block: Any, fields: Sequence[str]) -> None:
    for name in fields:
        if getattr(block, name) is None:
            raise field_error(name, f"`{name}` is missing from a part of type '{block.type}'; send it.")


def chat_of(request: MessagesRequest) -> ChatRequest:
    """The chat that the request asks for. ApiError names the client's own field where something is wrong."""
    fields: dict[str, Any] = {
        name: getattr(request, name) for name in request.model_fields_set & Decoding.model_fields.keys()
    }
    same = ("stream", "max_tokens", "chat_template_kwargs", "chat_template_name")
    fields |= {name: getattr(request, name) for name in same if getattr(request, name) is not None}
    fields["messages"] = _messages(request)
    fields["continue_final_message"] = fields["messages"][-1:] != [] and fields["messages"][-1]["role"] == "assistant"
    if request.stop_sequences:
        stop = request.stop or []
        fields["stop"] = [*request.stop_sequences, *([stop] if isinstance(stop, str) else stop)]
    fields |= _thinking(request)
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "output", "schema": request.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.tools:
        offered = _offered(request)
        fields["tools"] = [tool.as_function for tool in request.tools if tool.name in offered]
    if request.tool_choice is not None:
        fields["tool_choice"] = request.tool_choice.for_chat
        fields["parallel_tool_calls"] = not request.tool_choice.disable_parallel_tool_use
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise renamed(bad_request(error.errors()), names_in(request)) from None


def names_in(request: MessagesRequest) -> dict[str, str]:
    """`NAMES`, with who asked for an effort."""
    return NAMES if request.effort is not None else {**NAMES, "reasoning_effort": "thinking"}


def _thinking(request: MessagesRequest) -> dict[str, Any]:
    """`disabled` is the effort none; `enabled` is one that switches thoughts on; the others leave it to the model."""
    effort = request.effort
    kind = request.thinking.type if request.thinking is not None else "adaptive"
    if kind in ("enabled", "disabled"):
        effort = "none" if kind == "disabled" else effort or "medium"
    is_shown = request.thinking is None or request.thinking.display != "omitted"
    return {"reasoning_effort": effort, "include_reasoning": is_shown}


def _offered(request: MessagesRequest) -> set[str]:
    """Names of the tools that the model is told of: those that are not deferred, and what the messages add and take."""
    names = {tool.name for tool in request.tools or () if not tool.defer_loading}
    for message in request.messages:
        for block in message.blocks:
            if isinstance(block.content, list):
                names |= {part.tool_name for part in block.content if part.tool_name is not None}
            elif block.tool is not None:
                (names.add if block.type == "tool_addition" else names.discard)(block.tool.name)
    return names


def _messages(request: MessagesRequest) -> list[dict[str, Any]]:
    """The conversation as a chat has it. Turns of one role that follow one another are one message."""
    made: list[dict[str, Any]] = []
    if isinstance(request.system, str):
        _turn(made, "system")["content"].append(request.system)
    else:
        for system in request.system or ():
            if not system.text.startswith(_BILLING):
                _turn(made, "system")["content"].append(system.text)
    last = request.last_user_index
    for index, message in enumerate(request.messages):
        is_cleared = message.clear_at == "next_user_message" and index < last
        for block in message.blocks:
            if not (is_cleared and block.type == "text"):
                _add(made, message.role, block)
    return [_complete(message) for message in made]


def _turn(made: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The message that more of a role is added to: the last one, or a new one. What the system says behind the first
    user's turn is part of the turn before it: most templates refuse it elsewhere, and a turn of its own behind a tool's
    result would have others forget the thoughts before that."""
    last = made[-1]["role"] if made else "system"
    if role == "system":
        role = last if last in ("system", "tool") else "user"
    if not made or last != role:
        made.append({"role": role, "content": []})
    return made[-1]


def _add(made: list[dict[str, Any]], role: str, block: ContentBlock) -> None:
    if block.type == "tool_result":
        made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.results})
    elif block.type == "tool_use":
        call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        _turn(made, role).setdefault("tool_calls", []).append(call)
    elif block.type == "thinking":
        _turn(made, role).setdefault("reasoning_content", []).append(block.thinking)
    elif block.type == "text":
        _turn(made, role)["content"].append(block.text)


def _complete(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its texts joined, or as parts, which a chat template may show as such."""
    texts = message["content"]
    if message["role"] == "assistant":
        thoughts = (
            {"reasoning_content": "".join(message["reasoning_content"])} if "reasoning_content" in message else {}
        )
        return {**message, **thoughts, "content": "".join(texts) if texts else None}
    parts = [{"type": "text", "text": text} for text in texts]
    return {**message, "content": texts[0] if len(texts) == 1 else parts}
