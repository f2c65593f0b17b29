"""Chat messages to the prompt text, rendered as transformers' `apply_chat_template` renders them.

Templates run in jinja2's immutable sandbox, see plain JSON data only, and neither load nor write anything. Those that
came with uploaded adapters run so in a process of their own besides, see `service.text.template_worker`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from service.text.template_values import HidingEnvironment, unwrapped
from service.text.tokenizer import TextError, read_json

# What `render` gives to a template; a request's own variables may not take these names.
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_REPEATED_ITEMS = 1_000_000
_MAX_REPLACED_ITEMS = 1 << 30
_WIDE_FORMAT = re.compile(r"\d{5,}|\*")
_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_PROBE = "probe of the content format"


class TemplateError(ValueError):
    """The template cannot render these messages: its own `raise_exception`, or an error in it."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks training targets; for serving its body is rendered as if the tag were not there."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(HidingEnvironment):
    """The sandbox, with repetition bounded: `"x" * 10**10`, `10 ** 10**10`, `"%9999999999s" % 1` and their like would
    take the process down."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        obj = unwrapped(obj)
        name, text = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if isinstance(text, str):
            sizes = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
            if name in _PADDING_METHODS and any(size > _MAX_REPEATED_ITEMS for size in sizes):
                raise jinja2.exceptions.SecurityError("the template pads a text too far")
            if name == "replace" and len(args) > 1 and (len(text) + 1) * len(str(args[1])) > _MAX_REPLACED_ITEMS:
                raise jinja2.exceptions.SecurityError("the template replaces with too long a text")
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        # A width may be a number, or come from an argument: "{:>{}}".
        if wrapped is not None and re.search(r"\d{5,}|:[^{}]*\{", value.__self__):
            raise jinja2.exceptions.SecurityError("the template formats a text too wide")
        return wrapped

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not all(isinstance(side, int | float) and abs(side) <= 1024 for side in (left, right)):
            raise jinja2.exceptions.SecurityError("the template raises a number to too high a power")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise jinja2.exceptions.SecurityError("the template formats a text too wide")
        for items, count in ((left, right), (right, left)):
            repeats = hasattr(items, "__len__") and isinstance(count, int)
            if operator == "*" and repeats and len(items) * count > _MAX_REPEATED_ITEMS:
                raise jinja2.exceptions.SecurityError("the template repeats a text too often")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without underscore names, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


class _Dict:
    """`dict(...)` in templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which prompts must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _center(value: str, width: int = 80) -> str:
    if width > _MAX_REPEATED_ITEMS:
        raise jinja2.exceptions.SecurityError("the template pads a text too far")
    return str(value).center(width)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    if _WIDE_FORMAT.search(str(value)):
        raise jinja2.exceptions.SecurityError("the template formats a text too wide")
    return str(value) % (kwargs or args)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["center"] = _center
    environment.filters["format"] = _format
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    environment.hide_names()
    return environment


class ChatTemplate:
    """One compiled template and the special tokens it may name.

    takes_parts  whether the template itself understands a message whose content is a list of text parts; where it does
                 not, the texts of the parts are joined with a newline before it sees them (as vLLM does).
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source.encode()) > _MAX_TEMPLATE_BYTES:
            raise TextError("The chat template is larger than 1 MiB.")
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # Python's own compiler has limits too, and says so in several ways
            raise TextError(f"The chat template is not valid jinja2: {error}.") from error
        self.takes_parts = self._probe_parts()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of `messages`; `variables` are further names for the template, such as `enable_thinking`.

        TemplateError with the template's own words if it refuses the messages.
        """
        assert not (continue_final_message and add_generation_prompt), "the schema refuses both"
        plain = [self._plain_message(message) for message in messages]
        final = plain[-1]
        if continue_final_message:
            plain[-1] = _tag_final_message(final)
        names = {**self._special_tokens, **(variables or {})}
        try:
            text = self._run(names, plain, add_generation_prompt=add_generation_prompt, tools=tools)
        except TemplateError:
            # Some templates write arguments one by one, which a text that is no object does not have.
            objects = [_with_objects(message) for message in plain]
            if objects == plain:
                raise
            text = self._run(names, objects, add_generation_prompt=add_generation_prompt, tools=tools)
        if not continue_final_message:
            return text
        if "content" not in self.source:
            raise TemplateError("The chat template does not show the final message, so it cannot be continued.")
        return _cut_at_tag(text, _final_text(final))

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
        content = plain.get("content")
        if isinstance(content, list) and not self.takes_parts:
            plain["content"] = "\n".join(part["text"] for part in content)
        if plain.get("role") == "developer" and "developer" not in self.source:
            plain["role"] = "system"
        return plain

    def _probe_parts(self) -> bool:
        """A template understands parts if one part renders as the same text does by itself."""
        rendered = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            message = {"role": "user", "content": content}
            try:
                rendered.append(self._run(self._special_tokens, [message]))
            except TemplateError:
                return False
        return rendered[0] == rendered[1]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message with arguments that are texts as the only member of an object."""
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
        parts = [dict(part) for part in content]
        parts[-1]["text"] += _CONTINUE_TAG
        return {**message, "content": parts}
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


def template_source(directory: Path) -> str | None:
    """The chat template of a model or adapter directory: chat_template.jinja, or `chat_template` of
    tokenizer_config.json as a string or as a list of named ones, of which "default" is taken. None without one."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None
