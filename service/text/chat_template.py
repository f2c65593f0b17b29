"""Chat messages to the prompt text, rendered as transformers' `apply_chat_template` renders them.

Templates run in a sandbox (`service.text.template_sandbox`), see plain JSON data only, and neither load nor write
anything. Those that came with uploaded adapters run so in a process of their own besides, see
`service.text.template_worker`.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from adapters.files.paths import DEFAULT_TEMPLATE, TEMPLATE_FILE
from adapters.text.side_files import TEMPLATES_FOLDER
from adapters.text.tokenizer_files import named_templates
from service.text.content_parts import PROBE_TOOL, SYSTEM_ROLES, ContentForms
from service.text.generic_tools import written_into_texts
from service.text.template_sandbox import TemplateError, template_environment
from service.text.tokenizer import TextError, read_json

# Names that `render` passes to a template; a request's own variables may not take these names.
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_MAX_TEMPLATE_BYTES = 1 << 20
# The name of the template for chats with tools, where a model has one.
TOOL_TEMPLATE = "tool_use"
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_OTHER_CHAT = {"role": "user", "content": "?"}


class ChatTemplate:
    """One compiled template and the special tokens it may name. Contents reach it in a form that it shows
    (`service.text.content_parts`)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source.encode()) > _MAX_TEMPLATE_BYTES:
            raise TextError("The chat template is larger than 1 MiB.")
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = template_environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # Python's own compiler has limits too, and says so in several ways
            raise TextError(f"The chat template is not valid jinja2: {error}.") from error
        self._contents = ContentForms(self._probe)

    def with_special_tokens(self, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """The same template with other special tokens."""
        other = copy.copy(self)
        other._special_tokens = dict(special_tokens)
        return other

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        writes_tools: bool = False,
    ) -> str:
        """The prompt text of `messages`; `variables` are further names for the template, such as `enable_thinking`.

        writes_tools  tools, calls and results are written into texts, for a template that does not show them

        TemplateError with the template's own words if it refuses the messages.
        """
        assert not (continue_final_message and add_generation_prompt), "the schema refuses both"
        if writes_tools:
            messages = written_into_texts(messages, tools or (), takes_system=self._contents.takes("system"))
            tools = None
        plain = [self._plain_message(message) for message in messages]
        final = plain[-1]
        if continue_final_message:
            plain[-1] = _tag_final_message(final)
        text = self._shown(plain, variables or {}, add_generation_prompt=add_generation_prompt, tools=tools)
        if not continue_final_message:
            return text
        if "content" not in self.source:
            raise TemplateError("The chat template does not show the final message, so it cannot be continued.")
        return _cut_at_tag(text, _final_text(final))

    def shows_tools(self) -> bool:
        """Whether the template shows `tools` to its model; true of one that refuses short chats with them."""
        user = {"role": "user", "content": "probe"}
        chats = ([user], [{"role": "system", "content": "probe"}, user])
        shown = [text for chat in chats if (text := self._probe(chat, [PROBE_TOOL])) is not None]
        return not shown or any(PROBE_TOOL["function"]["name"] in text for text in shown)

    def _shown(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], **options: Any) -> str:
        """The text of the messages in the first spelling that the template does not refuse. TemplateError if it
        refuses them in all."""
        names, tried = {**self._special_tokens, **variables}, messages
        try:
            return self._run(names, messages, **options)
        except TemplateError as error:
            refusal = error
        for respelt in (_with_objects, self._contents.joined):
            spelling = [respelt(message) for message in tried]
            if spelling == tried or isinstance(refusal.__cause__, MemoryError):
                continue
            tried = spelling
            try:
                return self._run(names, spelling, **options)
            except TemplateError as error:
                refusal = error
        raise refusal

    def _probe(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        try:
            return self._run(self._special_tokens, messages, tools=tools)
        except TemplateError as error:
            if isinstance(error.__cause__, MemoryError):  # nobody knows what is left of the process
                raise
            return None

    def _run(
        self,
        names: Mapping[str, Any],
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        # One dict, never keywords: `names` come from requests and may be called anything, `self` for one.
        ours = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools, "documents": None}
        try:
            return self._template.render({**names, **ours})
        except TemplateError:
            raise
        except Exception as error:  # a template may fail in any way that Python can
            raise TemplateError(f"The chat template failed on these messages: {error}.") from error

    def _plain_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self._knows_developers():
            plain["role"] = "system"
        return self._contents.shown(plain)

    def _knows_developers(self) -> bool:
        """Whether it names the role, and shows its messages where it shows those of the system."""
        takes = self._contents.takes
        return "developer" in self.source and (takes("developer") or not takes("system"))


def shared_beginnings(
    render: Callable[..., str],
    text: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    **options: Any,
) -> tuple[int, ...]:
    """Characters of a chat's rendered text that later prompts are likely to begin with: system prompt and tools, which
    other chats share, and what stands before the generation prompt, in whose place the next turn has the answer without
    its thoughts. Found by rendering such chats with the template's `render`; none where it refuses them."""
    system = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    chats: list[tuple[Sequence[Mapping[str, Any]], bool]] = []
    if system or tools:
        chats.append(([*system, _OTHER_CHAT], add_generation_prompt))
    if add_generation_prompt:
        chats.append((messages, False))
    found = []
    for chat, generates in chats:
        with suppress(TemplateError):
            other = render(chat, add_generation_prompt=generates, tools=tools, **options)
            found.append(bisect_left(range(len(text)), True, key=lambda i: text[: i + 1] != other[: i + 1]))
    return tuple(found)


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message with arguments that are texts as the only member of an object: some templates write arguments one by
    one."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": {"arguments": call["function"]["arguments"]}}}
        if isinstance(call["function"]["arguments"], str)
        else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _tag_final_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        last = type(content[-1])(content[-1], text=content[-1]["text"] + _CONTINUE_TAG)
        return {**message, "content": type(content)([*content[:-1], last])}
    return {**message, "content": (content or "") + _CONTINUE_TAG}


def _final_text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content[-1]["text"] if isinstance(content, list) else content


def _cut_at_tag(text: str, final: str) -> str:
    """The text up to the end of the final message. A template that trims the message trims the tag's space too."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise TemplateError("The chat template does not show the final message, so it cannot be continued.")
    kept_space = text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return text[:at] if kept_space else text[:at].rstrip()


def template_sources(directory: Path) -> dict[str, str]:
    """The chat templates of a model directory by name, the usual one as "default": chat_template.jinja and
    additional_chat_templates/NAME.jinja, or else `chat_template` of tokenizer_config.json, or else of
    chat_template.json. TextError for what is none, UnicodeDecodeError for a file that is not UTF-8."""
    files = {path.stem: path for path in sorted((directory / TEMPLATES_FOLDER).glob("*.jinja"))}
    if (directory / TEMPLATE_FILE).is_file():
        files[DEFAULT_TEMPLATE] = directory / TEMPLATE_FILE
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    for file in ("tokenizer_config.json", "chat_template.json"):
        found = named_templates(read_json(directory / file).get("chat_template"))
        if found is None:
            raise TextError(f"{file} of the model: chat_template must be text or a list of named templates.")
        if found:
            return found
    return {}


def chosen_name(names: Collection[str], asked: str | None, *, has_tools: bool) -> str | None:
    """The name of the template that renders a chat, as transformers chooses: the one that is asked for, or else
    "tool_use" with tools, or else "default". None where there is no such one."""
    if asked is None:
        asked = TOOL_TEMPLATE if has_tools and TOOL_TEMPLATE in names else DEFAULT_TEMPLATE
    return asked if asked in names else None
