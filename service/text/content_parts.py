"""Message contents in the form that a chat template shows: texts, or lists of text parts.

Templates differ by role, by the message's position and by whether there are tools: one loops over the parts of a user
message and prints a tool's content as it is, another shows only the first part, a third takes parts alone. So each
template is asked, once for each kind of message, with short conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

from service.text.template_sandbox import TemplateError

Message = dict[str, Any]
# Roles of the messages before a conversation.
SYSTEM_ROLES = ("system", "developer")
Render = Callable[[list[Message], list[Message] | None], str | None]

_FIRST, _TEXTS = "probeonefirst", ("probeonefirst", "probetwosecond", "probefourthird")
# A template may show some parts only (`content[:3]`), so that one is asked with as many as a message has, rounded up to
# a power of two; more than these are joined.
_MAX_ASKED_PARTS = 1024
# A key that no template reads: it shows in the text where parts are written as Python data or as JSON.
_ODD_KEY = "probethreekey"
_CALL = {"id": "callprobe", "type": "function", "function": {"name": "probe_tool", "arguments": {}}}
PROBE_TOOL: Message = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}


class _NoText:
    """Data without a text of its own: a template that prints it, and not what it holds, is refused."""

    def __str__(self) -> NoReturn:
        raise TemplateError("The chat template shows a list of content parts as Python data.")

    __repr__ = __str__


class _Part(_NoText, dict[str, Any]):
    """One part of a content."""


class _Parts(_NoText, list[_Part]):
    """A content of several parts."""


class ContentForms:
    """Which forms of content a template shows, asked at the first message of each kind.

    render  (messages, tools) to the prompt's text, None if the template refuses them
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, str, int], bool] = {}

    def shown(self, message: Mapping[str, Any]) -> Message:
        """The message with its content in a form that the template shows.

        Parts stay parts where the template shows so many of them as it shows a text. Elsewhere their texts are joined
        with a newline, as vLLM joins them. A text becomes one part for a template that shows parts alone.
        """
        content = message.get("content")
        if content is None:
            return dict(message)
        kind = _kind(message)
        if content and isinstance(content, list) and self._takes_all(len(content), kind):
            return {**message, "content": _Parts(_Part(part) for part in content)}
        text = text_of(content)
        if not self._asked("text", kind) and self._asked("one part", kind):
            return {**message, "content": _Parts([_Part(type="text", text=text)])}
        return {**message, "content": text}

    def joined(self, message: Mapping[str, Any]) -> Message:
        """The message with its parts joined, if the template shows a text in their place."""
        content = message.get("content")
        if not isinstance(content, list) or not self._asked("text", _kind(message)):
            return dict(message)
        return {**message, "content": text_of(content)}

    def takes(self, role: str) -> bool:
        """Whether the template shows messages of the role."""
        return self._asked("text", role) or self._asked("one part", role)

    def _takes_all(self, num_parts: int, kind: str) -> bool:
        if num_parts > _MAX_ASKED_PARTS:
            return False
        return self._asked(
            "parts", kind, len(_TEXTS) if num_parts <= len(_TEXTS) else 1 << (num_parts - 1).bit_length()
        )

    def _asked(self, form: Literal["text", "one part", "parts"], kind: str, num_parts: int = 0) -> bool:
        if (known := self._known.get((form, kind, num_parts))) is not None:
            return known
        if kind not in _KINDS and len(self._known) >= _MAX_KNOWN:
            return form == "text"
        match form:
            case "text":
                takes = any(shown("".join(_TEXTS), *_TEXTS) for shown in self._questions(kind))
            case "one part":
                takes = any(shown(_odd_parts(_FIRST), _FIRST) for shown in self._questions(kind))
            case "parts":
                texts = (*_TEXTS, *(f"probefive{index}." for index in range(len(_TEXTS), num_parts)))
                answers = {_takes_parts(shown, texts) for shown in self._questions(kind)}
                takes = True in answers and False not in answers
        self._known[form, kind, num_parts] = takes
        return takes

    def _questions(self, kind: str) -> Iterator[_Shown]:
        """For each conversation: what it shows of a content, without blanks; None unless it shows the texts that are
        expected, and nothing of how parts are written."""
        for other in ("probe", _Parts([_Part(type="text", text="probe")])):
            for tools in (None, [PROBE_TOOL]):
                for conversation in _conversations(kind, other):
                    yield partial(self._shown, conversation, tools)

    def _shown(
        self, conversation: Callable[[Any], list[Message]], tools: list[Message] | None, content: Any, *expected: str
    ) -> str | None:
        text = "".join((self._render(conversation(content), tools) or "").casefold().split())
        return text if all(one in text for one in expected) and _ODD_KEY not in text else None


_Shown = Callable[..., str | None]
_KINDS = ("user", "assistant", "call", "tool", "system", "developer")
_MAX_KNOWN = 128  # other roles come from requests


def _kind(message: Mapping[str, Any]) -> str:
    role = str(message.get("role"))
    return "call" if role == "assistant" and message.get("tool_calls") else role


def _takes_parts(shown: _Shown, texts: Sequence[str]) -> bool | None:
    """Whether a conversation shows the parts as it shows a text; None if it shows neither."""
    joined = [shown(between.join(texts), *texts) for between in ("", "\n")]
    parts = shown(_odd_parts(*texts), *texts)
    if joined[0] is not None:
        return parts in joined
    return True if parts is not None else None if shown(_odd_parts(_FIRST), _FIRST) is None else False


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The texts of the parts, joined with a newline."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def _odd_parts(*texts: str) -> _Parts:
    return _Parts(_Part(type="text", text=text, **{_ODD_KEY: ""}) for text in texts)


def _conversations(kind: str, other: Any) -> list[Callable[[Any], list[Message]]]:
    """From the content of a message of the kind to conversations that hold it; the messages beside it have `other`."""
    user, assistant = {"role": "user", "content": other}, {"role": "assistant", "content": other}
    nothing = "" if isinstance(other, str) else _Parts([_Part(type="text", text="")])
    call = {**assistant, "content": nothing, "tool_calls": [_CALL]}
    result = {"role": "tool", "tool_call_id": _CALL["id"], "name": "probe_tool", "content": other}
    given = {"role": kind}
    match kind:
        case "user":
            places = [([], []), ([], [assistant, user]), ([user, assistant], [])]
        case "assistant":
            places = [([user], []), ([user], [user])]
        case "call":
            given, places = call, [([user], [result])]
        case "tool":
            given, places = result, [([user, call], []), ([user, call], [assistant, user])]
        case "system" | "developer":
            places = [([], [user]), ([user, assistant], [user])]
        case _:
            places = [([], [user]), ([user], [])]
    return [partial(_conversation, given, before, behind) for before, behind in places]


def _conversation(given: Message, before: list[Message], behind: list[Message], content: Any) -> list[Message]:
    return [*before, {**given, "content": content}, *behind]
