"""The messages of a chat, as clients keep them, and what of them a chat template sees.

A history belongs to the client: it sends back what it was given, by whatever server, with keys of its own. What has a
meaning for a template is checked and handed on; all else is ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from service.api.schema.base import FIRST, HistoryPart, field_error, value_fault
from service.grammars.json_schemas import least_chars

# Characters of one call's arguments, and of a template's variables: as long as the longest text that is tokenised.
# Templates write both in one piece, and a million numbers take 0.3 s of Python's lock.
MAX_DATA_CHARS = 1 << 20
# Roles whose messages need a content; an assistant may have called tools instead, and a tool may be silent. These are
# OpenAI's; templates may know others.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_MUST_HAVE_CONTENT = ("system", "developer", "user")


# A value that is no text is the client's own: some store objects and lists there.
ThoughtText = Annotated[str | None, BeforeValidator(lambda kept: kept if isinstance(kept, str) else None)]


class TextPart(HistoryPart):
    """A part of a message. `input_text`, `output_text` and `reasoning_text` are what the Responses API calls a text."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "refusal"]
    text: str | None = None
    refusal: str | None = Field(None, description="the text of a part of type `refusal`")

    @model_validator(mode="after")
    def _check_text(self) -> TextPart:
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise value_fault(f"a part of type '{self.type}' has no text")
        return self

    @property
    def said(self) -> str:
        """The text."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


class CalledFunctionParam(HistoryPart):
    """Which function, and with what: `arguments` is JSON as text, or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None
    _num_chars: int = PrivateAttr(0)

    @model_validator(mode="after")
    def _check_size(self) -> CalledFunctionParam:
        given = self.arguments or ""
        self._num_chars = len(given) if isinstance(given, str) else least_chars(given, MAX_DATA_CHARS)
        if self._num_chars > MAX_DATA_CHARS:
            sentence = f"`arguments` of a call may have up to {MAX_DATA_CHARS} characters; shorten them."
            raise field_error("arguments", sentence)
        return self

    @property
    def num_chars(self) -> int:
        """About as many as it has as text."""
        return len(self.name) + self._num_chars


def checked_variables(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Variables for a chat template; a fault for more than a template could write."""
    if given and least_chars(given, MAX_DATA_CHARS) > MAX_DATA_CHARS:
        raise value_fault(f"it may have up to {MAX_DATA_CHARS} characters as JSON; shorten it")
    return given


TemplateVariables = Annotated[dict[str, Any] | None, AfterValidator(checked_variables)]


class ToolCallParam(HistoryPart):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionParam


class ChatMessage(HistoryPart):
    """One message of a chat. Keys that are not listed here are ignored; images, audio and files are not supported."""

    role: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="system, developer, user, assistant, tool, function, or another one that the chat template shows"
    )
    content: str | Annotated[list[TextPart], FIRST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallParam], FIRST] | None = None
    tool_call_id: str | None = Field(None, description="of a tool's answer: the call that it answers")
    reasoning_content: ThoughtText = Field(None, description="for templates that show earlier reasoning")
    reasoning: ThoughtText = Field(None, description="the same, as vLLM calls it")
    refusal: str | None = Field(None, description="what the assistant said where it has no content")
    function_call: CalledFunctionParam | None = Field(
        None, description="a tool call, as it was before there were several"
    )

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.role in _MUST_HAVE_CONTENT and (self.content is None or self.content == []):
            sentence = f"`content` of a message of role '{self.role}' must be a text or a list of text parts."
            raise field_error("content", sentence)
        return self

    @property
    def text(self) -> str:
        """The message's text."""
        content = self._content()
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content)

    def is_lost_in(self, prompt: str) -> bool:
        """Whether a chat template left it out, as many do with messages of a role that they do not know."""
        if self.role in _ROLES:
            return False
        said = [self.text] if isinstance(self.content, str) else [part.said for part in self.content or ()]
        return any(text.strip() not in prompt for text in said)

    @property
    def num_chars(self) -> int:
        """About the characters that a template has to handle."""
        content = self.content or ""
        return (
            (len(content) if isinstance(content, str) else sum(len(part.said) for part in content))
            + sum(call.function.num_chars for call in self.tool_calls or ())
            + len(self.reasoning_content or self.reasoning or "")
        )

    @property
    def json_texts(self) -> list[str]:
        """Texts of the message that are JSON, which the template receives parsed."""
        called = [call.function for call in self.tool_calls or ()]
        if self.function_call is not None:
            called.append(self.function_call)
        return [function.arguments for function in called if isinstance(function.arguments, str)]

    def for_template(self) -> dict[str, Any]:
        """Plain data as templates know them: `content` is always there, arguments are objects, and the names of older
        and of other APIs are those of today's."""
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        calls = [_called(call.function, call.id) for call in self.tool_calls or ()]
        if not calls and self.function_call is not None:
            calls = [_called(self.function_call, None)]
        said: dict[str, Any] = {
            "role": "tool" if self.role == "function" else self.role,
            "content": self._content(),
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
            "thinking": reasoning,
        }
        return {key: value for key, value in said.items() if value is not None}

    def _content(self) -> str | list[dict[str, str]]:
        if isinstance(self.content, list):
            return [{"type": "text", "text": part.said} for part in self.content] or ""
        return self.content if self.content is not None else self.refusal or ""


def _called(function: CalledFunctionParam, call_id: str | None) -> dict[str, Any]:
    call: dict[str, Any] = {} if call_id is None else {"id": call_id}
    return call | {"type": "function", "function": {"name": function.name, "arguments": _arguments(function.arguments)}}


def _arguments(given: str | dict[str, Any] | None) -> Any:
    """An object for the template. What a model once wrote may be no JSON: then it stays the text that it is, for the
    client cannot change its history, and every later turn would fail."""
    if not given:
        return {}
    if isinstance(given, dict):
        return given
    try:
        parsed = json.loads(given)
    except (ValueError, RecursionError):
        return given
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else given
